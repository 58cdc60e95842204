"""What the store knows about a run: every response that it drew, and the best and worst ones."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from agro.errors import Refused
from agro.rewards.protocol import by_cause
from agro.runs.rundata import RunData, Values, to_array
from agro.store import Draw, Store
from agro.store.location import READ_SECONDS, Location, exists, located
from agro.types import Sample

TENTH = 10
SOURCES = 5  # shown; the rarest ones are merged


@dataclass(frozen=True)
class RunExperience:
    """Draws and responses of a run. `problem`: why the store couldn't be read; empty where it could."""

    path: Location
    draws: list[Draw] = field(default_factory=list)
    responses: Responses | None = None
    failures: list[tuple[str, int]] = field(default_factory=list)  # why rewards failed, and how often
    problem: str = ""

    @classmethod
    def of(cls, run: RunData) -> RunExperience:
        path = located(run.config.data.store, run.folder)
        if not exists(path):
            return cls(path, problem=f"There is no store at {path}.")
        name = run.values.get("run")
        draws: list[Draw] = []
        try:
            with Store.open(path, read_only=True, timeout=READ_SECONDS) as store:
                if isinstance(name, str):
                    versions = _versions(run)
                    draws = [d for d in store.draws.drawn(name, versions) if d.step in versions]
                return cls(path, draws, choose(store, name), _failures(store, name))
        except Refused as error:  # damaged, not a store, or its server is away
            return cls(path, draws, problem=str(error))

    @cached_property
    def steps(self) -> Values:
        return np.array([d.step for d in self.draws], np.float64)

    @cached_property
    def rewards(self) -> Values:
        return to_array([d.reward for d in self.draws])

    @cached_property
    def lengths(self) -> Values:
        return to_array([d.length for d in self.draws])

    @cached_property
    def sources(self) -> list[str]:
        """The source of each draw; the rarest sources share a name."""
        names = [source_of(d) for d in self.draws]
        counts = Counter(names)
        if len(counts) <= SOURCES:
            return names
        shown = {name for name, _ in counts.most_common(SOURCES - 1)}
        remainder = f"{len(counts) - len(shown)} other sources"
        return [n if n in shown else remainder for n in names]

    @cached_property
    def source_names(self) -> list[str]:
        """The distinct `sources`, the most frequent first."""
        return [name for name, _ in Counter(self.sources).most_common()]

    def seen(self, run: RunData) -> Values:
        """Responses drawn up to each row of the metrics, with repeats."""
        return np.searchsorted(np.sort(self.steps), run.column("step"), side="right").astype(np.float64)


@dataclass(frozen=True)
class Window:
    """The known values of draws at steps `start` to `stop`, both included."""

    start: int
    stop: int
    values: Values


def begin_and_end(steps: Values, values: Values) -> tuple[Window, Window] | None:
    """The first and the last tenth of the steps that have a known value; None where none has."""
    is_known = np.isfinite(values)
    known_steps = np.unique(steps[is_known])
    if not known_steps.size:
        return None
    n = max(1, len(known_steps) // TENTH)

    def window(part: Values) -> Window:
        selected = is_known & (steps >= part[0]) & (steps <= part[-1])
        return Window(int(part[0]), int(part[-1]), values[selected])

    return window(known_steps[:n]), window(known_steps[-n:])


def source_of(draw: Draw) -> str:
    if not draw.is_own:
        return draw.source or draw.role
    return "fresh samples" if draw.staleness == 0 else "this run's earlier samples"


def _failures(store: Store, run: str | None) -> list[tuple[str, int]]:
    """The causes of a run's failed rewards, the most frequent first, each by one of its errors."""
    if run is None:
        return []
    failed = store.samples(run=run, state="failed", skip_damaged=True)
    causes = by_cause((sample, str(sample.meta.get("reward_error"))) for sample in failed)
    return [(cases[0][1], len(cases)) for cases in causes]


def _versions(run: RunData) -> dict[int, int | None]:
    """The learner's version when it drew at each step: the one that the step before it left."""
    versions = [0, *(row.get("version") for row in run.rows)]
    return {row["step"]: version for row, version in zip(run.rows, versions, strict=False)}


SHOWN = 3
LATE = 2048  # scored responses, counted from the end of the store


@dataclass(frozen=True)
class Responses:
    """`best` and `worst`: one response per prompt, none in both. `of`: how many they were chosen from.

    `sampled`: whether the run sampled them, or its store has them from elsewhere.
    """

    best: list[Sample]
    worst: list[Sample]
    of: int
    sampled: bool


def choose(store: Store, run: str | None) -> Responses:
    """From the responses that `run` sampled, or from all where it sampled none."""
    ids: list[int] = []
    if run is not None:
        ids = _latest(store, run)
    samples = list(store.samples(ids=ids or _latest(store, None)))
    sampled = bool(ids)
    top: dict[str, Sample] = {}
    bottom: dict[str, Sample] = {}
    for s in samples:  # of equal ones the later
        if _reward(s) >= _reward(top.get(s.prompt_id, s)):
            top[s.prompt_id] = s
        if _reward(s) <= _reward(bottom.get(s.prompt_id, s)):
            bottom[s.prompt_id] = s
    best = heapq.nlargest(SHOWN, top.values(), key=lambda s: (_reward(s), s.id or 0))
    shown = {s.id for s in best}
    remaining = [s for s in bottom.values() if s.id not in shown and _reward(s) < _reward(best[0])]
    worst = heapq.nsmallest(SHOWN, remaining, key=lambda s: (_reward(s), -(s.id or 0)))
    return Responses(best, worst, len(samples), sampled)


def _latest(store: Store, run: str | None) -> list[int]:
    return [row.id for row in store.survey.summaries(run=run) if row.scored][-LATE:]


def _reward(sample: Sample) -> float:
    assert sample.reward is not None
    return sample.reward
