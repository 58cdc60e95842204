"""Scores responses to held-out prompts: the mean reward, and its standard error over prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agro.rewards import Reward
from agro.stats.intervals import standard_error
from agro.types import Prompt, Sample

if TYPE_CHECKING:
    from agro.config import SamplerConfig
    from agro.rollout.rollout import Rollout

__all__ = ["Heldout", "heldout"]


@dataclass(frozen=True)
class Heldout:
    """Rewards of n responses to each of M held-out prompts.

    `rewards`: [M,n], NaN if scoring failed. `samples`: in the order of prompts. `errors`: of failed scores.
    `reward`: its name. `meanings`: by number of the response, if the reward has them.
    """

    rewards: NDArray[np.float64]
    samples: tuple[Sample, ...]
    errors: tuple[str, ...] = ()
    reward: str = ""
    meanings: Mapping[int, float] = field(default_factory=dict)

    @property
    def means(self) -> NDArray[np.float64]:
        """[M] the mean over the scored responses to each prompt; NaN if there are none."""
        scored = (~np.isnan(self.rewards)).sum(1)
        return np.where(scored > 0, np.nansum(self.rewards, axis=1) / np.maximum(scored, 1), math.nan)

    @property
    def mean(self) -> float:
        """The mean over prompts of the mean over their scored responses."""
        values = _finite(self.means)
        return float(values.mean()) if len(values) else math.nan

    @property
    def se(self) -> float:
        """Standard error of `mean` over prompts."""
        return standard_error(_finite(self.means))

    @property
    def unscored(self) -> int:
        return int(np.isnan(self.rewards).sum())

    @property
    def is_unknown(self) -> bool:
        return bool(np.isnan(self.rewards).all())

    @cached_property
    def responses(self) -> list[list[Sample]]:
        """The samples of each response by its number, n per prompt; all rows of an episode."""
        rows: dict[int, list[Sample]] = {}
        for sample in self.samples:
            rows.setdefault(int(sample.meta["index"]), []).append(sample)
        return [rows[number] for number in sorted(rows)]


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]


def heldout(
    rollout: Rollout,
    reward: Reward,
    prompts: Sequence[Prompt],
    sampler: SamplerConfig,
    seed: int,
    samples: Iterable[Sample] | None = None,
) -> Heldout:
    """Sample `sampler.n` responses to each prompt and score them; samples of one episode are one response.

    `samples`: these responses, if they were sampled earlier.
    """
    if samples is None:
        samples = rollout.sample(prompts, sampler.n, sampler, seed=seed)
    samples = sorted(samples, key=lambda s: int(s.meta["index"]))
    scores = reward.score(samples)
    values = [math.nan if score.value is None else score.value for score in scores]
    scored = [
        s.replace(reward=score.value, meta={**s.meta, **score.meta})
        for s, score in zip(samples, scores, strict=True)
    ]
    rows = {int(s.meta["index"]): i for i, s in enumerate(samples)}  # a sample of each response
    errors = [scores[i].error for i in rows.values()]
    return Heldout(
        np.array([values[i] for i in rows.values()], dtype=np.float64).reshape(len(prompts), sampler.n),
        tuple(scored),
        tuple(error for error in errors if error),
        reward.name,
        {number: m for number, i in rows.items() if (m := scores[i].meaning) is not None},
    )
