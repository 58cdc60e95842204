"""What a policy would be worth on the prompts of a log, from others' responses: self-normalized importance
sampling, of two policies at once.

A logged response y to x of behavior log-prob log μ(y|x) has the weight w = π(y|x)/μ(y|x), and the value of π
is estimated by Σ w r / Σ w over all logged responses (Hesterberg, 1995; Swaminathan and Joachims, 2015). It
holds where many responses count: with few effective ones, (Σ w)²/Σ w², a single weight decides. And it holds
where the log has what π writes. Then the mean of w is about 1; where π writes what nobody logged, all weights
are small, as many of them may count as ever, and the estimate is the value of what π no longer does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agro.rollout.evaluate import t_inside, t_quantile

# From so many effective responses on, and with a mean weight so near 1, there is an estimate. The errors that
# remain are in reproductions/verdict.
LEAST, FAR = 30.0, 2.0

Values = NDArray[np.float64]


@dataclass(frozen=True)
class OffPolicyComparison:
    """The values `a` and `b` of two policies by one log, and the difference b − a.

    `low`, `high`: its 95 % interval; `p`: of no difference, two-sided; `ess`: effective responses, of the
    policy that has fewer; `mean_weight`: 1 in expectation, of the policy that is farther from it; `clusters`:
    of near-equal prompts, the independent units.
    """

    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float
    ess: float
    mean_weight: float
    clusters: int

    @property
    def obstacle(self) -> str:
        """Why nothing can be estimated; empty where something can."""
        if self.clusters < 2:
            return "the log has responses to one held-out prompt"
        if self.ess < LEAST:
            return f"{self.ess:.0f} of the log's responses count, and {LEAST:.0f} are needed"
        if not 1 / FAR <= self.mean_weight <= FAR:
            return (
                f"the mean weight is {self.mean_weight:.2g} instead of 1: the log doesn't have what a policy "
                "writes"
            )
        return ""


def compare_on_log(a: Values, b: Values, rewards: Values, clusters: NDArray[np.int64]) -> OffPolicyComparison:
    """Compare two policies by N logged responses.

    Args:
        a: [N] log π(y|x) − log μ(y|x) of the first policy, in nats; `b`: of the second.
        rewards: [N], all known.
        clusters: [N] a number of each response's prompt, or of its cluster of near-copies.
    """
    numbers = np.unique(clusters, return_inverse=True)[1]
    first, second = (_Sums.of(log_weights, rewards, numbers) for log_weights in (a, b))
    difference, ess = second.value - first.value, min(first.ess, second.ess)
    low = high = p = math.nan
    count = int(numbers.max()) + 1
    if count > 1:
        left_out = second.without_each() - first.without_each()
        # The jackknife: how much the difference changes without one cluster after the other.
        error = math.sqrt((count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum()))
        df = max(1, min(count, int(ess)) - 1)
        half = t_quantile(df) * error
        low, high = difference - half, difference + half
        p = 1.0 if error == 0 else 1 - t_inside(abs(difference) / error, df)
    far = max(first.mean_weight, second.mean_weight, key=lambda mean: abs(math.log(mean)))
    return OffPolicyComparison(first.value, second.value, difference, low, high, p, ess, far, count)


@dataclass(frozen=True)
class _Sums:
    """Of one policy by cluster: Σ w r [C] and Σ w [C], up to one factor for all; of all responses how many
    are effective, and the mean of w."""

    rewards: Values
    weights: Values
    ess: float
    mean_weight: float

    @classmethod
    def of(cls, log_weights: Values, rewards: Values, numbers: NDArray[np.int64]) -> _Sums:
        largest = float(log_weights.max())
        weights = np.exp(log_weights - largest)
        # Bounded so that a hopeless one stays a number above 0.
        mean = math.exp(max(-700.0, min(700.0, largest + math.log(weights.mean()))))
        ess = float(weights.sum() ** 2 / (weights**2).sum())
        of_rewards, of_weights = np.bincount(numbers, weights * rewards), np.bincount(numbers, weights)
        return cls(of_rewards.astype(np.float64), of_weights.astype(np.float64), ess, mean)

    @property
    def value(self) -> float:
        return float(self.rewards.sum() / self.weights.sum())

    def without_each(self) -> Values:
        """[C] the value without each cluster."""
        remaining = np.maximum(self.weights.sum() - self.weights, np.finfo(np.float64).tiny)
        return np.asarray((self.rewards.sum() - self.rewards) / remaining)
