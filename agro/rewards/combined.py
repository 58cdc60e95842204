"""Several rewards as one: the weighted sum of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agro.rewards.protocol import Reward, Score
from agro.types import Sample


class CombinedReward:
    """Σ weight · value over `parts`: name -> (reward, weight).

    The reward is unknown where a part with a weight is unknown. A part of weight 0 is measured and not
    counted. `Score.parts` has the unweighted values.
    """

    def __init__(self, name: str, parts: Mapping[str, tuple[Reward, float]]) -> None:
        self.name = name
        self._parts = dict(parts)

    @property
    def maximum(self) -> float | None:
        maxima = [(reward.maximum, weight) for reward, weight in self._parts.values() if weight]
        if any(maximum is None or weight < 0 for maximum, weight in maxima):
            return None
        return sum((maximum or 0.0) * weight for maximum, weight in maxima)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        columns = [reward.score(samples) for reward, _ in self._parts.values()]
        return [self._sum(dict(zip(self._parts, scores))) for scores in zip(*columns)]

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        problems = [reward.problem(columns) for reward, weight in self._parts.values() if weight]
        return next(filter(None, problems), None)

    def _sum(self, scores: Mapping[str, Score]) -> Score:
        values = {name: score.value for name, score in scores.items()}
        counted = {name: weight for name, (_, weight) in self._parts.items() if weight}
        errors = [
            f"{name}: {scores[name].error or 'no reason given'}" for name in counted if values[name] is None
        ]
        if errors:
            return Score(None, "; ".join(errors), values)
        total = sum(weight * (values[name] or 0.0) for name, weight in counted.items())
        if not math.isfinite(total):
            return Score(None, f"the sum is {total}", values)
        return Score(total, None, values)

    def close(self) -> None:
        for reward, _ in self._parts.values():
            reward.close()
