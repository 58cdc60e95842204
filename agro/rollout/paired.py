"""Did it get better? Two policies that answered the same prompts, compared prompt by prompt.

The prompts are the independent units, or clusters of near-equal prompts (`agro.io.near_copies`), whose
differences rise and fall together. What both policies find hard cancels in the difference of a prompt, so
that a pair says more than two separate means: of the same answers p can be .08 unpaired and .008 paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agro.errors import Refused
from agro.rollout.evaluate import RARE, Z, bootstrap, t_quantile, wilson

LEVEL = 0.05  # a smaller p counts as shown
POWER = 0.841621  # quantile of the normal distribution: 80 %
FLIPS = 10_000

Values = NDArray[np.float64]
Verdict = Literal["better", "worse", "not shown"]


@dataclass(frozen=True)
class Comparison:
    """Mean rewards `a` and `b` of two policies on `n` prompts, and the difference b − a.

    `low`, `high`: its 95 % interval; `p`: of no difference, two-sided, by `test`; `detectable`: the
    difference that so many prompts would have shown with a probability of 80 %. NaN where unknown: of fewer
    than two clusters. `clusters`: how many the prompts are in; as many where no two are near-copies.
    """

    n: int
    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float
    test: Literal["McNemar", "sign flips"]
    detectable: float
    clusters: int

    @property
    def verdict(self) -> Verdict:
        """Of b against a."""
        if not self.p < LEVEL:
            return "not shown"
        return "better" if self.difference > 0 else "worse"


def compare(a: Values, b: Values, clusters: Sequence[int] | None = None) -> Comparison:
    """Compare rewards [M] or [M,n] of two policies on the same M prompts; NaN where a score is unknown.

    Of several responses to a prompt their mean counts. A prompt without a score on one side says nothing
    about the difference; the caller reports how many these are. Raises `Refused` where no prompt is left.
    `clusters`: [M] a number of each prompt's cluster; without it each prompt is its own.
    """
    before, after = _by_prompt(a), _by_prompt(b)
    if len(before) != len(after):
        raise Refused(
            f"paired comparison: expected the same prompts, got {len(before)} and {len(after)} of them"
        )
    known = ~(np.isnan(before) | np.isnan(after))
    if not known.any():
        raise Refused(f"paired comparison: none of the {len(before)} prompts has a score on both sides")
    labels = np.arange(len(known)) if clusters is None else np.asarray(clusters)
    before, after, labels = before[known], after[known], labels[known]
    difference = after - before
    sums = Sums.of(difference, labels)
    binary = bool(np.isin(np.concatenate([before, after]), (0.0, 1.0)).all()) and len(sums) == len(before)
    if binary:
        low, high = shares_interval(difference)
    elif len(sums) == len(before) and np.count_nonzero(difference) < RARE:
        low, high = rare_interval(difference, float(np.ptp(np.concatenate([before, after]))))
    else:
        low, high = sums.interval()
    return Comparison(
        n=len(difference),
        a=float(before.mean()),
        b=float(after.mean()),
        difference=float(difference.mean()),
        low=low,
        high=high,
        p=mcnemar(difference) if binary else sign_flips(sums.totals),
        test="McNemar" if binary else "sign flips",
        detectable=(Z + POWER) * sums.standard_error,
        clusters=len(sums),
    )


@dataclass(frozen=True)
class Sums:
    """Of each cluster the sum of its prompts' differences [C], and how many prompts it has [C]."""

    totals: Values
    sizes: Values

    @classmethod
    def of(cls, difference: Values, labels: NDArray[np.int64]) -> Sums:
        number = np.unique(labels, return_inverse=True)[1]
        totals = np.bincount(number, difference).astype(np.float64)
        return cls(totals, np.bincount(number).astype(np.float64))

    def __len__(self) -> int:
        return len(self.totals)

    @property
    def mean(self) -> float:
        """Of a prompt's difference."""
        return float(self.totals.sum() / self.sizes.sum())

    @property
    def standard_error(self) -> float:
        """Of the mean, by leaving out one cluster after the other (jackknife); NaN of fewer than two."""
        if len(self) < 2:
            return math.nan
        off = (self.totals - self.mean * self.sizes) / (self.sizes.sum() - self.sizes)
        return math.sqrt((len(self) - 1) / len(self) * float((off**2).sum()))

    def interval(self) -> tuple[float, float]:
        """95 % of the mean: a t-interval; over single prompts widened to where a bootstrap ends.

        Of 100 prompts the bootstrap alone covers rare large differences of both signs in 92 % of cases, the
        t-interval skewed ones in 93 % (benchmarks/intervals). Its degrees of freedom are those of as many
        clusters of one size, (Σ n)²/Σ n², less one. A bootstrap of few clusters, of which a resample may have
        three, is too short.
        """
        if len(self) < 2:
            return math.nan, math.nan
        effective = self.sizes.sum() ** 2 / (self.sizes**2).sum()
        half = t_quantile(max(1, int(effective) - 1)) * self.standard_error
        low, high = self.mean - half, self.mean + half
        if (self.sizes > 1).any():
            return low, high
        shortest = bootstrap(self.totals)
        return min(low, shortest[0]), max(high, shortest[1])


