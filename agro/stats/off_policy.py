"""Compare two policies on the prompts of a log, by logged responses: self-normalized importance sampling.

A logged response y to x of behavior log-prob log μ(y|x) has the weight w = π(y|x)/μ(y|x), and Σ w r / Σ w
over all logged responses estimates the value of π (Hesterberg, 1995; Swaminathan and Joachims, 2015). The
estimate is valid if many responses count: with few effective ones, (Σ w)²/Σ w², a single weight decides. And
the log has to cover what π writes. Then the mean of w is about 1. If π writes what the log lacks, all weights
are small, however many of them count, and the estimate is the value of what π no longer does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agro.stats.intervals import Ratio, Values, t_inside, t_quantile

# Fewest effective responses for an estimate, and largest factor between the mean weight and 1. The remaining
# errors are in reproductions/verdict.
LEAST, FAR = 30.0, 2.0


@dataclass(frozen=True)
class OffPolicyComparison:
    """The values `a` and `b` of two policies by one log, and the difference b − a.

    `low`, `high`: its 95% interval; `p`: the two-sided p of no difference; `ess`: effective responses of the
    policy with fewer; `mean_weight`: that of the policy farther from 1, its expectation; `clusters`: number
    of clusters of near-equal prompts, the independent units.
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
        """Why there is no valid estimate; empty if there is one."""
        return obstacle(self.clusters, self.ess, self.mean_weight)


def obstacle(clusters: int, ess: float, mean_weight: float) -> str:
    """Why weights don't give a valid estimate; empty if they do."""
    if clusters < 2:
        return "the log has responses to one held-out prompt"
    if ess < LEAST:
        return f"{ess:.0f} of the log's responses count, and {LEAST:.0f} are needed"
    if not 1 / FAR <= mean_weight <= FAR:
        return f"the mean weight is {mean_weight:.2g} instead of 1: the log doesn't have what a policy writes"
    return ""


def compare_on_log(a: Values, b: Values, rewards: Values, clusters: NDArray[np.int64]) -> OffPolicyComparison:
    """Compare two policies by N logged responses.

    Args:
        a: [N] log π(y|x) − log μ(y|x) of the first policy, in nats; `b`: that of the second.
        rewards: [N], all known.
        clusters: [N] the number of each response's prompt, or of its cluster of near-copies.
    """
    weights_a, weights_b = Weights.of(a), Weights.of(b)
    values = [Ratio.of(w.relative * rewards, w.relative, clusters) for w in (weights_a, weights_b)]
    ess, count = min(weights_a.ess, weights_b.ess), len(values[0])
    difference = values[1].value - values[0].value
    low, high, p = interval(difference, values[1].without_each() - values[0].without_each())
    far = max(weights_a.mean, weights_b.mean, key=lambda mean: abs(math.log(mean)))
    return OffPolicyComparison(values[0].value, values[1].value, difference, low, high, p, ess, far, count)


@dataclass(frozen=True)
class Weights:
    """Importance weights. `relative`: [N] w / max w; `ess`: (Σ w)²/Σ w²; `mean`: the mean of w."""

    relative: Values
    ess: float
    mean: float

    @classmethod
    def of(cls, log_weights: Values) -> Weights:
        largest = float(log_weights.max())
        relative = np.exp(log_weights - largest)
        # Bounded, so that a vanishing mean stays above 0.
        mean = math.exp(max(-700.0, min(700.0, largest + math.log(relative.mean()))))
        return cls(relative, float(relative.sum() ** 2 / (relative**2).sum()), mean)


def interval(value: float, without_each: Values) -> tuple[float, float, float]:
    """The ends of the 95% interval, and p of the value 0, by the jackknife: the changes of the value if one
    cluster is left out. NaN for one cluster.

    Since few weights may decide, Student's t has as many degrees of freedom as clusters matter, (Σ d²)²/Σ d⁴
    for the changes d, minus one. Since weights are skewed, Hall's cubic transformation corrects t (1992,
    Journal of the Royal Statistical Society B 54), φ(t) = t + g t²/3 + g² t³/27 + g/6 with g = skewness/√n.
    """
    count = len(without_each)
    if count < 2:
        return math.nan, math.nan, math.nan
    change = without_each.mean() - without_each
    largest = float(np.abs(change).max())
    if largest == 0:
        return value, value, float(value == 0)
    d = change / largest
    squares = float((d**2).sum())
    error = largest * math.sqrt((count - 1) / count * squares)
    df = max(1, int(squares**2 / float((d**4).sum())) - 1)
    g = float((d**3).sum()) / squares**1.5
    g = math.copysign(max(abs(g), 1e-6), g)  # it is a divisor below
    half = t_quantile(df)
    low, high = (value - error * 3 / g * (math.cbrt(1 + g * (x - g / 6)) - 1) for x in (half, -half))
    corrected = ((1 + g * value / error / 3) ** 3 - 1) / g + g / 6
    return low, high, 1 - t_inside(abs(corrected), df)
