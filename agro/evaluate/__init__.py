"""Held-out evaluation: accuracy, pass@k, and how sure they are."""

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
    """Rewards of n responses to each of M held-out prompts; NaN where a response couldn't be scored."""

    rewards: NDArray[np.float64]  # [M,n]
    samples: tuple[Sample, ...]  # prompt by prompt
    errors: tuple[str, ...] = ()  # why responses couldn't be scored

    @property
    def mean(self) -> float:
        """The mean over prompts of the mean over their scored responses."""
        return float(np.mean(self._by_prompt())) if len(self._by_prompt()) else math.nan

    @property
    def se(self) -> float:
        """Standard error of `mean`, prompts being the independent units."""
        per = self._by_prompt()
        return float(per.std(ddof=1) / math.sqrt(len(per))) if len(per) > 1 else math.nan

    @property
    def unscored(self) -> int:
        return int(np.isnan(self.rewards).sum())

    def _by_prompt(self) -> NDArray[np.float64]:
        kept = self.rewards[~np.isnan(self.rewards).all(1)]
        return np.asarray(np.nanmean(kept, axis=1)) if len(kept) else np.empty(0)

    def pass_at(self, k: int) -> tuple[float, float]:
        """Mean and standard error over prompts of pass@k; a reward of 1 or more passes."""
        rows = [pass_at_k(int((~np.isnan(r)).sum()), int((r >= 1).sum()), k) for r in self.rewards]
        known = np.array([x for x in rows if not math.isnan(x)])
        se = float(known.std(ddof=1) / math.sqrt(len(known))) if len(known) > 1 else math.nan
        return (float(known.mean()) if len(known) else math.nan), se

    def to_json(self) -> dict[str, Any]:
        """Mean reward, accuracy and pass@k for k a power of two up to n, each with a 95 % interval (normal, over prompts)."""
        n = self.rewards.shape[1]
        rows = {"reward_mean": (self.mean, self.se), "accuracy": self.pass_at(1)}
        rows |= {f"pass@{k}": self.pass_at(k) for k in (2**i for i in range(n.bit_length())) if k <= n}
        return {**{name: _interval(*row) for name, row in rows.items()}, "unscored": self.unscored}


def _interval(value: float, se: float) -> dict[str, float | None]:
    bounds = (value, se, value - 1.96 * se, value + 1.96 * se)
    return {
        k: None if math.isnan(x) else x for k, x in zip(("value", "se", "low", "high"), bounds, strict=True)
    }


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k responses passes, of n tried (arXiv 2107.03374, eq. 1).

    NaN where fewer than k were tried.
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
