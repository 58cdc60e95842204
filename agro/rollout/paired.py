"""Did it get better? Two policies that answered the same prompts, compared prompt by prompt.

The prompts are the independent units. What both policies find hard cancels in the difference of a prompt, so
that a pair says more than two separate means: of the same answers p can be .08 unpaired and .008 paired.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agro.errors import Refused
from agro.rollout.evaluate import Z, bootstrap

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
    than two prompts.
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

    @property
    def verdict(self) -> Verdict:
        """Of b against a."""
        if not self.p < LEVEL:
            return "not shown"
        return "better" if self.difference > 0 else "worse"


def compare(a: Values, b: Values) -> Comparison:
    """Compare rewards [M] or [M,n] of two policies on the same M prompts; NaN where a score is unknown.

    Of several responses to a prompt their mean counts. A prompt without a score on one side says nothing
    about the difference; the caller reports how many these are. Raises `Refused` where no prompt is left.
    """
    before, after = _by_prompt(a), _by_prompt(b)
    if len(before) != len(after):
        raise Refused(
            f"paired comparison: expected the same prompts, got {len(before)} and {len(after)} of them"
        )
    known = ~(np.isnan(before) | np.isnan(after))
    if not known.any():
        raise Refused(f"paired comparison: none of the {len(before)} prompts has a score on both sides")
    before, after = before[known], after[known]
    difference = after - before
    binary = bool(np.isin(np.concatenate([before, after]), (0.0, 1.0)).all())
    low, high = _interval(difference, binary)
    return Comparison(
        n=len(difference),
        a=float(before.mean()),
        b=float(after.mean()),
        difference=float(difference.mean()),
        low=low,
        high=high,
        p=mcnemar(difference) if binary else sign_flips(difference),
        test="McNemar" if binary else "sign flips",
        detectable=(Z + POWER) * _standard_error(difference),
    )


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


def _interval(difference: Values, binary: bool) -> tuple[float, float]:
    """95 %: of shares by Bonett and Price (2012), right with few changes too, else a bootstrap."""
    n = len(difference)
    if n < 2:
        return math.nan, math.nan
    if not binary:
        return bootstrap(difference)
    gained = (float((difference > 0).sum()) + 1) / (n + 2)
    lost = (float((difference < 0).sum()) + 1) / (n + 2)
    middle = gained - lost
    half = Z * math.sqrt((gained + lost - middle**2) / (n + 2))
    return max(-1.0, middle - half), min(1.0, middle + half)


def _standard_error(values: Values) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
