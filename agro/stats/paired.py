"""Did it get better? Two policies that answered the same prompts, compared prompt by prompt.

The prompts are the independent units, or clusters of near-equal prompts (`agro.store.split`), whose
differences rise and fall together. What both policies find hard cancels in the difference of a prompt, so
that a pair says more than two separate means: of the same answers p can be .08 unpaired and .008 paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agro.errors import Refused
from agro.stats.intervals import RARE, Ratio, Values, Z, bisected, studentized, t_inside, t_quantile, wilson

LEVEL = 0.05  # a smaller p counts as shown
POWER = 0.841621  # quantile of the normal distribution: 80 %
FLIPS = 10_000
LEAST = 6  # clusters: of fewer no test shows anything at that level
EXACT = 200  # prompts
ENOUGH = 30  # clusters: fewer show nothing where it is unknown how large a reward may be

Verdict = Literal["better", "worse", "not shown"]


@dataclass(frozen=True)
class Comparison:
    """Mean rewards `a` and `b` of two policies on `n` prompts, and the difference b − a.

    `low`, `high`: its 95 % interval; `p`: of no difference, two-sided, by `test`; `detectable`: the
    difference that so many prompts would have shown with a probability of 80 %. NaN where unknown: p of
    too few clusters, or of rewards that are missing more often on one side; `detectable` where so few
    show none. `clusters`: how many the prompts are in; as many where no two are near-copies. `unknown_a`,
    `unknown_b`: the shares of each side's rewards that are unknown. Where there are any, p and interval
    hold for whatever these may be, see `compare`.
    """

    n: int
    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float
    test: Literal["McNemar", "sign flips and t"]
    detectable: float
    clusters: int
    unknown_a: float = 0.0
    unknown_b: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Of b against a."""
        return verdict_of(self.p, self.difference)


def verdict_of(p: float | None, difference: float) -> Verdict:
    """The one rule for every difference that agro reports: shown where p is known and below `LEVEL`."""
    if p is None or not p < LEVEL:
        return "not shown"
    return "better" if difference > 0 else "worse"


def compare(
    a: Values,
    b: Values,
    clusters: Sequence[int] | None = None,
    unknown: tuple[Values, Values] | None = None,
) -> Comparison:
    """Compare rewards [M] or [M,n] of two policies on the same M prompts; NaN where a score is unknown.

    Of several responses to a prompt their mean counts. `unknown`: of rewards [M] that are means of the known
    ones, [M] which share of each side's is unknown. `clusters`: [M] a number of each prompt's cluster;
    without it each prompt is its own. Raises `Refused` where no prompt has a score on both sides.

    An unknown reward may be any: p is the largest, and the interval the union, of what is known and of both
    extremes, all unknown ones of one side as the worst and of the other as the best (from 0 to 1, or to
    the rewards seen beyond). Where the extremes have different signs p is 1; where one side's are missing
    significantly more often it is NaN.
    """
    (before, lost), (after, missed) = _by_prompt(a), _by_prompt(b)
    if len(before) != len(after):
        raise Refused(
            f"paired comparison: expected the same prompts, got {len(before)} and {len(after)} of them"
        )
    if unknown is not None:
        lost, missed = (np.where(np.isnan(x), 1.0, u) for x, u in zip((before, after), unknown, strict=True))
    both = ~(np.isnan(before) | np.isnan(after))
    if not both.any():
        raise Refused(f"paired comparison: none of the {len(before)} prompts has a score on both sides")
    labels = np.arange(len(both)) if clusters is None else np.asarray(clusters)
    found = _compare_known(before[both], after[both], labels[both])
    if not lost.any() and not missed.any():
        return found
    seen = [x[~np.isnan(x)] for x in (a, b)]
    worst, best = (f([0.0, 1.0, *map(f, seen)]) for f in (min, max))

    def filled(mean: Values, share: Values, value: float) -> Values:
        return np.where(share < 1, mean, 0.0) * (1 - share) + share * value

    least = _compare_known(filled(before, lost, best), filled(after, missed, worst), labels)
    most = _compare_known(filled(before, lost, worst), filled(after, missed, best), labels)
    missing = _compare_known(lost, missed, labels).p
    p = (
        max(found.p, least.p, most.p)
        if min(least.difference * most.difference, least.difference * found.difference) > 0
        else 1.0
    )
    return replace(
        found,
        p=math.nan if missing < LEVEL else p,
        low=min(found.low, least.low),
        high=max(found.high, most.high),
        unknown_a=float(lost.mean()),
        unknown_b=float(missed.mean()),
    )


