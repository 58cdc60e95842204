"""Held-out evaluation: accuracy and pass@k, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.config import Sampler
from agro.rewards import Reward
from agro.rollout import Rollout
from agro.types import Prompt, Sample

__all__ = ["Heldout", "heldout", "pass_at_k"]


@dataclass(frozen=True)
class Heldout:
    """Rewards of n responses to each of M held-out prompts.

    `rewards`: [M,n], NaN where scoring failed. `samples`: in the order of prompts. `errors`: of failed
    scores.
    """

    rewards: NDArray[np.float64]
    samples: tuple[Sample, ...]
    errors: tuple[str, ...] = ()

    @property
    def mean(self) -> float:
        """The mean over prompts of the mean over their scored responses."""
        return _mean(self._by_prompt())

    @property
    def se(self) -> float:
        """Standard error of `mean` over prompts."""
        return _standard_error(self._by_prompt())

    @property
    def unscored(self) -> int:
        return int(np.isnan(self.rewards).sum())

    def _by_prompt(self) -> NDArray[np.float64]:
        scored = self.rewards[~np.isnan(self.rewards).all(1)]
        if not len(scored):
            return np.empty(0)
        return np.asarray(np.nanmean(scored, axis=1))

    def pass_at(self, k: int) -> tuple[float, float]:
        """Mean and standard error over prompts of pass@k; a reward of 1 or more passes."""
        rows = [pass_at_k(int((~np.isnan(r)).sum()), int((r >= 1).sum()), k) for r in self.rewards]
        known = np.array([x for x in rows if not math.isnan(x)])
        return _mean(known), _standard_error(known)

    def to_json(self) -> dict[str, Any]:
        """Mean reward, accuracy and pass@k (k = 1, 2, 4, … ≤ n) with normal 95 % intervals over prompts."""
        n = self.rewards.shape[1]
        rows = {"reward_mean": (self.mean, self.se), "accuracy": self.pass_at(1)}
        for i in range(n.bit_length()):
            rows[f"pass@{2**i}"] = self.pass_at(2**i)
        return {**{name: _interval(*row) for name, row in rows.items()}, "unscored": self.unscored}


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _interval(value: float, se: float) -> dict[str, float | None]:
    bounds = {"value": value, "se": se, "low": value - 1.96 * se, "high": value + 1.96 * se}
    return {name: None if math.isnan(x) else x for name, x in bounds.items()}


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k responses passes (arXiv 2107.03374, eq. 1).

    `passed` of `n` responses passed; NaN where n < k.
    """
    if n < k:
        return math.nan
    return 1.0 - math.prod(1.0 - k / i for i in range(n - passed + 1, n + 1))


def heldout(
    rollout: Rollout, reward: Reward, prompts: Sequence[Prompt], sampler: Sampler, seed: int
) -> Heldout:
    """Sample `sampler.n` responses to each prompt and score them; samples of one episode are one response."""
    samples = sorted(
        rollout.sample(prompts, sampler.n, sampler, seed=seed), key=lambda s: int(s.meta["index"])
    )
    scores = reward.score(samples)
    values = [math.nan if score.value is None else score.value for score in scores]
    scored = [s.replace(reward=score.value) for s, score in zip(samples, scores, strict=True)]
    last = {int(s.meta["index"]): i for i, s in enumerate(samples)}  # sample of each response
    errors = [scores[i].error for i in last.values()]
    return Heldout(
        np.array([values[i] for i in last.values()], dtype=np.float64).reshape(len(prompts), sampler.n),
        tuple(scored),
        tuple(error for error in errors if error),
    )