def holm(p: Sequence[float]) -> list[float]:
    """The p of several comparisons, so adjusted that any is below 5 % by chance alone in at most 5 % of cases
    (Holm, 1979). NaN stays, and isn't counted."""
    adjusted, largest = list(p), 0.0
    order = sorted((i for i, x in enumerate(p) if not math.isnan(x)), key=lambda i: p[i])
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, p[i] * (len(order) - rank)))
        adjusted[i] = largest
    return adjusted


def mcnemar(difference: Values) -> float:
    """The exact test of differences of −1, 0 and 1 (McNemar, 1947): are gains and losses equally likely?"""
    if len(difference) < 2:
        return math.nan
    gains, losses = int((difference > 0).sum()), int((difference < 0).sum())
    trials = gains + losses
    tail = sum(math.comb(trials, k) for k in range(min(gains, losses) + 1)) / 2**trials
    return float(min(1.0, 2 * tail))


def sign_flips(difference: Values, seed: int = 0) -> float:
    """The randomization test: how often does a sum of random signs times the differences exceed theirs?

    Without a difference between the policies each is as likely as its negative. Counts the differences as
    they are as one of the draws, so that p is never 0 (Phipson and Smyth, 2010).
    """
    if len(difference) < 2:
        return math.nan
    rng, exceeding = np.random.default_rng(seed), 1
    least = abs(difference.sum()) - 1e-12 * np.abs(difference).sum()
    for size in (FLIPS // 10,) * 10:
        signs = rng.integers(0, 2, (size, len(difference))) * 2.0 - 1.0
        exceeding += int((np.abs(signs @ difference) >= least).sum())
    return exceeding / (FLIPS + 1)


def _by_prompt(rewards: Values) -> Values:
    """[M] or [M,n] -> [M]: the mean of the known ones, NaN where there are none."""
    if rewards.ndim == 1:
        return rewards
    known = ~np.isnan(rewards)
    count = known.sum(1)
    total = np.where(known, rewards, 0.0).sum(1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def shares_interval(difference: Values) -> tuple[float, float]:
    """95 % of differences of −1, 0 and 1: those that Tango's score test (1998) doesn't reject.

    Where five prompts or more change on average it covers in 93 to 97 % of cases (benchmarks/intervals). The
    exact test rejects a little less: an interval without 0 may have a p slightly above .05.
    """
    n = len(difference)
    if n < 2:
        return math.nan, math.nan
    gains, losses = int((difference > 0).sum()), int((difference < 0).sum())
    return -_highest(losses, gains, n), _highest(gains, losses, n)


def rare_interval(difference: Values, spread: float) -> tuple[float, float]:
    """95 % of graded differences few of which aren't 0: as many may be gains or losses (Wilson), each as
    large as rewards differ (`spread`). How large those are that were seen says little."""
    n = len(difference)
    if n < 2 or spread == 0:
        return math.nan, math.nan
    gains, losses = (difference > 0).mean(), (difference < 0).mean()
    return -spread * wilson(float(losses), n)[1], spread * wilson(float(gains), n)[1]


def _highest(gains: int, losses: int, n: int) -> float:
    """The largest difference that isn't rejected, by bisection."""
    low, high = (gains - losses) / n, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        # The likeliest share of losses where the difference is `middle`: the root of a quadratic equation.
        b = (2 * n - gains + losses) * middle - gains - losses
        share = (math.sqrt(b**2 + 8 * n * losses * middle * (1 - middle)) - b) / (4 * n)
        variance = n * (2 * share + middle * (1 - middle))
        rejected = (gains - losses - n * middle) ** 2 > Z**2 * variance
        low, high = (low, middle) if rejected else (middle, high)
    return low
