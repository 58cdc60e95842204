"""The responses that a page shows: the best and the worst of a run's latest ones."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from agro.store import Store
from agro.types import Sample

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
