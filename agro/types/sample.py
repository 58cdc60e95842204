"""A sample: one response, and what is known of it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import NoneType
from typing import Any, Literal, NamedTuple, Self, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agro.errors import Refused
from agro.types.conversation import Text, conversation, prompt_hash
from agro.types.ends import ENDS, End, end_in, thought_in
from agro.types.kept_sets import problem

Role = Literal["policy", "log", "expert"]
ROLES: tuple[Role, ...] = get_args(Role)
UNKNOWN_VERSION = -1
ROUNDING = 1e-3  # by which the log-prob of an almost certain token may exceed 0, in half precision
_NUMBERS = (int, float, np.integer, np.floating)


class _Array(NamedTuple):
    """An array of a sample: its type, and which of its values are refused as not `expected`."""

    dtype: np.dtype[Any]
    expected: str = ""
    is_bad: Callable[[NDArray[Any]], NDArray[np.bool_]] | None = None


_LOGPS = "log-probs (finite, at most 0; NaN where unknown)"
_VERSION = "a number of optimizer steps, or -1 where unknown"
_INT, _FLOAT, _BOOL = (np.dtype(kind) for kind in (np.int32, np.float32, np.bool_))
_ARRAYS: dict[str, _Array] = {
    "tokens": _Array(_INT, "ids of the vocabulary", lambda x: x < 0),
    "action": _Array(_BOOL),
    "learn": _Array(_BOOL),
    "behavior_logp": _Array(_FLOAT, _LOGPS, lambda x: (x > 0) | np.isinf(x)),
    "context_tokens": _Array(_INT, "ids of the vocabulary", lambda x: x < 0),
    "token_reward": _Array(_FLOAT, "finite numbers, or NaN where unknown", np.isinf),
    "version": _Array(_INT, _VERSION, lambda x: x < UNKNOWN_VERSION),
    "kept": _Array(_INT, "ids of the vocabulary", lambda x: x < 0),
    "kept_count": _Array(_INT, "numbers of ids", lambda x: x < 0),
}
_PER_TOKEN = ("action", "learn", "behavior_logp", "token_reward", "version", "kept_count")


@dataclass(frozen=True, eq=False)
class Sample:
    """One response to a prompt, whoever wrote it; a row of the store.

    Samples of different origins differ in what is known: our own have tokens, `behavior_logp` and
    `version`; a log may have only texts and a reward.
    """

    prompt: Text
    response: str
    reward: float | None = None  # of the response; None: not scored, or failed (meta["reward_error"])
    prompt_id: str = ""  # what makes a group
    episode: str | None = None  # rows that are pieces of one episode count as one response
    tokens: NDArray[np.int32] | None = None  # [T] the complete sequence, prompt included
    action: NDArray[np.bool_] | None = None  # [T] the tokens that the policy chose
    learn: NDArray[np.bool_] | None = None  # [T] those to take a gradient from; None: the same as action
    tokenizer: str | None = None  # fingerprint of what encoded the tokens
    behavior_logp: NDArray[np.float32] | None = None  # [T] under the distribution sampled from; NaN: unknown
    sampling: dict[str, Any] | None = None  # temperature, top_k, top_p, min_p, seed, …
    # Kept sets: the ids that truncation left to choose from, ascending for each token; None: not recorded.
    kept: NDArray[np.int32] | None = None  # those of all tokens one after the other
    kept_count: NDArray[np.int32] | None = None  # [T] how many; 0: the whole vocabulary, or not an action
    context_tokens: NDArray[np.int32] | None = None  # what was conditioned on, where it isn't the prompt
    token_reward: NDArray[np.float32] | None = None  # [T]
    version: int | NDArray[np.int32] = UNKNOWN_VERSION  # optimizer steps of its weights; -1: not ours
    role: Role = "log"
    source: str = ""  # "file:…", a model's name
    meta: dict[str, Any] = field(default_factory=dict)  # answer, finish, reward parts, parent, hint
    id: int | None = None  # row of the store; None before it is stored

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """The same as `Sample(**fields)` of known names, in half of the time: the constructor of a frozen
        class calls a function for each field."""
        sample = cls.__new__(cls)
        sample.__dict__.update(_UNKNOWN, meta={})
        sample.__dict__.update(fields)
        sample.__post_init__()
        return sample

    @classmethod
    def all_of(cls, rows: Iterable[Mapping[str, Any]]) -> list[Self]:
        """`of` each, in less time: what is plainly right is checked for all of them together."""
        samples = []
        for fields in rows:
            samples.append(cls.__new__(cls))
            samples[-1].__dict__.update(_UNKNOWN, meta={})
            samples[-1].__dict__.update(fields)
        if not _are_plain(samples):
            for sample in samples:
                sample.__post_init__()
        return samples

    def __post_init__(self) -> None:
        if type(self.prompt) is not str:
            self._put("prompt", conversation(self.prompt, "sample"))
        if not self.prompt_id:
            self._put("prompt_id", prompt_hash(self.prompt))
        if not isinstance(self.response, str):
            raise self._refusal(f"response: expected text, got {self.response!r:.80}")
        if self.role not in ROLES:
            raise self._refusal(f"role: expected one of {', '.join(ROLES)}, got {self.role!r}")
        if self.reward is not None:
            self._put("reward", self._finite(self.reward))
        values = self.__dict__
        arrays = [name for name in _ARRAYS if not isinstance(values[name], int | None)]
        for name in arrays:
            self._put(name, self._typed(name, values[name], _ARRAYS[name].dtype))
        if isinstance(self.version, int) and self.version < UNKNOWN_VERSION:
            raise self._refusal(f"version: expected {_VERSION}, got {self.version}")
        if not arrays:
            return
        self._check_lengths(arrays)
        for name in arrays:
            self._check_values(name, _ARRAYS[name])
        self._check_masks()
        self._check_kept()

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _refusal(self, text: str) -> Refused:
        name = "sample" if self.id is None else f"sample {self.id}"
        return Refused(f"{name} of prompt {self.prompt_id}: {text}")

    def _finite(self, reward: Any) -> float:
        if isinstance(reward, _NUMBERS) and not isinstance(reward, bool) and math.isfinite(reward):
            return float(reward)
        raise self._refusal(f"reward: expected a finite number, or None where it is unknown, got {reward!r}")

    def _typed(self, name: str, value: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
        if isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == 1:
            if value.flags.writeable:
                value = value.copy()
                value.flags.writeable = False
            return value
        try:
            raw = np.asarray(value)
            array = raw.astype(dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._refusal(f"{name}: expected a list of {dtype.name}, got {value!r:.80}") from error
        if array.ndim != 1:
            raise self._refusal(f"{name}: expected one dimension, got shape {array.shape}")
        if dtype != _FLOAT and raw.size and not (raw == array).all():
            raise self._refusal(f"{name}: expected {dtype.name} values, got {value!r:.80}")
        array.flags.writeable = False
        return array

    def _check_lengths(self, arrays: Sequence[str]) -> None:
        per_token = [name for name in arrays if name in _PER_TOKEN]
        if self.tokens is None:
            if per_token:
                names = ", ".join(per_token)
                raise self._refusal(f"{names} given without tokens; give tokens as well, or none of them")
            return
        T = len(self.tokens)
        if self.action is None:
            raise self._refusal(f"tokens given without action (which of the {T} tokens are the response's)")
        for name in per_token:
            length = len(getattr(self, name))
            if length != T:
                raise self._refusal(f"{name}: expected one value for each of the {T} tokens, got {length}")

    def _check_values(self, name: str, array: _Array) -> None:
        values = getattr(self, name)
        if array.is_bad is None:
            return
        bad = array.is_bad(values)
        if np.count_nonzero(bad):  # in a third of the time of any()
            index = int(bad.argmax())
            raise self._refusal(f"{name}: expected {array.expected}, got {values[index]} at index {index}")

    def _check_masks(self) -> None:
        if self.mask is None or self.action is None:
            return
        if not np.count_nonzero(self.mask):
            text = "a response needs at least one token (an end token counts)"
            raise self._refusal(f"the mask of tokens to learn from is empty; {text}")
        if self.learn is None:
            return
        outside = self.mask & ~self.action
        if outside.any():
            index = int(outside.argmax())
            raise self._refusal(f"learn: expected a part of action, got index {index}, which isn't an action")

    def _check_kept(self) -> None:
        if (self.kept is None) != (self.kept_count is None):
            name = "kept_count" if self.kept is None else "kept"
            raise self._refusal(f"expected both kept and kept_count, or none of them, got {name} alone")
        if self.kept is None or self.kept_count is None:
            return
        assert self.tokens is not None
        assert self.action is not None
        wrong = problem(self.tokens, self.action, self.kept, self.kept_count)
        if wrong is not None:
            raise self._refusal(wrong)

    @property
    def stored_id(self) -> int:
        """The id of a sample that is in a store."""
        assert self.id is not None
        return self.id

    @property
    def mask(self) -> NDArray[np.bool_] | None:
        """[T] tokens to take a gradient from."""
        return self.action if self.learn is None else self.learn

    @property
    def observed(self) -> NDArray[np.bool_] | None:
        """[T] what an environment answered: tokens after the first to learn from that aren't actions."""
        if self.mask is None or self.action is None:
            return None
        return np.logical_or.accumulate(self.mask) & ~self.action

    @property
    def knows_behavior(self) -> bool:
        """Whether every action has its behavior log-prob."""
        if self.behavior_logp is None or self.action is None:
            return False
        known = np.isfinite(self.behavior_logp[self.action])
        return bool(np.count_nonzero(known) == len(known))

    @property
    def truncation(self) -> str:
        """The settings that excluded tokens which aren't known; see the function `truncation`."""
        return truncation(self.sampling, recorded=self.kept is not None)

    @property
    def end(self) -> End:
        """Whether the response finished, or was cut, by `meta["finish"]`; a word that no program says is
        unknown."""
        finish = self.meta.get("finish")
        known = ENDS.get(finish) if isinstance(finish, str) else None
        return known or ("unknown" if finish is None else end_in(finish) or "unknown")

    @property
    def thought(self) -> Literal["open", "closed"] | None:
        """Whether the last thought of the response is closed; None where it has none. What a chat template
        opened is in `meta["thought"]`, for responses that were sampled."""
        prompt = self.prompt if isinstance(self.prompt, str) else (self.prompt[-1:] or [{}])[0].get("content")
        known = self.meta.get("thought")
        if known in ("open", "closed"):
            return cast(Literal["open", "closed"], known)
        return thought_in(prompt if isinstance(prompt, str) else "", self.response)

    @property
    def oldest_version(self) -> int:
        """The version that staleness is counted from: of a version per token, the least among the actions."""
        if not isinstance(self.version, np.ndarray):
            return self.version
        assert self.action is not None
        return int(self.version[self.action].min())

    def replace(self, **changes: Any) -> Sample:
        return dataclasses.replace(self, **changes)

    def __eq__(self, other: object) -> bool:
        """Bit for bit, without `id`, which says where a record is stored, not what it is."""
        if not isinstance(other, Sample):
            return NotImplemented
        names = (f.name for f in dataclasses.fields(self) if f.name != "id")
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


