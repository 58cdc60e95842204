"""Several rewards as one: the weighted sum of what each counts with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agro.config import RewardPart
from agro.rewards.protocol import Reward, Score
from agro.rewards.shaping import counted
from agro.types import Sample


class CombinedReward:
    """Σ weight · value over `rewards`, within caps and behind gates (`agro.rewards.shaping`).

    The reward is unknown where a part with a weight or a gate is unknown. Another part is measured and not
    counted. `Score.parts` has the values as they are.
    """

    def __init__(self, name: str, rewards: Mapping[str, Reward], parts: Mapping[str, RewardPart]) -> None:
        """`parts`: how each of the `rewards` counts, by their names."""
        self.name, self._rewards, self._parts = name, dict(rewards), dict(parts)
        self._needed = [name for name, part in parts.items() if part.weight or part.gate is not None]

    @property
    def maximum(self) -> float | None:
        total = 0.0
        for name, part in self._parts.items():
            if not part.weight:
                continue
            bounds = [x for x in (self._rewards[name].maximum, part.at_most) if x is not None]
            if not bounds or part.weight < 0:
                return None
            total += part.weight * min(bounds)
        return total

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        columns = [reward.score(samples) for reward in self._rewards.values()]
        return [self._sum(dict(zip(self._rewards, scores))) for scores in zip(*columns)]

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        problems = [self._rewards[name].problem(columns) for name in self._needed]
        return next(filter(None, problems), None)

    def _sum(self, scores: Mapping[str, Score]) -> Score:
        values = {name: score.value for name, score in scores.items()}
        known = {name: value for name, value in values.items() if value is not None}
        missing = [name for name in self._needed if name not in known]
        if missing:
            causes = (f"{name}: {scores[name].error or 'no reason given'}" for name in missing)
            return Score(None, "; ".join(causes), values)
        total = sum(self._parts[name].weight * value for name, value in counted(known, self._parts).items())
        if not math.isfinite(total):
            return Score(None, f"the sum is {total}", values)
        return Score(total, None, values)

    def close(self) -> None:
        for reward in self._rewards.values():
            reward.close()
