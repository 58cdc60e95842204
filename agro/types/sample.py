"""A sample: one response, and what is known about it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
ROUNDING = 1e-3  # by which an almost certain token's log-prob may exceed 0 in half precision
_NUMBERS = (int, float, np.integer, np.floating)


class _Array(NamedTuple):
    """A sample's array: its dtype, what its values are expected to be, and which are refused."""

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
    prompt_id: str = ""  # samples with the same one form a group
    episode: str | None = None  # the rows of one episode count as one response
    tokens: NDArray[np.int32] | None = None  # [T] the complete sequence, prompt included
    action: NDArray[np.bool_] | None = None  # [T] the tokens that the policy chose
    learn: NDArray[np.bool_] | None = None  # [T] tokens to take a gradient from; None: those of action
    tokenizer: str | None = None  # fingerprint of the tokenizer
    behavior_logp: NDArray[np.float32] | None = None  # [T] under the distribution sampled from; NaN: unknown
    sampling: dict[str, Any] | None = None  # temperature, top_k, top_p, min_p, seed, …
    # Kept sets: the ids that truncation left to choose from, ascending for each token; None: not recorded.
    kept: NDArray[np.int32] | None = None  # all tokens' sets, concatenated
    kept_count: NDArray[np.int32] | None = None  # [T] set sizes; 0: the whole vocabulary, or not an action
    context_tokens: NDArray[np.int32] | None = None  # the context of the response, if not the prompt
    token_reward: NDArray[np.float32] | None = None  # [T]
    version: int | NDArray[np.int32] = UNKNOWN_VERSION  # of the weights that sampled it; -1: unknown
    role: Role = "log"
    source: str = ""  # "file:…", a model's name
    meta: dict[str, Any] = field(default_factory=dict)  # answer, finish, reward parts, parent, hint
    id: int | None = None  # row of the store; None before it is stored

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Make `Sample(**fields)` in half the time, without a check of names: a frozen class's constructor
        calls a function for each field."""
        return cls.all_of([fields])[0]

    @classmethod
    def all_of(cls, rows: Iterable[Mapping[str, Any]]) -> list[Self]:
        """Make a sample of each row, faster than `of`: array values are checked for all samples together."""
        samples = []
        for fields in rows:
            sample = cls.__new__(cls)
            sample.__dict__.update(_UNKNOWN, meta={})
            sample.__dict__.update(fields)
            sample._read_fields()
            samples.append(sample)
        _check_values(samples)
        return samples

    def __post_init__(self) -> None:
        self._read_fields()
        _check_values([self])

    def _read_fields(self) -> None:
        """Convert the fields to their types, and check everything but the values of arrays."""
        values = self.__dict__  # the class is frozen
        if type(self.prompt) is not str:
            values["prompt"] = conversation(self.prompt, "sample")
        if not self.prompt_id:
            values["prompt_id"] = prompt_hash(self.prompt)
        if not isinstance(self.response, str):
            raise self._refusal(f"response: expected text, got {self.response!r:.80}")
        if self.role not in ROLES:
            raise self._refusal(f"role: expected one of {', '.join(ROLES)}, got {self.role!r}")
        if self.reward is not None:
            is_number = isinstance(self.reward, _NUMBERS) and not isinstance(self.reward, bool)
            if not is_number or not math.isfinite(self.reward):
                expected = "a finite number, or None where it is unknown"
                raise self._refusal(f"reward: expected {expected}, got {self.reward!r}")
            values["reward"] = float(self.reward)
        if isinstance(self.version, int) and self.version < UNKNOWN_VERSION:
            raise self._refusal(f"version: expected {_VERSION}, got {self.version}")
        arrays = [n for n in _ARRAYS if values[n] is not None and type(values[n]) is not int]
        for name in arrays:
            values[name] = self._typed(name, values[name], _ARRAYS[name].dtype)
        self._check_arrays(arrays)

    def _check_arrays(self, arrays: Sequence[str]) -> None:
        """Raise `Refused` for arrays that don't fit together; `arrays`: the names of those that are set."""
        if (self.kept is None) != (self.kept_count is None):
            name = "kept_count" if self.kept is None else "kept"
            raise self._refusal(f"expected both kept and kept_count, or neither, got {name} alone")
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
            got = len(getattr(self, name))
            if got != T:
                raise self._refusal(f"{name}: expected one value for each of the {T} tokens, got {got}")
        if not np.count_nonzero(self.action if self.learn is None else self.learn):
            text = "a response needs at least one token (an end token counts)"
            raise self._refusal(f"the mask of tokens to learn from is empty; {text}")
        if self.learn is not None and self.learn is not self.action:
            outside = self.learn & ~self.action
            if np.count_nonzero(outside):
                index = int(outside.argmax())
                raise self._refusal(
                    f"learn: expected a subset of action, got index {index}, which isn't an action"
                )

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

    def _refusal(self, text: str) -> Refused:
        name = "sample" if self.id is None else f"sample {self.id}"
        return Refused(f"{name} of prompt {self.prompt_id}: {text}")

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
        """[T] the environment's replies: tokens after the first one to learn from that aren't actions."""
        if self.mask is None or self.action is None:
            return None
        return np.logical_or.accumulate(self.mask) & ~self.action

    @property
    def knows_behavior(self) -> bool:
        """Whether every action has its behavior log-prob."""
        if self.behavior_logp is None or self.action is None:
            return False
        finite = np.isfinite(self.behavior_logp[self.action])
        return bool(np.count_nonzero(finite) == len(finite))

    @property
    def truncation(self) -> str:
        """The settings that excluded tokens, unless kept sets make up for it; see function `truncation`."""
        return truncation(self.sampling, recorded=self.kept is not None)

    @property
    def end(self) -> End:
        """Whether the response finished or was cut, by `meta["finish"]`; "unknown" for other reasons."""
        finish = self.meta.get("finish")
        end = ENDS.get(finish) if isinstance(finish, str) else None
        return end or ("unknown" if finish is None else end_in(finish) or "unknown")

    @property
    def thought(self) -> Literal["open", "closed"] | None:
        """Whether the last thought of the response is closed; None if it has none. For sampled responses,
        `meta["thought"]` also accounts for one that the chat template opened."""
        prompt = self.prompt if isinstance(self.prompt, str) else (self.prompt[-1:] or [{}])[0].get("content")
        recorded = self.meta.get("thought")
        if recorded in ("open", "closed"):
            return cast(Literal["open", "closed"], recorded)
        return thought_in(prompt if isinstance(prompt, str) else "", self.response)

    @property
    def oldest_version(self) -> int:
        """The version that staleness is counted from; with one per token, the lowest among the actions."""
        if not isinstance(self.version, np.ndarray):
            return self.version
        assert self.action is not None
        return int(self.version[self.action].min())

    def replace(self, **changes: Any) -> Sample:
        return dataclasses.replace(self, **changes)

    def __eq__(self, other: object) -> bool:
        """Compare bit for bit (NaNs are equal), without `id`: where a record is stored, not what it is."""
        if not isinstance(other, Sample):
            return NotImplemented
        names = (f.name for f in dataclasses.fields(self) if f.name != "id")
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