def _are_plain(samples: Sequence[Sample]) -> bool:
    """Whether all of them pass `__post_init__`, which would change nothing; False where that isn't sure.

    Of arrays, whose functions take longer to call than to compute, the values of all samples are one array.
    """
    rows = [sample.__dict__ for sample in samples]
    with_tokens = [row for row in rows if row["tokens"] is not None]
    return all(map(_is_plain, rows)) and (not with_tokens or _are_arrays(with_tokens))


def _is_plain(row: Mapping[str, Any]) -> bool:
    """As `_are_plain`, of what isn't an array."""
    if conversation(row["prompt"], "sample") is not row["prompt"]:
        return False
    reward, version = row["reward"], row["version"]
    is_known = type(row["response"]) is str and type(row["prompt_id"]) is str and row["role"] in ROLES
    is_number = reward is None or (type(reward) is float and math.isfinite(reward))
    is_version = type(version) is int and version >= UNKNOWN_VERSION
    others = _all(row) if row["tokens"] is None else _unusual(row)
    is_usual = set(map(type, others)) == {NoneType}
    return is_known and row["prompt_id"] != "" and is_number and is_version and is_usual


def _are_arrays(rows: Sequence[Mapping[str, Any]]) -> bool:
    """As `_are_plain`, of the arrays of rows with tokens."""
    lengths = [len(row["tokens"]) for row in rows]
    for name in _USUAL:
        dtype, _, is_bad = _ARRAYS[name]
        given = [(row[name], length) for row, length in zip(rows, lengths) if row[name] is not None]
        for x, length in given:
            is_final = type(x) is np.ndarray and x.dtype == dtype and not x.flags.writeable
            if not is_final or x.shape != (length,):
                return False
        if given and is_bad is not None and np.count_nonzero(is_bad(np.concatenate([x for x, _ in given]))):
            return False
    actions = [row["action"] for row in rows]
    if 0 in lengths or any(action is None for action in actions):
        return False
    mask = np.concatenate([row["action"] if row["learn"] is None else row["learn"] for row in rows])
    is_learned = np.logical_or.reduceat(mask, np.cumsum([0, *lengths[:-1]]))
    return bool(is_learned.all()) and not np.count_nonzero(mask & ~np.concatenate(actions))


