"""What a reward is: `Score`, `Reward`, and the limit on failures of one step."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from agro.errors import Refused
from agro.types import Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """The reward of one response: a finite `value`, or None (unknown) and the `error` that says why."""

    value: float | None
    error: str | None = None
    parts: Mapping[str, float | None] = field(
        default_factory=dict
    )  # unweighted, by name, where there are several

    def __post_init__(self) -> None:
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a score is a finite number or None, got {self.value}")

    @property
    def meta(self) -> dict[str, Any]:
        """What a sample's `meta` keeps of it."""
        error = {"reward_error": self.error} if self.error else {}
        return error | ({"reward_parts": dict(self.parts)} if self.parts else {})


class Reward(Protocol):
    """Scores responses. A failure belongs to one response and is told in its `Score`; it never raises."""

    name: str

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score a sample, in the order of `samples`."""
        ...

    def close(self) -> None:
        """Give back processes and connections; a closed reward scores no more."""
        ...


def score_known(
    samples: Sequence[Sample],
    find: Callable[[Sample], T],
    judge: Callable[[list[Sample], list[T]], list[Score]],
) -> list[Score]:
    """`judge` on the samples in which `find` finds what it takes; the message of its `LookupError` is the others' error."""
    known: dict[int, T] = {}
    scores: dict[int, Score] = {}
    for i, sample in enumerate(samples):
        try:
            known[i] = find(sample)
        except LookupError as error:
            scores[i] = Score(None, str(error.args[0]))
    scores.update(zip(known, judge([samples[i] for i in known], list(known.values())), strict=True))
    return [scores[i] for i in range(len(samples))]


def check_failures(samples: Sequence[Sample], scores: Sequence[Score], max_failed: float) -> int:
    """The number of failed scores; `Refused` where their share is above `max_failed` (0 to 1).

    The message gives the share, the limit and the three most frequent causes with counts and samples.
    """
    failed = [
        (sample, score.error or "no reason given")
        for sample, score in zip(samples, scores)
        if score.value is None
    ]
    if not failed or len(failed) <= max_failed * len(scores):
        return len(failed)
    causes: dict[tuple[str, ...], list[tuple[Sample, str]]] = defaultdict(list)
    for sample, error in failed:
        causes[_cause(error)].append((sample, error))
    common = sorted(causes.values(), key=len, reverse=True)
    lines = [
        f"  {len(hits)} × {hits[0][1]}: {', '.join(_name(s) for s, _ in hits[:3])}" for hits in common[:3]
    ]
    if len(common) > 3:
        lines.append(f"  {sum(map(len, common[3:]))} of other causes")
    raise Refused(
        f"reward: {len(failed)} of {len(scores)} responses of this step could not be scored ({len(failed) / len(scores):.0%}); "
        f"reward.max_failed allows {max_failed:.0%}\n" + "\n".join(lines) + "\n"
        "Mend the reward or the data, or raise reward.timeout or reward.max_failed; then go on with --resume"
    )


def _cause(error: str) -> tuple[str, ...]:
    """Errors of one kind from one line of code are one cause, whatever value their message quotes; so are equal texts."""
    place = re.search(r"\(([^()]*:\d+)\)$", error)
    return (error.split(":", 1)[0], place[1]) if place else (re.sub(r"(?<!\w)(['\"]).*\1", "", error),)


def _name(sample: Sample) -> str:
    if sample.id is not None:
        return f"sample {sample.id}"
    index = sample.meta.get("index")
    return f"prompt {sample.prompt_id}" + ("" if index is None else f" response {index}")
