"""Estimate a policy's value on the prompts of a log, with an interval and conditions for trusting it.

This is the doubly robust estimator (Jiang and Li, 2016). ρ_t = Π π/μ over the first t tokens, and r_t is the
reward that came with token t; the complete response's reward comes with its last token. The estimate is the
mean over responses of

    V_1 + Σ_t ρ_t (r_t + V_{t+1} − V_t),   V = 0 after the end.

It is unbiased for any μ whose support includes π's: E ρ_t = 1 given the tokens before t, so any V cancels on
average, and a good V reduces the variance from ρ. With V = 0 it is per-decision importance sampling (Precup
et al., 2000), which is also reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.stats.intervals import Ratio, Values
from agro.stats.off_policy import Weights, interval, obstacle
from agro.stats.paired import verdict_of

WAY_OUT = "let it answer held-out prompts and score these: agro eval --model M --prompts FILE --reward NAME"
FEW = 0.1  # effective share of the responses from which on the doubly robust interval is wide enough
ROUNDING = 1e-3  # error of a mean weight from log-probs in single precision
BOUND = 700.0  # maximal log-ratio, so that its exponential is finite; nothing is estimable beyond


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

    def until_end(self, per_response: Values) -> Values:
        """Repeat a number per response [N] at each of its tokens [N,T]."""
        is_token = np.arange(self.log_ratios.shape[1]) < self.lengths[:, None]
        return np.asarray(np.where(is_token, per_response[:, None], 0.0))

    @property
    def totals(self) -> Values:
        """The reward of each response, [N]."""
        return np.asarray(self.rewards.sum(1))


@dataclass(frozen=True)
class Estimate:
    """A value in units of the reward, and its 95% interval; NaN where unknown."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class OffPolicyValue:
    """A policy's value estimated from a log. `estimate`: doubly robust; `per_decision`: with V = 0.

    `behavior`: the mean reward of the log; `gain`: the estimate minus that, with `p` for no gain. `ess`:
    effective number of the `n` responses; `mean_weight`: 1 in expectation if the log covers the policy.
    """

    estimate: Estimate
    per_decision: Estimate
    behavior: float
    gain: Estimate
    p: float
    n: int
    clusters: int
    ess: float
    mean_weight: Estimate

    @property
    def estimates(self) -> dict[str, Estimate]:
        return {"doubly_robust": self.estimate, "per_decision": self.per_decision}

    @property
    def obstacle(self) -> str:
        """Why the value isn't estimable; empty if it is."""
        w = self.mean_weight
        reason = obstacle(self.clusters, self.ess, w.value)
        if reason or w.low - ROUNDING <= 1 <= w.high + ROUNDING:
            return reason
        return (
            f"the mean weight is {w.value:.2g} [{w.low:.2g}, {w.high:.2g}] instead of 1: the log doesn't "
            "cover what the policy writes"
        )

    @property
    def caution(self) -> str:
        """Warning that the interval may be too short; empty if it isn't.

        In reproductions/verdict the interval covers the value in 91.3 to 95.1% of the logs in which less
        than a tenth of the responses counts, else in 93.9 to 97.3%.
        """
        if self.obstacle or self.ess >= FEW * self.n:
            return ""
        return "fewer than a tenth of the responses count: the 95% interval may cover only 91%"

    @property
    def answer(self) -> str:
        """The policy against the log's author: better, worse, not shown or not estimable."""
        return "not estimable" if self.obstacle else verdict_of(self.p, self.gain.value)

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as JSON; numbers without meaning are null if the value isn't estimable."""
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
            "estimates": {name: vars(x) for name, x in self.estimates.items()} if able else None,
            "gain": {**vars(self.gain), "p": self.p} if able else None,
        }


def value_on_log(log: LoggedResponses, values: Values | None = None) -> OffPolicyValue:
    """Estimate the value of a policy.

    Args:
        values: [N,T] V before each token; by default `fitted_values`.
    """
    n, ones = len(log.rewards), np.ones(len(log.rewards))
    rho = np.exp(np.minimum(log.log_ratios.cumsum(1), BOUND))
    weights = Weights.of(log.log_ratios.sum(1))
    V = fitted_values(log) if values is None else values
    next_V = np.concatenate([V[:, 1:], np.zeros((n, 1))], 1)
    estimated = Ratio.of(V[:, 0] + (rho * (log.rewards + next_V - V)).sum(1), ones, log.clusters)
    weighted = Ratio.of((rho * log.rewards).sum(1), ones, log.clusters)
    logged = Ratio.of(log.totals, ones, log.clusters)
    mean_weight = Ratio.of(rho[:, -1], ones, log.clusters)
    gain = estimated.value - logged.value
    low, high, p = interval(gain, estimated.without_each() - logged.without_each())
    return OffPolicyValue(
        estimate=Estimate(estimated.value, *interval(estimated.value, estimated.without_each())[:2]),
        per_decision=Estimate(weighted.value, *interval(weighted.value, weighted.without_each())[:2]),
        behavior=logged.value,
        gain=Estimate(gain, low, high),
        p=p,
        n=n,
        clusters=len(logged),
        ess=weights.ess,
        mean_weight=Estimate(weights.mean, *interval(weights.mean, mean_weight.without_each())[:2]),
    )


def fitted_values(log: LoggedResponses) -> Values:
    """Fit V [N,T] by prompt: the weighted mean reward of its other responses, with the mean of all other
    prompts as one more response. A response's own reward isn't in its V, so the estimate stays unbiased."""
    w = np.exp(np.minimum(log.log_ratios.sum(1), BOUND))
    numbers = np.unique(log.clusters, return_inverse=True)[1]
    total, mass = np.bincount(numbers, w * log.totals), np.bincount(numbers, w)
    elsewhere = (total.sum() - total) / np.maximum(mass.sum() - mass, np.finfo(np.float64).tiny)
    peers = total[numbers] - w * log.totals
    V = (peers + elsewhere[numbers]) / (mass[numbers] - w + 1.0)
    return log.until_end(V)
