"""Did it get better? Compare two policies on the same prompts, prompt by prompt.

The independent units are prompts, or clusters of near-equal prompts (`agro.store.split`), whose differences
are correlated. A prompt's difficulty for both policies cancels in the difference, so that pairs tell more
than two separate means: for the same answers p can be .08 unpaired and .008 paired.
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
POWER = 0.841621  # 80% quantile of the normal distribution
FLIPS = 10_000
LEAST = 6  # clusters: with fewer no test shows anything at that level
EXACT = 200  # prompts
ENOUGH = 30  # clusters: fewer show nothing if the range of rewards is unknown

Verdict = Literal["better", "worse", "not shown"]


@dataclass(frozen=True)
class Comparison:
    """Mean rewards `a` and `b` of two policies on `n` prompts, and the difference b − a.

    `low`, `high`: its 95% interval; `p`: the two-sided p of no difference, by `test`; `detectable`: the
    difference that this many prompts would have shown with a probability of 80%. Unknown ones are NaN: p
    with too few clusters, or if rewards are missing more often on one side; `detectable` if no difference
    would be shown. `clusters`: number of clusters, `n` if no two prompts are near-copies. `unknown_a`,
    `unknown_b`: the unknown share of each side's rewards. If there are any, p and interval hold whatever
    their values, see `compare`.
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
        """The verdict on b, compared with a."""
        return verdict_of(self.p, self.difference)


def verdict_of(p: float | None, difference: float) -> Verdict:
    """The one rule for every difference that agro reports: it is shown if p is known and below `LEVEL`."""
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

    Several responses to a prompt count by their mean. `unknown`: the unknown shares [M] of each side's
    rewards, for rewards [M] that are means of the known ones. `clusters`: [M] the number of each prompt's
    cluster; without it each prompt is one. Raises `Refused` if no prompt has a score on both sides.

    An unknown reward may have any value. p is the largest, and the interval the union, over the known rewards
    and both extremes: one side's unknown rewards are the worst and the other side's the best (0 and 1, or
    rewards seen beyond). If the extremes differ in sign p is 1; if one side's rewards are missing
    significantly more often it is NaN.
    """
    (mean_a, lost_a), (mean_b, lost_b) = _prompt_means(a), _prompt_means(b)
    if len(mean_a) != len(mean_b):
        raise Refused(
            f"paired comparison: expected the same prompts, got {len(mean_a)} and {len(mean_b)} of them"
        )
    if unknown is not None:
        shares = zip((mean_a, mean_b), unknown, strict=True)
        lost_a, lost_b = (np.where(np.isnan(mean), 1.0, share) for mean, share in shares)
    both = ~(np.isnan(mean_a) | np.isnan(mean_b))
    if not both.any():
        raise Refused(f"paired comparison: none of the {len(mean_a)} prompts has a score on both sides")
    labels = np.arange(len(both)) if clusters is None else np.asarray(clusters)
    observed = _compare_known(mean_a[both], mean_b[both], labels[both])
    if not lost_a.any() and not lost_b.any():
        return observed
    seen = [x[~np.isnan(x)] for x in (a, b)]
    worst, best = (f([0.0, 1.0, *map(f, seen)]) for f in (min, max))

    def filled(mean: Values, share: Values, value: float) -> Values:
        return np.where(share < 1, mean, 0.0) * (1 - share) + share * value

    lower = _compare_known(filled(mean_a, lost_a, best), filled(mean_b, lost_b, worst), labels)
    upper = _compare_known(filled(mean_a, lost_a, worst), filled(mean_b, lost_b, best), labels)
    missing = _compare_known(lost_a, lost_b, labels).p
    p = (
        max(observed.p, lower.p, upper.p)
        if min(lower.difference * upper.difference, lower.difference * observed.difference) > 0
        else 1.0
    )
    return replace(
        observed,
        p=math.nan if missing < LEVEL else p,
        low=min(observed.low, lower.low),
        high=max(observed.high, upper.high),
        unknown_a=float(lost_a.mean()),
        unknown_b=float(lost_b.mean()),
    )


def _compare_known(mean_a: Values, mean_b: Values, labels: NDArray[np.int64]) -> Comparison:
    """Compare known rewards [M].

    Rewards 0 and 1 are compared by exact tests. For others p is the largest of three: that of flipped signs,
    exact for symmetric differences; that of the studentized mean by a bootstrap, for skewed ones; and that of
    a rare large difference that no prompt showed, which no test of the observed ones covers.
    """
    difference, values = mean_b - mean_a, np.concatenate([mean_a, mean_b])
    sums = Ratio.of(difference, np.ones(len(labels)), labels)  # each cluster's sum and number of prompts
    n, mean = len(sums), float(difference.mean())
    if np.isin(values, (0.0, 1.0)).all() and n == len(mean_a):
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
        if n == len(mean_a) and np.count_nonzero(difference) < RARE and n >= ENOUGH:
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
        a=float(mean_a.mean()),
        b=float(mean_b.mean()),
        difference=mean,
        low=low,
        high=high,
        p=p,
        test=test,
        detectable=detectable,
        clusters=n,
    )


def inference(sums: Ratio) -> tuple[float, float, float]:
    """The 95% interval of the mean difference of prompts, and p of a mean of 0, by t; for single prompts the
    wider interval and larger p of t and a studentized bootstrap.

    With 100 prompts the bootstrap alone covers rare large differences of both signs in 92 % of cases, and the
    t-interval covers skewed ones in 93 % (benchmarks/intervals). A bootstrap over few clusters, of which a
    resample may have three, is too short.
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
    low_t, high_t = np.quantile(t, (0.025, 0.975)) * error
    tail = 2 * min((t >= mean / error).mean(), (t <= mean / error).mean())
    return min(low, mean - float(high_t)), max(high, mean - float(low_t)), max(p, float(tail))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust the p of several comparisons, so that by chance any is below 5 % in at most 5 % of cases (Holm,
    1979). NaN stays, and isn't counted."""
    adjusted, largest = list(p), 0.0
    order = sorted((i for i, x in enumerate(p) if not math.isnan(x)), key=lambda i: p[i])
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, p[i] * (len(order) - rank)))
        adjusted[i] = largest
    return adjusted