def _compare_known(before: Values, after: Values, labels: NDArray[np.int64]) -> Comparison:
    """Of rewards [M] that are all known.

    Right and wrong by exact tests. Else p is the largest of three: of flipped signs, which is exact for
    symmetric differences; of their studentized mean, by a bootstrap, for skewed ones; and of a rare large
    difference that was seen on no prompt, for which no test of those seen can speak.
    """
    difference, values = after - before, np.concatenate([before, after])
    sums = Ratio.of(difference, np.ones(len(labels)), labels)  # of each cluster, and its number of prompts
    n, mean = len(sums), float(difference.mean())
    if np.isin(values, (0.0, 1.0)).all() and n == len(before):
        gains, losses = int((difference > 0).sum()), int((difference < 0).sum())
        (low, high), p = shares_interval(difference), mcnemar(difference)
        detectable = detectable_share(gains + losses, n)
        test: Literal["McNemar", "sign flips and t"] = "McNemar"
    else:
        test, size = "sign flips and t", sums.effective
        low, high, p = inference(sums)
        span = 1.0 if values.min() >= 0 and values.max() <= 1 else math.inf  # how large a difference may be
        if size >= ENOUGH:
            span = min(span, float(np.ptp([0.0, *difference])))
        if n == len(before) and np.count_nonzero(difference) < RARE and n >= ENOUGH:
            span = float(np.ptp(values))
            low, high = rare_interval(difference, span)
        error, df, tail = sums.standard_error, max(1, int(size) - 1), 1 - 0.025 ** (1 / size)
        detectable = max(t_quantile(df) * error, span * tail / (1 - tail)) + t_quantile(df, 0.6) * error
        if n < LEAST or detectable in (0, math.inf) or detectable > span:
            detectable = math.nan
        if span < math.inf:
            unseen = abs(mean) / (abs(mean) + span) if mean else 0.0
            p = max(p, sign_flips(sums.above), min(1.0, 2 * (1 - unseen) ** size))
            low, high = min(low, mean - tail * (mean + span)), max(high, mean + tail * (span - mean))
        elif difference.any():
            p = math.nan
    return Comparison(
        n=len(difference),
        a=float(before.mean()),
        b=float(after.mean()),
        difference=mean,
        low=low,
        high=high,
        p=p,
        test=test,
        detectable=detectable,
        clusters=n,
    )


def inference(sums: Ratio) -> tuple[float, float, float]:
    """95 % of the mean difference of prompts, and p of a mean of 0: by t; over single prompts the wider and
    the larger of that and a studentized bootstrap.

    Of 100 prompts the bootstrap alone covers rare large differences of both signs in 92 % of cases, the
    t-interval skewed ones in 93 % (benchmarks/intervals). A bootstrap of few clusters, of which a resample
    may have three, is too short.
    """
    if len(sums) < 2:
        return math.nan, math.nan, math.nan
    mean, error, df = sums.value, sums.standard_error, max(1, int(sums.effective) - 1)
    low, high = (mean + sign * t_quantile(df) * error for sign in (-1, 1))
    if error == 0:
        return low, high, 0.0 if mean else 1.0
    p = 1 - t_inside(abs(mean) / error, df)
    if (sums.below > 1).any():
        return low, high, p
    t = studentized(sums.above)
    least, most = np.quantile(t, (0.025, 0.975)) * error
    tail = 2 * min((t >= mean / error).mean(), (t <= mean / error).mean())
    return min(low, mean - float(most)), max(high, mean - float(least)), max(p, float(tail))


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
    return sign_test(int((difference > 0).sum()), int((difference < 0).sum()))


