"""What a reward is: `Score`, `Reward`, and the limit on failures of one step."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from agro.errors import Refused, without_secrets
from agro.io.numbers import percent
from agro.io.peers import did_you_mean
from agro.types import Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """The reward of one response: a finite `value`, or None (unknown) and the `error`.

    `parts`: the unweighted values by name, where there are several. `details`: how it came about. `meaning`:
    a number that responses of one meaning share. `tokens`, `steps`: the rewards of the policy's tokens,
    or of its steps or turns, whose sum the value is then.
    """

    value: float | None
    error: str | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)
    meaning: float | None = None
    tokens: Sequence[float] = ()
    steps: Sequence[float] = ()

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "error", without_secrets(self.error))
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a score is a finite number or None, got {self.value}")

    @property
    def meta(self) -> dict[str, Any]:
        """The entries for a sample's `meta`."""
        entries: dict[str, Any] = {}
        if self.error:
            entries["reward_error"] = self.error
        if self.parts:
            entries["reward_parts"] = dict(self.parts)
        if self.details:
            entries["reward_details"] = dict(self.details)
        if self.tokens:
            entries["token_rewards"] = list(self.tokens)
        if self.steps:
            entries["step_rewards"] = list(self.steps)
        if self.meaning is not None:
            entries["meaning"] = self.meaning
        return entries


class Reward(Protocol):
    """Scores responses. It never raises: an error belongs to one response, in its `Score`.

    A class that inherits from it needs `name`, `maximum` and `score`.
    """

    name: str

    @property
    def maximum(self) -> float | None:
        """The largest value that it gives; None where that isn't known."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score per sample, in their order."""
        ...

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        """Why no response to a prompt with these columns can be scored; None where nothing is known
        against it."""
        return None

    def close(self) -> None:
        """End processes and connections. A closed reward can't be used again."""
        return


@dataclass(frozen=True)
class RewardMaker:
    """A reward that is made with options, as an entry point of `agro.rewards`; a function needs none.

    `make(options, timeout=…, workers=…)` raises `Refused` for options that it doesn't have. `final` finds the
    final answer in a response, in a form that equal answers share: majority votes and `agro check` count it;
    None where there is none.
    """

    make: Callable[..., Reward]
    final: Callable[[str], str | None] = str.strip


_KINDS: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("an integer", (int,)),
    float: ("a number", (int, float)),
    str: ("text", (str,)),
}


def checked_options(reward: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`options` over `defaults`, of the types of these. A default that is a type is one that has to be given.

    Raises `Refused` for an option that the reward doesn't have, or of another type.
    """
    for name, value in options.items():
        if name not in defaults:
            hint = did_you_mean(name, defaults) or f"it has {', '.join(defaults) or 'none'}"
            raise Refused(f"reward.options.{name}: {reward} has no such option; {hint}")
        kind = defaults[name] if isinstance(defaults[name], type) else type(defaults[name])
        expected, allowed = _KINDS[kind]
        if type(value) not in allowed:
            raise Refused(f"reward.options.{name}: expected {expected}, got {value!r:.80}")
    for name, default in defaults.items():
        if isinstance(default, type) and name not in options:
            raise Refused(f"reward.options.{name}: {reward} needs it: {_KINDS[default][0]}; add it")
    return {**defaults, **options}


def score_known(
    samples: Sequence[Sample],
    get: Callable[[Sample], T],
    scorer: Callable[[list[Sample], list[T]], list[Score]],
) -> list[Score]:
    """`scorer` on the samples for which `get` returns. For the others, its `LookupError` is the error."""
    inputs: dict[int, T] = {}
    scores: dict[int, Score] = {}
    for i, sample in enumerate(samples):
        try:
            inputs[i] = get(sample)
        except LookupError as error:
            scores[i] = Score(None, str(error.args[0]))
    scores.update(zip(inputs, scorer([samples[i] for i in inputs], list(inputs.values())), strict=True))
    return [scores[i] for i in range(len(samples))]


def check_failures(samples: Sequence[Sample], scores: Sequence[Score], max_failed: float) -> int:
    """The number of failed scores; `Refused` where their share is above `max_failed` (0 to 1).

    The message gives the share, the limit and the three most frequent causes with counts and samples.
    """
    failed: list[tuple[Sample, str]] = []
    for sample, score in zip(samples, scores):
        if score.value is None:
            failed.append((sample, score.error or "no reason given"))
    if not failed or len(failed) <= max_failed * len(scores):
        return len(failed)
    common = by_cause(failed)
    lines = []
    for cases in common[:3]:
        examples = ", ".join(_name(sample) for sample, _ in cases[:3])
        lines.append(f"  {len(cases)} × {cases[0][1]}: {examples}")
    if len(common) > 3:
        lines.append(f"  {sum(map(len, common[3:]))} of other causes")
    share = f"{len(failed)} of {len(scores)} ({percent(len(failed) / len(scores))})"
    raise Refused(
        f"reward: {share} responses of this step could not be scored; "
        f"reward.max_failed is {percent(max_failed)}\n"
        + "\n".join(lines)
        + "\nFix the reward, or raise reward.timeout or reward.max_failed; then use --resume"
    )


def by_cause(failed: Iterable[tuple[Sample, str]]) -> list[list[tuple[Sample, str]]]:
    """Samples and their errors, those of one cause together, the most frequent cause first."""
    causes: dict[tuple[str, ...], list[tuple[Sample, str]]] = defaultdict(list)
    for sample, error in failed:
        causes[cause(error)].append((sample, error))
    return sorted(causes.values(), key=len, reverse=True)


def cause(error: str) -> tuple[str, ...]:
    """What errors of one cause have in common: type and line of code, or the text without quoted values."""
    location = re.search(r"\(([^()]*:\d+)\)$", error)
    if location:
        return error.split(":", 1)[0], location[1]
    return (re.sub(r"(?<!\w)(['\"]).*\1", "", error),)


def _name(sample: Sample) -> str:
    if sample.id is not None:
        return f"sample {sample.id}"
    index = sample.meta.get("index")
    return f"prompt {sample.prompt_id}" + ("" if index is None else f" response {index}")
