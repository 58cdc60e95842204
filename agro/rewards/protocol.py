"""The protocol of rewards: `Score`, `Reward`, and the limit on failures in one step."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from agro.config import NoOptions
from agro.errors import Refused, without_secrets
from agro.io.numbers import percent
from agro.types import Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """The reward of one response: a finite `value`, or None (unknown) and the `error`.

    `parts`: the unweighted values by name, if there are several. `details`: how the value was obtained.
    `meaning`: a number that responses of one meaning share. `places`: the rewards of the policy's tokens,
    turns or steps, which then sum to the value.
    """

    value: float | None
    error: str | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)
    meaning: float | None = None
    places: Sequence[float] = ()

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
        if self.places:
            entries["place_rewards"] = list(self.places)
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
        """The largest possible value; None if it is unknown."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score per sample, in the order of the samples."""
        ...

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        """Why no response to a prompt with these columns can be scored; None if no reason is known."""
        return None

    def close(self) -> None:
        """End processes and connections. A closed reward can't be used again."""
        return


@dataclass(frozen=True)
class RewardMaker:
    """Makes a reward from options, as an entry point of `agro.rewards`; a function doesn't need one.

    `make(options, timeout=…, workers=…)` gets `reward.options` as an object of the class `options`. `final`
    extracts a response's final answer in a form that equal answers share, or None; majority votes and `agro
    check` count it.
    """

    make: Callable[..., Reward]
    options: type[BaseModel] = NoOptions
    final: Callable[[str], str | None] = str.strip


def score_known(
    samples: Sequence[Sample],
    get: Callable[[Sample], T],
    scorer: Callable[[list[Sample], list[T]], list[Score]],
) -> list[Score]:
    """Run `scorer` on the samples for which `get` returns; for the rest its `LookupError` is the error."""
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
    """Count the failed scores; raises `Refused` if their share is above `max_failed` (0 to 1).

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
        lines.append(f"  {sum(map(len, common[3:]))} with other causes")
    share = f"{len(failed)} of {len(scores)} ({percent(len(failed) / len(scores))})"
    raise Refused(
        f"reward: {share} responses of this step could not be scored; "
        f"reward.max_failed is {percent(max_failed)}\n"
        + "\n".join(lines)
        + "\nWhat to do: fix the reward, or raise reward.timeout or reward.max_failed; then use --resume"
    )


def by_cause(failed: Iterable[tuple[Sample, str]]) -> list[list[tuple[Sample, str]]]:
    """Group samples and their errors by cause, the most frequent cause first."""
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