def _check_values(samples: Sequence[Sample]) -> None:
    """Raise `Refused` for an invalid value in the samples' arrays.

    Checks each field as one array for all samples, since NumPy's calls take longer than its computations.
    """
    for name, (_, expected, is_bad) in _ARRAYS.items():
        arrays = [(x, sample) for sample in samples if isinstance(x := sample.__dict__[name], np.ndarray)]
        if not arrays or is_bad is None:
            continue
        if not np.count_nonzero(is_bad(np.concatenate([x for x, _ in arrays]))):  # faster than any()
            continue
        for values, sample in arrays:
            bad = is_bad(values)
            if bad.any():
                index = int(bad.argmax())
                raise sample._refusal(f"{name}: expected {expected}, got {values[index]} at index {index}")
    for sample in samples:
        if sample.kept is not None and sample.kept_count is not None:
            assert sample.tokens is not None
            assert sample.action is not None
            wrong = problem(sample.tokens, sample.action, sample.kept, sample.kept_count)
            if wrong is not None:
                raise sample._refusal(wrong)


_UNKNOWN = {f.name: f.default for f in dataclasses.fields(Sample) if f.default is not dataclasses.MISSING}
_CUTS: dict[str, Callable[[float], bool]] = {
    "temperature": lambda temperature: temperature == 0,
    "top_k": lambda k: k > 0,
    "top_p": lambda p: p < 1,
    "min_p": lambda p: p > 0,
}


def truncation(sampling: Any, *, recorded: bool = False) -> str:
    """The settings of `Sample.sampling` that excluded tokens, such as "top_p 0.9"; empty if none is known.

    The sampler's log-probs are then over the remaining tokens, a trainer's over all of them. With `recorded`
    kept sets, the trainer's can be over the same tokens, so only a temperature of 0 counts.
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
    if isinstance(a, (float, dict, list)):  # JSON distinguishes 0.0 from -0.0, and 1 from 1.0 and true
        return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    return bool(a == b)