_USUAL = ("tokens", "action", "learn", "behavior_logp", "token_reward")
_UNUSUAL = ("context_tokens", "kept", "kept_count")
_unusual, _all = itemgetter(*_UNUSUAL), itemgetter(*_USUAL, *_UNUSUAL)
_UNKNOWN = {f.name: f.default for f in dataclasses.fields(Sample) if f.default is not dataclasses.MISSING}
_CUTS: dict[str, Callable[[float], bool]] = {
    "temperature": lambda temperature: temperature == 0,
    "top_k": lambda k: k > 0,
    "top_p": lambda p: p < 1,
    "min_p": lambda p: p > 0,
}


def truncation(sampling: Any, *, recorded: bool = False) -> str:
    """The settings of `Sample.sampling` that excluded tokens, such as "top_p 0.9"; empty where none is known.

    Log-probs of what was sampled are then over the remaining tokens, those of a trainer over all. With
    `recorded` kept sets the trainer's can be over the same tokens, and only a temperature of 0 is left.
    """
    settings = sampling if isinstance(sampling, dict) else {}
    names = ["temperature"] if recorded else list(_CUTS)
    values = [(name, settings.get(name), _CUTS[name]) for name in names]
    return ", ".join(f"{name} {x:g}" for name, x, cuts in values if isinstance(x, (int, float)) and cuts(x))


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype != np.float32:
            return bool((a == b).all())
        return bool(((a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b))).all())
    if isinstance(a, (float, dict, list)):  # JSON tells 0.0 from -0.0, and 1 from 1.0 and true
        return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    return bool(a == b)
