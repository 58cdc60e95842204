"""The record of experience: `Prompt`, `Sample`, `Batch`.

Axes, in docstrings and as suffixes: B sequences, N responses (one or more sequences), T tokens, V vocabulary,
G groups (all responses to one prompt), P pairs. Index t of every log-prob is the log-prob of tokens[t] given
tokens[<t], in nats; a first token has none. What isn't known is None in a record and NaN in a tensor, never 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from agro.errors import Refused

Messages = list[dict[str, Any]]
Text = str | Messages
Role = Literal["policy", "log", "expert"]
ROLES: tuple[str, ...] = get_args(Role)
UNKNOWN_VERSION = -1
ROUNDING = 1e-3  # by which the log-prob of a token that is all but certain may pass 0, in half precision
_NUMBERS = (int, float, np.integer, np.floating)


def prompt_hash(prompt: Text) -> str:
    """The default `prompt_id`: 16 hex digits of the SHA-256 of the prompt's text or of its messages as canonical JSON."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_text(prompt: Any, where: str) -> None:
    """Raise `Refused` unless `prompt` is text or a list of messages with `role` and `content`."""
    if isinstance(prompt, str):
        return
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    ):
        return
    raise Refused(
        f"{where}: prompt: expected text, or a list of messages with 'role' and 'content', got {prompt!r:.80}"
    )


def check_turns(turns: Any, where: str) -> None:
    """Raise `Refused` unless `turns` are messages that can follow a prompt: the last of them is the assistant's."""
    if (
        isinstance(turns, list)
        and turns
        and all(isinstance(m, dict) and "role" in m and ("content" in m or "tool_calls" in m) for m in turns)
        and turns[-1]["role"] == "assistant"
    ):
        return
    raise Refused(
        f"{where}: expected a list of messages with 'role' and 'content' (or 'tool_calls'), the last one the assistant's, got {turns!r:.80}"
    )


@dataclass(frozen=True)
class Prompt:
    """What a policy is asked. `id` makes the group; `columns` are what a reward function may read (`answer`, …)."""

    text: Text
    id: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_text(self.text, f"prompt {self.id}".rstrip())
        if not self.id:
            object.__setattr__(self, "id", prompt_hash(self.text))


