"""What a policy would be worth on the prompts of a log, from others' responses.

`compare_on_log` has two policies at once, by self-normalized importance sampling. A logged response y to x of
behavior log-prob log μ(y|x) has the weight w = π(y|x)/μ(y|x), and the value of π is estimated by Σ w r / Σ w
over all logged responses (Hesterberg, 1995; Swaminathan and Joachims, 2015). It holds where many responses
count: with few effective ones, (Σ w)²/Σ w², a single weight decides. And it holds where the log has what π
writes. Then the mean of w is about 1; where π writes what nobody logged, all weights are small, as many of
them may count as ever, and the estimate is the value of what π no longer does.

`value_on_log` has one policy: the doubly robust estimate (Jiang and Li, 2016), its interval, and when not to
believe it. After t tokens ρ_t = Π π/μ of these, and r_t is what of the reward came with token t: that of the
complete response with its last one. The estimate is the mean over responses of

    V_1 + Σ_t ρ_t (r_t + V_{t+1} − V_t),   V = 0 after the end.

It is unbiased for any μ that could write what π writes: E ρ_t = 1 given the tokens before t, so that V,
whatever it is, cancels on average, and a good one takes the noise out of ρ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.stats.intervals import Ratio, Values, t_inside, t_quantile
from agro.stats.paired import verdict_of

# From so many effective responses on, and with a mean weight so near 1, there is an estimate. The errors that
# remain are in reproductions/verdict.
LEAST, FAR = 30.0, 2.0
WAY_OUT = "let it answer held-out prompts and score these: agro eval --model M --prompts FILE --reward NAME"
FEW = 0.1  # of the responses that count, from which on the doubly robust interval is long enough
ROUNDING = 1e-3  # of a mean weight, from log-probs in single precision
BOUND = 700.0  # of a log-ratio, so that its exponential is a number; nothing is estimable up there


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


@dataclass(frozen=True)
class LoggedResponses:
    """N responses of at most T tokens, padded on the right with 0.

    `log_ratios`: [N,T] log π − log μ of each token, nats. `rewards`: [N,T] r_t. `lengths`: [N] in tokens.
    `clusters`: [N] a number of each response's prompt, or of its cluster of near-copies.
    """

    log_ratios: Values
    rewards: Values
    lengths: NDArray[np.int64]
    clusters: NDArray[np.int64]

    def until_end(self, of_response: Values) -> Values:
        """[N] -> [N,T] the same number at each of a response's tokens."""
        is_token = np.arange(self.log_ratios.shape[1]) < self.lengths[:, None]
        return np.asarray(np.where(is_token, of_response[:, None], 0.0))

    @property
    def totals(self) -> Values:
        """[N] the reward of each response."""
        return np.asarray(self.rewards.sum(1))


@dataclass(frozen=True)
class Estimate:
    """A value in reward, and its 95 % interval; NaN where unknown."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class OffPolicyValue:
    """What a log says of a policy. `estimate`: the doubly robust one, see this module.

    `behavior`: the mean reward of the log; `gain`: the estimate minus that, and `p` of none. `ess`: effective
    responses of `n`; `mean_weight`: 1 in expectation if the log has all that the policy writes.
    """

    estimate: Estimate
    behavior: float
    gain: Estimate
    p: float
    n: int
    clusters: int
    ess: float
    mean_weight: Estimate

    @property
    def obstacle(self) -> str:
        """Why nothing can be estimated; empty where something can."""
        w = self.mean_weight
        found = obstacle(self.clusters, self.ess, w.value)
        if found or w.low - ROUNDING <= 1 <= w.high + ROUNDING:
            return found
        return (
            f"the mean weight is {w.value:.2g} [{w.low:.2g}, {w.high:.2g}] instead of 1: the log doesn't "
            "have what the policy writes"
        )

    @property
    def caution(self) -> str:
        """That the interval may be too short; empty where it isn't.

        In reproductions/verdict it holds the value in 91.3 to 95.1 % of the logs where less than a tenth of
        the responses counts, else in 93.9 to 97.3 %.
        """
        if self.obstacle or self.ess >= FEW * self.n:
            return ""
        return "fewer than a tenth of the responses count: the interval of 95 % may be one of 91 %"

    @property
    def answer(self) -> str:
        """Of the policy against what wrote the log: better, worse, not shown or not estimable."""
        return "not estimable" if self.obstacle else verdict_of(self.p, self.gain.value)

    def to_json(self) -> dict[str, Any]:
        """Without the numbers that mean nothing: null where the value isn't estimable."""
        able = not self.obstacle
        return {
            "answer": self.answer,
            "obstacle": self.obstacle or None,
            "instead": None if able else WAY_OUT,
            "caution": self.caution or None,
            "responses": self.n,
            "clusters": self.clusters,
            "ess": self.ess,
            "mean_weight": vars(self.mean_weight),
            "behavior": self.behavior,
            "estimate": vars(self.estimate) if able else None,
            "gain": {**vars(self.gain), "p": self.p} if able else None,
        }


def value_on_log(log: LoggedResponses, values: Values | None = None) -> OffPolicyValue:
    """Estimate the value of a policy.

    Args:
        values: [N,T] V of what is before each token; `fitted_values` unless given.
    """
    n, ones = len(log.rewards), np.ones(len(log.rewards))
    rho = np.exp(np.minimum(log.log_ratios.cumsum(1), BOUND))
    weights = Weights.of(log.log_ratios.sum(1))
    V = fitted_values(log) if values is None else values
    after = np.concatenate([V[:, 1:], np.zeros((n, 1))], 1)
    estimated = Ratio.of(V[:, 0] + (rho * (log.rewards + after - V)).sum(1), ones, log.clusters)
    logged = Ratio.of(log.totals, ones, log.clusters)
    mean_weight = Ratio.of(rho[:, -1], ones, log.clusters)
    gain = estimated.value - logged.value
    low, high, p = interval(gain, estimated.without_each() - logged.without_each())
    return OffPolicyValue(
        estimate=Estimate(estimated.value, *interval(estimated.value, estimated.without_each())[:2]),
        behavior=logged.value,
        gain=Estimate(gain, low, high),
        p=p,
        n=n,
        clusters=len(logged),
        ess=weights.ess,
        mean_weight=Estimate(weights.mean, *interval(weights.mean, mean_weight.without_each())[:2]),
    )


def fitted_values(log: LoggedResponses) -> Values:
    """[N,T] V of each prompt: the weighted mean reward of its other responses, and of all other prompts' as
    one response more. A response isn't in its own V, so that the estimate stays unbiased."""
    w = np.exp(np.minimum(log.log_ratios.sum(1), BOUND))
    numbers = np.unique(log.clusters, return_inverse=True)[1]
    total, mass = np.bincount(numbers, w * log.totals), np.bincount(numbers, w)
    elsewhere = (total.sum() - total) / np.maximum(mass.sum() - mass, np.finfo(np.float64).tiny)
    others = total[numbers] - w * log.totals
    V = (others + elsewhere[numbers]) / (mass[numbers] - w + 1.0)
    return log.until_end(V)