def sign_test(wins: int, losses: int) -> float:
    """p of fair coins, exact and two-sided."""
    trials = wins + losses
    tail = sum(math.comb(trials, k) for k in range(min(wins, losses) + 1)) / 2**trials
    return float(min(1.0, 2 * tail))


def sign_flips(difference: Values) -> float:
    """The randomization test: how often does a sum of random signs times the differences exceed theirs?

    Without a difference between the policies each is as likely as its negative. Counts the differences as
    they are as one of the draws, so that p is never 0 (Phipson and Smyth, 2010).
    """
    if len(difference) < 2:
        return math.nan
    rng, exceeding = np.random.default_rng(0), 1
    least = abs(difference.sum()) - 1e-12 * np.abs(difference).sum()
    for size in (FLIPS // 10,) * 10:
        signs = rng.integers(0, 2, (size, len(difference))) * 2.0 - 1.0
        exceeding += int((np.abs(signs @ difference) >= least).sum())
    return exceeding / (FLIPS + 1)


def _by_prompt(rewards: Values) -> tuple[Values, Values]:
    """[M] or [M,n] -> [M]: the mean of the known ones, NaN where there are none; the unknown ones' share."""
    rows = rewards.reshape(len(rewards), -1)
    known = ~np.isnan(rows)
    count = known.sum(1)
    total = np.where(known, rows, 0.0).sum(1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan), 1 - count / rows.shape[1]


@lru_cache(4096)
def detectable_share(changed: int, n: int) -> float:
    """The difference of two shares that McNemar's test of n prompts shows with a probability of 80 %, where
    as many answers change as did, or more if it takes more; NaN where none is. Of more than `EXACT` by the
    normal distribution, but no fewer than give six gains with that probability."""
    if n > EXACT:
        share = changed / n
        return max((Z + POWER) * math.sqrt(share / n), 7.906 / n)  # P(Poisson(7.906) ≥ 6) = .8
    if n < LEAST:
        return math.nan
    i = np.arange(n + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(i[1:]))])
    ways = log_factorial[:, None] - log_factorial - log_factorial[np.maximum(i[:, None] - i, 0)]  # log C(D,k)
    ways = np.where(i <= i[:, None], ways, -np.inf)
    shown = 2 * np.cumsum(np.exp(ways - i[:, None] * math.log(2))[:, ::-1], axis=1)[:, ::-1] < LEVEL

    def is_too_weak(middle: float) -> bool:
        some = max(changed / n, middle)
        gain, tiny = (some + middle) / 2 / some, 1e-300
        of_D = ways[n] + i * math.log(some) + (n - i) * math.log(max(1 - some, tiny))
        of_k = ways + i * math.log(gain) + np.maximum(i[:, None] - i, 0) * math.log(max(1 - gain, tiny))
        return float(np.exp(of_D) @ (np.exp(of_k) * shown).sum(1)) < 0.8

    return bisected(0.0, 1.0, is_too_weak, 12)[1]


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

    def is_accepted(middle: float) -> bool:
        # The likeliest share of losses where the difference is `middle`: the root of a quadratic equation.
        b = (2 * n - gains + losses) * middle - gains - losses
        share = (math.sqrt(b**2 + 8 * n * losses * middle * (1 - middle)) - b) / (4 * n)
        variance = n * (2 * share + middle * (1 - middle))
        return not (gains - losses - n * middle) ** 2 > Z**2 * variance

    return bisected((gains - losses) / n, 1.0, is_accepted)[0]