@dataclass(frozen=True, eq=False)
class Sample:
    """One response to a prompt, whoever wrote it; a row of the store.

    Origins differ only in what is known: samples of our own carry tokens, `behavior_logp` and `version`; a log may
    carry only texts and a reward. `tokens` [T] is the whole sequence, prompt included; `action` [T] marks the tokens
    that the policy chose; `learn` [T] those to take a gradient from (None: the same as `action`).
    """

    prompt: Text
    response: str
    reward: float | None = (
        None  # of the whole response; None: not scored, or scoring failed (see meta["reward_error"])
    )
    prompt_id: str = ""  # what makes a group
    episode: str | None = None  # rows that are pieces of one episode count as one response
    tokens: NDArray[np.int32] | None = None  # [T]
    action: NDArray[np.bool_] | None = None  # [T]
    learn: NDArray[np.bool_] | None = None  # [T]
    tokenizer: str | None = None  # fingerprint of what encoded the tokens
    behavior_logp: NDArray[np.float32] | None = (
        None  # [T] under the distribution sampled from; NaN where it has none
    )
    sampling: dict[str, Any] | None = None  # temperature, top_k, top_p, min_p, seed, …
    context_tokens: NDArray[np.int32] | None = None  # what was conditioned on, where it isn't the prompt
    token_reward: NDArray[np.float32] | None = None  # [T]
    version: int | NDArray[np.int32] = (
        UNKNOWN_VERSION  # optimiser steps of the weights that produced it; -1: not ours
    )
    role: Role = "log"
    source: str = ""  # "file:…", a model's name
    meta: dict[str, Any] = field(default_factory=dict)  # answer, finish, reward parts, parent, hint
    id: int | None = None  # row of the store; None before it is stored

    def __post_init__(self) -> None:
        put = object.__setattr__
        check_text(self.prompt, "sample")
        if not self.prompt_id:
            put(self, "prompt_id", prompt_hash(self.prompt))
        where = (
            f"sample {self.id} of prompt {self.prompt_id}"
            if self.id is not None
            else f"sample of prompt {self.prompt_id}"
        )
        if not isinstance(self.response, str):
            raise Refused(f"{where}: response: expected text, got {self.response!r:.80}")
        if self.role not in ROLES:
            raise Refused(f"{where}: role: expected one of {', '.join(ROLES)}, got {self.role!r}")
        if self.reward is not None:
            if (
                isinstance(self.reward, bool)
                or not isinstance(self.reward, _NUMBERS)
                or not math.isfinite(self.reward)
            ):
                raise Refused(
                    f"{where}: reward: expected a finite number, or None where it is unknown, got {self.reward!r}"
                )
            put(self, "reward", float(self.reward))
        for name, dtype in _ARRAYS.items():
            value = getattr(self, name)
            if value is not None and not (name == "version" and isinstance(value, int)):
                put(self, name, _array(value, dtype, f"{where}: {name}"))
        if np.min(self.version, initial=0) < UNKNOWN_VERSION:
            raise Refused(
                f"{where}: version: expected a number of optimiser steps, or -1 where unknown, got {self.version}"
            )
        self._check_tokens(where)

    def _check_tokens(self, where: str) -> None:
        if self.tokens is None:
            held = [
                n
                for n in ("action", "learn", "behavior_logp", "token_reward")
                if getattr(self, n) is not None
            ]
            if held:
                raise Refused(
                    f"{where}: {', '.join(held)} given without tokens; give tokens as well, or none of them"
                )
            return
        T = len(self.tokens)
        if self.action is None:
            raise Refused(
                f"{where}: tokens given without action (which of the {T} tokens are the response's)"
            )
        for name in ("action", "learn", "behavior_logp", "token_reward", "version"):
            value = getattr(self, name)
            if isinstance(value, np.ndarray) and len(value) != T:
                raise Refused(
                    f"{where}: {name}: expected one value for each of the {T} tokens, got {len(value)}"
                )
        if T and self.tokens.min() < 0:
            at = int(self.tokens.argmin())
            raise Refused(
                f"{where}: tokens: expected ids of the vocabulary, got {self.tokens[at]} at index {at}"
            )
        mask = self.mask
        assert mask is not None
        if not mask.any():
            raise Refused(
                f"{where}: the mask of tokens to learn from is empty; a response needs one token at least (an end token counts)"
            )
        if self.learn is not None and (self.learn & ~self.action).any():
            raise Refused(
                f"{where}: learn: expected a part of action, got index {int((self.learn & ~self.action).argmax())}, which isn't an action"
            )
        if self.behavior_logp is not None:
            bad = (self.behavior_logp > 0) | np.isinf(self.behavior_logp)
            if bad.any():
                at = int(bad.argmax())
                raise Refused(
                    f"{where}: behavior_logp: expected log-probs (finite, at most 0; NaN where unknown), got {self.behavior_logp[at]} at index {at}"
                )
        if self.token_reward is not None and np.isinf(self.token_reward).any():
            raise Refused(f"{where}: token_reward: expected finite numbers, got an infinity")

    @property
    def mask(self) -> NDArray[np.bool_] | None:
        """[T] tokens to take a gradient from."""
        return self.action if self.learn is None else self.learn

    @property
    def knows_behavior(self) -> bool:
        """Whether every action has its behaviour log-prob."""
        return (
            self.behavior_logp is not None
            and self.action is not None
            and bool(np.isfinite(self.behavior_logp[self.action]).all())
        )

    @property
    def oldest_version(self) -> int:
        """The version that its age is counted from: of a version a token, the least among the actions."""
        if not isinstance(self.version, np.ndarray):
            return self.version
        return int((self.version if self.action is None else self.version[self.action]).min())

    def replace(self, **changes: Any) -> Sample:
        return dataclasses.replace(self, **changes)

    def __eq__(self, other: object) -> bool:
        """Bit for bit, `id` left out: it says where a record lies, not what it is."""
        if not isinstance(other, Sample):
            return NotImplemented
        return all(
            _same(getattr(self, f.name), getattr(other, f.name))
            for f in dataclasses.fields(self)
            if f.name != "id"
        )

    __hash__ = None  # type: ignore[assignment]


_ARRAYS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "action": np.bool_,
    "learn": np.bool_,
    "behavior_logp": np.float32,
    "context_tokens": np.int32,
    "token_reward": np.float32,
    "version": np.int32,
}


def _array(value: ArrayLike, dtype: type[np.generic], where: str) -> NDArray[Any]:
    try:
        raw = np.asarray(value)
        out = raw.astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused(f"{where}: expected a list of {dtype.__name__}, got {value!r:.80}") from error
    if out.ndim != 1:
        raise Refused(f"{where}: expected one dimension, got shape {out.shape}")
    if dtype is not np.float32 and raw.size and not (raw == out).all():
        raise Refused(f"{where}: expected {dtype.__name__} values, got {value!r:.80}")
    out.flags.writeable = False
    return out


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if (
            not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray))
            or a.shape != b.shape
            or a.dtype != b.dtype
        ):
            return False
        if a.dtype == np.float32:
            return bool(((a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b))).all())
        return bool((a == b).all())
    if isinstance(a, (float, dict, list)):  # as JSON tells 0.0 from -0.0 and 1 from 1.0 and true
        return type(a) is type(b) and json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    return type(a) is type(b) and a == b


