"""Which responses a page shows: the best and the worst of a run's late ones."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from agro.store import Store
from agro.types import Sample

SHOWN = 3
LATE = 2048  # scored responses, counted from the end of the store


@dataclass(frozen=True)
class Responses:
    """`best` and `worst`: one response a prompt, none in both. `of`: how many they were chosen from."""

    best: list[Sample]
    worst: list[Sample]
    of: int
    own: bool  # the run's own, or whatever its store holds


def choose(store: Store, run: str | None) -> Responses:
    """Of what `run` sampled itself, or of all samples where it sampled nothing."""
    own = _late(store, run) if run is not None else []
    return _extremes(list(store.samples(ids=own or _late(store, None))), bool(own))


def _late(store: Store, run: str | None) -> list[int]:
    return [known.id for known in store.known(run=run) if known.scored][-LATE:]


def _extremes(samples: Sequence[Sample], own: bool) -> Responses:
    top: dict[str, Sample] = {}
    bottom: dict[str, Sample] = {}
    for s in samples:  # of equal ones the later
        if s.prompt_id not in top or _reward(s) >= _reward(top[s.prompt_id]):
            top[s.prompt_id] = s
        if s.prompt_id not in bottom or _reward(s) <= _reward(bottom[s.prompt_id]):
            bottom[s.prompt_id] = s
    best = heapq.nlargest(SHOWN, top.values(), key=lambda s: (_reward(s), s.id or 0))
    taken = {s.id for s in best}
    left = [s for s in bottom.values() if s.id not in taken and _reward(s) < _reward(best[0])]
    return Responses(
        best, heapq.nsmallest(SHOWN, left, key=lambda s: (_reward(s), -(s.id or 0))), len(samples), own
    )


def _reward(sample: Sample) -> float:
    assert sample.reward is not None
    return sample.reward
