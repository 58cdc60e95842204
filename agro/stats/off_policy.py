"""Two policies compared on the prompts of a log, by others' responses: self-normalized importance sampling.

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

from agro.stats.intervals import Ratio, Values, t_inside, t_quantile

# From so many effective responses on, and with a mean weight so near 1, there is an estimate. The errors that
# remain are in reproductions/verdict.
LEAST, FAR = 30.0, 2.0


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
        return obstacle(self.clusters, self.ess, self.mean_weight)


def obstacle(clusters: int, ess: float, mean_weight: float) -> str:
    """Why weights say nothing about a policy; empty where they do."""
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
        a: [N] log π(y|x) − log μ(y|x) of the first policy, in nats; `b`: of the second.
        rewards: [N], all known.
        clusters: [N] a number of each response's prompt, or of its cluster of near-copies.
    """
    first, second = Weights.of(a), Weights.of(b)
    values = [Ratio.of(w.relative * rewards, w.relative, clusters) for w in (first, second)]
    ess, count = min(first.ess, second.ess), len(values[0])
    difference = values[1].value - values[0].value
    low, high, p = interval(difference, values[1].without_each() - values[0].without_each())
    far = max(first.mean, second.mean, key=lambda mean: abs(math.log(mean)))
    return OffPolicyComparison(values[0].value, values[1].value, difference, low, high, p, ess, far, count)


@dataclass(frozen=True)
class Weights:
    """`relative`: [N] w over the largest one; `ess`: (Σ w)²/Σ w²; `mean`: of w."""

    relative: Values
    ess: float
    mean: float

    @classmethod
    def of(cls, log_weights: Values) -> Weights:
        largest = float(log_weights.max())
        relative = np.exp(log_weights - largest)
        # Bounded so that a hopeless one stays a number above 0.
        mean = math.exp(max(-700.0, min(700.0, largest + math.log(relative.mean()))))
        return cls(relative, float(relative.sum() ** 2 / (relative**2).sum()), mean)


def interval(value: float, without_each: Values) -> tuple[float, float, float]:
    """Ends of the 95 % interval, and p of 0, by the jackknife: how much a value changes without one cluster
    after the other. NaN of one cluster.

    Few weights may decide, so Student's t has as many degrees of freedom as clusters matter, (Σ d²)²/Σ d⁴ of
    the changes d, less one. And weights are skewed: t is corrected by Hall's cubic transformation (1992,
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
    g = math.copysign(max(abs(g), 1e-6), g)  # by which is divided
    half = t_quantile(df)
    low, high = (value - error * 3 / g * (math.cbrt(1 + g * (x - g / 6)) - 1) for x in (half, -half))
    corrected = ((1 + g * value / error / 3) ** 3 - 1) / g + g / 6
    return low, high, 1 - t_inside(abs(corrected), df)