@dataclass(frozen=True)
class Batch:
    """The tensors of one optimiser step: whole groups, whatever their origins and ages.

    `mask` [B,T] is of the tokens to learn from. Per-token inputs hold NaN where they are unknown. Floating inputs
    are float64 unless they came as tensors. `tokens` and `lengths` are None where an objective is evaluated on
    given log-probs, without a model.
    """

    mask: Tensor  # [B,T] bool
    reward: Tensor  # [B]; NaN: unknown
    group: Tensor  # [B] 0 … G-1
    response: Tensor  # [B] 0 … N-1: rows of one episode are one response
    weight: Tensor  # [B]; one value a group
    age: Tensor  # [B] optimiser steps behind, 0 = fresh; NaN: unknown
    group_names: tuple[str, ...]  # [G]
    role: tuple[str, ...]  # [B]
    ids: tuple[str, ...]  # [B] what a message calls the row
    ref_logp: Tensor | None = None  # [B,T]
    behavior_logp: Tensor | None = None  # [B,T]
    old_logp: Tensor | None = None  # [B,T] of our own policy when the batch was drawn
    pairs: Tensor | None = None  # [P,2] rows (winner, loser)
    votes: Tensor | None = None  # [P,2]
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: Tensor | None = None  # [B,T]
    lengths: Tensor | None = None  # [B]

    @classmethod
    def of(
        cls,
        *,
        mask: Any,
        reward: Any,
        group: Sequence[Hashable] | Any,
        ref_logp: Any = None,
        behavior_logp: Any = None,
        old_logp: Any = None,
        age: Any = None,
        role: str | Sequence[str] | None = None,
        weight: Any = None,
        pairs: Any = None,
        votes: Any = None,
        extra: Mapping[str, Any] | None = None,
        response: Sequence[Hashable] | None = None,
        tokens: Any = None,
        lengths: Any = None,
        ids: Sequence[str] | None = None,
    ) -> Batch:
        """Check and index what stands for B rows; see `Batch` for the shapes. Raises `Refused` naming the row."""
        m = _tensor(mask, "mask")
        if m.ndim != 2 or 0 in m.shape:
            raise Refused(f"mask: expected shape [B,T], got {list(m.shape)}")
        if m.dtype != torch.bool:
            if not ((m == 0) | (m == 1)).all():
                bad = int((~((m == 0) | (m == 1))).any(1).int().argmax())
                raise Refused(f"mask: row {bad}: expected true and false, got {m[bad].tolist()!r:.80}")
            m = m.bool()
        B, T = m.shape
        groups = _hashables(group, B, "group")
        names = {g: i for i, g in enumerate(dict.fromkeys(groups))}
        rows = tuple(f"row {i} (group {g})" for i, g in enumerate(groups)) if ids is None else tuple(ids)
        if len(rows) != B:
            raise Refused(f"ids: expected {B} values, one a row, got {len(rows)}")
        if m[:, 0].any():
            raise Refused(
                f"mask: {rows[int(m[:, 0].int().argmax())]}: the first token is in the mask, but a first token has no log-prob"
            )
        if not m.any(1).all():
            raise Refused(
                f"mask: {rows[int((~m.any(1)).int().argmax())]} is empty: there is nothing to learn from in it"
            )
        r = _floats(reward, (B,), "reward")
        if r.isinf().any():
            raise Refused(
                f"reward: {rows[int(r.isinf().int().argmax())]}: expected a finite number, or NaN where it is unknown, got an infinity"
            )
        w = torch.ones(B, dtype=torch.float64) if weight is None else _floats(weight, (B,), "weight")
        if not (w.isfinite() & (w >= 0)).all():
            bad = int((~(w.isfinite() & (w >= 0))).int().argmax())
            raise Refused(f"weight: {rows[bad]}: expected a finite number, 0 or more, got {float(w[bad])}")
        a = torch.full((B,), math.nan, dtype=torch.float64) if age is None else _floats(age, (B,), "age")
        roles = (
            ["policy"] * B
            if role is None
            else [role] * B
            if isinstance(role, str)
            else _hashables(role, B, "role")
        )
        for i, x in enumerate(roles):
            if x not in ROLES:
                raise Refused(f"role: {rows[i]}: expected one of {', '.join(ROLES)}, got {x!r}")
        member = _hashables(response, B, "response") if response is not None else list(range(B))
        order = {k: i for i, k in enumerate(dict.fromkeys(member))}

        def per_token(value: Any, name: str) -> Tensor | None:
            if value is None:
                return None
            if isinstance(value, (list, tuple)):
                value = [[math.nan] * T if x is None else x for x in value]
            out = _floats(value, (B, T), name)
            bad = m & (out > ROUNDING)
            if bad.any():
                row, at = (int(i) for i in bad.nonzero()[0])
                raise Refused(
                    f"{name}: {rows[row]}, index {at}: expected a log-prob (at most 0; NaN where unknown), got "
                    f"{float(out[row, at])}; give the log of the token's probability"
                )
            return out

        P = None if pairs is None else _tensor(pairs, "pairs").long()
        if P is not None:
            P = P.reshape(-1, 2) if P.numel() == 0 else P
            if P.ndim != 2 or P.shape[1] != 2:
                raise Refused(f"pairs: expected shape [P,2], got {list(P.shape)}")
            if ((P < 0) | (P >= B)).any():
                bad = int(((P < 0) | (P >= B)).any(1).int().argmax())
                raise Refused(f"pairs: pair {bad}: expected rows 0 to {B - 1}, got {P[bad].tolist()}")
        v = None if votes is None else _floats(votes, (0 if P is None else len(P), 2), "votes")
        if v is not None and ((v < 0) | v.isinf()).any():
            bad = int(((v < 0) | v.isinf()).any(1).int().argmax())
            raise Refused(
                f"votes: pair {bad}: expected 0 or more, or NaN where unknown, got {v[bad].tolist()}"
            )
        return cls(
            mask=m,
            reward=r,
            group=torch.tensor([names[g] for g in groups]),
            response=torch.tensor([order[k] for k in member]),
            weight=w,
            age=a,
            group_names=tuple(str(g) for g in names),
            role=tuple(map(str, roles)),
            ids=rows,
            ref_logp=per_token(ref_logp, "ref_logp"),
            behavior_logp=per_token(behavior_logp, "behavior_logp"),
            old_logp=per_token(old_logp, "old_logp"),
            pairs=P,
            votes=v,
            extra={k: _tensor(v, f"extra {k}") for k, v in (extra or {}).items()},
            tokens=None if tokens is None else _tensor(tokens, "tokens", (B, T)).long(),
            lengths=None if lengths is None else _tensor(lengths, "lengths", (B,)).long(),
        )

    @property
    def n_groups(self) -> int:
        return len(self.group_names)

    def replace(self, **changes: Any) -> Batch:
        return dataclasses.replace(self, **changes)

    def rows(self, index: Tensor) -> Batch:
        """The batch of those rows alone ([K] row numbers), its groups and responses numbered anew.

        Pairs that lose a row leave with it.
        """
        B = len(self.mask)
        kept: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            v = getattr(self, f.name)
            if isinstance(v, Tensor) and f.name not in ("pairs", "votes"):
                kept[f.name] = v[index]
        groups, kept["group"] = kept["group"].unique(return_inverse=True)
        kept["response"] = kept["response"].unique(return_inverse=True)[1]
        at = index.tolist()
        kept["group_names"] = tuple(self.group_names[g] for g in groups.tolist())
        kept["role"], kept["ids"] = tuple(self.role[i] for i in at), tuple(self.ids[i] for i in at)
        kept["extra"] = {k: v[index] if v.ndim and len(v) == B else v for k, v in self.extra.items()}
        if self.pairs is not None:
            place = torch.full((B,), -1, device=index.device).index_put(
                (index,), torch.arange(len(index), device=index.device)
            )
            whole = (place[self.pairs] >= 0).all(1)
            kept["pairs"] = place[self.pairs[whole]]
            kept["votes"] = None if self.votes is None else self.votes[whole]
        return dataclasses.replace(self, **kept)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""
        moved: dict[str, Any] = {"extra": {k: v.to(device) for k, v in self.extra.items()}}
        for f in dataclasses.fields(self):
            if isinstance(v := getattr(self, f.name), Tensor):
                moved[f.name] = v.to(device)
        return dataclasses.replace(self, **moved)


def _tensor(value: Any, name: str, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Tensor:
    try:
        t = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value, dtype))
    except (TypeError, ValueError) as error:
        of_shape = "" if shape is None else f" of shape {list(shape)}"
        raise Refused(f"{name}: expected numbers{of_shape}, got {value!r:.80}") from error
    if shape is not None and tuple(t.shape) != shape:
        raise Refused(f"{name}: expected shape {list(shape)}, got {list(t.shape)}")
    return t


def _floats(value: Any, shape: tuple[int, ...], name: str) -> Tensor:
    t = _tensor(value, name, shape, np.float64)
    return t if t.is_floating_point() else t.double()


def _hashables(value: Any, B: int, name: str) -> list[Hashable]:
    try:
        items = value.tolist() if isinstance(value, (Tensor, np.ndarray)) else list(value)
        set(items)
    except TypeError as error:
        raise Refused(f"{name}: expected hashable values, one a row, got {value!r:.80}") from error
    if len(items) != B:
        raise Refused(f"{name}: expected {B} values, one a row, got {len(items)}")
    return items
