"""95% intervals of means, shares and probabilities, and Student's t."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from agro.io.numbers import none_if_nan

Z = 1.959964  # 95% of the normal distribution lie within ± Z
RESAMPLES = 4000
RARE = 5  # prompts

Interval = tuple[float, float]
Values = NDArray[np.float64]


def interval(values: Values) -> Interval:
    """The interval of the mean of `values`, one per prompt: Wilson's if all are 0 or 1, else a bootstrap.

    Wilson's is also used for shares of which fewer than `RARE` differ from 0, or from 1: their resamples vary
    too little, and no mean of shares varies more than that of 0 and 1. (NaN, NaN) for fewer than two values,
    and for two or for equal ones that aren't 0 or 1, which say nothing about the spread.
    """
    if len(values) < 2:
        return math.nan, math.nan
    above, below = int((values > 0).sum()), int((values < 1).sum())
    is_share = values.min() >= 0 and values.max() <= 1
    if np.isin(values, (0.0, 1.0)).all() or (is_share and min(above, below) < RARE):
        return wilson(float(values.mean()), len(values))
    if len(values) == 2 or (values == values[0]).all():  # two: resamples have no difference or no error
        return math.nan, math.nan
    return bootstrap(values)


def wilson(share: float, n: int) -> Interval:
    """Wilson's interval (1927) of the probability behind a share of n trials, valid near 0 and 1 too."""
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))  # despite rounding


def bisected(low: float, high: float, is_below: Callable[[float], bool], halves: int = 50) -> Interval:
    """Bisect `halves` times: two numbers around the smallest one for which `is_below` is false."""
    for _ in range(halves):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high


def bootstrap(values: Values) -> Interval:
    """The studentized bootstrap interval: quantiles of `studentized` times the standard error. Unlike plain
    percentiles it isn't too short for skewed values."""
    mean, error = float(values.mean()), standard_error(values)
    if error == 0:
        return mean, mean
    low, high = np.quantile(studentized(values), (0.025, 0.975))
    return mean - float(high) * error, mean - float(low) * error


def studentized(values: Values) -> Values:
    """(mean − mean of `values`)/(standard error) of each resample whose values differ."""
    n = len(values)
    resampled = values[np.random.default_rng(0).integers(n, size=(RESAMPLES, n))]
    errors = resampled.std(axis=1, ddof=1) / math.sqrt(n)
    t: Values = (resampled.mean(axis=1) - values.mean())[errors > 0] / errors[errors > 0]
    return t


@cache
def t_quantile(df: int, level: float = 0.95) -> float:
    """The t with P(|T| ≤ t) = `level` for Student's T with `df` degrees of freedom, by bisection."""
    high = 1.0
    while t_inside(high, df) < level:
        high *= 2
    low, high = bisected(0.0, high, lambda t: t_inside(t, df) < level, 60)
    return (low + high) / 2


def t_inside(t: float, df: int) -> float:
    """P(|T| ≤ t), a finite sum for integer `df` (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    cosine, odd = math.cos(angle), df % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, df, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def standard_error(values: Values) -> float:
    """The standard error of the mean of independent values; NaN for fewer than two."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def described(values: Values) -> dict[str, float | None]:
    """Mean, standard error and 95% interval over prompts; None if unknown, as the error of equal values."""
    low, high = interval(values)
    mean = float(values.mean()) if len(values) else math.nan
    row = {"value": mean, "se": standard_error(values) or math.nan, "low": low, "high": high}
    return {name: none_if_nan(x) for name, x in row.items()}


@dataclass(frozen=True)
class Ratio:
    """Σ above / Σ below, with the sums of each cluster's terms [C]."""

    above: Values
    below: Values

    @classmethod
    def of(cls, above: Values, below: Values, clusters: NDArray[np.int64]) -> Ratio:
        """`above`, `below`, `clusters`: [N] the terms, and the number of each one's cluster."""
        numbers = np.unique(clusters, return_inverse=True)[1]
        return cls(*(np.bincount(numbers, terms).astype(np.float64) for terms in (above, below)))

    def __len__(self) -> int:
        return len(self.above)

    @property
    def value(self) -> float:
        return float(self.above.sum() / self.below.sum())

    def without_each(self) -> Values:
        """[C] The value without each cluster."""
        remaining = np.maximum(self.below.sum() - self.below, np.finfo(np.float64).tiny)
        return np.asarray((self.above.sum() - self.above) / remaining)

    @property
    def standard_error(self) -> float:
        """The jackknife standard error over clusters; NaN for fewer than two."""
        if len(self) < 2:
            return math.nan
        off = (self.above - self.value * self.below) / (self.below.sum() - self.below)
        return math.sqrt((len(self) - 1) / len(self) * float((off**2).sum()))

    @property
    def effective(self) -> float:
        """The number of clusters of equal size that are as informative: (Σ below)²/Σ below²."""
        return float(self.below.sum() ** 2 / (self.below**2).sum())