def mcnemar(difference: Values) -> float:
    """McNemar's exact test (1947) of differences −1, 0 and 1: are gains and losses equally likely?"""
    if len(difference) < 2:
        return math.nan
    return sign_test(int((difference > 0).sum()), int((difference < 0).sum()))


def sign_test(wins: int, losses: int) -> float:
    """The exact two-sided p of a fair coin."""
    trials = wins + losses
    tail = sum(math.comb(trials, k) for k in range(min(wins, losses) + 1)) / 2**trials
    return float(min(1.0, 2 * tail))


def sign_flips(difference: Values) -> float:
    """The randomization test: how often does the sum of differences with random signs reach the observed sum?

    Without a difference between the policies each difference is as likely as its negative. The observed signs
    count as one draw, so that p is never 0 (Phipson and Smyth, 2010).
    """
    if len(difference) < 2:
        return math.nan
    rng, exceeding = np.random.default_rng(0), 1
    threshold = abs(difference.sum()) - 1e-12 * np.abs(difference).sum()
    for size in (FLIPS // 10,) * 10:
        signs = rng.integers(0, 2, (size, len(difference))) * 2.0 - 1.0
        exceeding += int((np.abs(signs @ difference) >= threshold).sum())
    return exceeding / (FLIPS + 1)


def _prompt_means(rewards: Values) -> tuple[Values, Values]:
    """[M] or [M,n] -> [M]: the mean of the known rewards, NaN without any; and the unknown share."""
    rows = rewards.reshape(len(rewards), -1)
    is_known = ~np.isnan(rows)
    count = is_known.sum(1)
    total = np.where(is_known, rows, 0.0).sum(1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan), 1 - count / rows.shape[1]


@lru_cache(4096)
def detectable_share(changed: int, n: int) -> float:
    """The difference of two shares that McNemar's test with n prompts shows with a probability of 80%, if as
    many answers change as did, or more if it takes more; NaN if there is none. Above `EXACT` prompts it is by
    the normal distribution, but no less than gives six gains with that probability."""
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
        change = max(changed / n, middle)
        gain, tiny = (change + middle) / 2 / change, 1e-300
        log_p_d = ways[n] + i * math.log(change) + (n - i) * math.log(max(1 - change, tiny))
        log_p_k = ways + i * math.log(gain) + np.maximum(i[:, None] - i, 0) * math.log(max(1 - gain, tiny))
        return float(np.exp(log_p_d) @ (np.exp(log_p_k) * shown).sum(1)) < 0.8

    return bisected(0.0, 1.0, is_too_weak, 12)[1]


def shares_interval(difference: Values) -> tuple[float, float]:
    """The 95% interval of the mean of differences −1, 0 and 1: those that Tango's score test (1998) accepts.

    If five or more prompts change on average, it covers in 93 to 97 % of cases (benchmarks/intervals). The
    exact test rejects slightly less: an interval without 0 may have a p slightly above .05.
    """
    n = len(difference)
    if n < 2:
        return math.nan, math.nan
    gains, losses = int((difference > 0).sum()), int((difference < 0).sum())
    return -_highest(losses, gains, n), _highest(gains, losses, n)


def rare_interval(difference: Values, spread: float) -> tuple[float, float]:
    """The 95% interval for graded differences that are mostly 0: Wilson's bounds on the shares of gains and
    losses, each as large as rewards differ (`spread`), since the few observed sizes say little."""
    n = len(difference)
    if n < 2 or spread == 0:
        return math.nan, math.nan
    gains, losses = (difference > 0).mean(), (difference < 0).mean()
    return -spread * wilson(float(losses), n)[1], spread * wilson(float(gains), n)[1]


def _highest(gains: int, losses: int, n: int) -> float:
    """The largest difference that the test accepts, by bisection."""

    def is_accepted(middle: float) -> bool:
        # The likeliest share of losses if the difference is `middle`: the root of a quadratic equation.
        b = (2 * n - gains + losses) * middle - gains - losses
        share = (math.sqrt(b**2 + 8 * n * losses * middle * (1 - middle)) - b) / (4 * n)
        variance = n * (2 * share + middle * (1 - middle))
        return not (gains - losses - n * middle) ** 2 > Z**2 * variance

    return bisected((gains - losses) / n, 1.0, is_accepted)[0]
