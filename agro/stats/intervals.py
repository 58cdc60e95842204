"""95 % intervals of means, shares and probabilities, and Student's t."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from agro.io.numbers import none_if_nan

Z = 1.959964  # of the normal distribution: 95 % lie within ± Z
RESAMPLES = 4000
RARE = 5  # prompts

Interval = tuple[float, float]
Values = NDArray[np.float64]


def interval(values: Values) -> Interval:
    """Of the mean of `values`, one a prompt: Wilson's where all are 0 or 1, else a bootstrap over prompts.

    Wilson's too of shares of which fewer than `RARE` aren't 0, or aren't 1: what resamples of these differ by
    says little, and no mean of shares varies more than that of 0 and 1. (NaN, NaN) of fewer than two, and of
    two or of equal ones that aren't 0 or 1: they don't say how far others may be.
    """
    if len(values) < 2:
        return math.nan, math.nan
    above, below = int((values > 0).sum()), int((values < 1).sum())
    is_share = values.min() >= 0 and values.max() <= 1
    if np.isin(values, (0.0, 1.0)).all() or (is_share and min(above, below) < RARE):
        return wilson(float(values.mean()), len(values))
    if len(values) == 2 or (values == values[0]).all():  # resamples of two: no difference or no error
        return math.nan, math.nan
    return bootstrap(values)


def wilson(share: float, n: int) -> Interval:
    """Of the probability behind a share of n independent trials (Wilson, 1927): right near 0 and 1 too."""
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))  # despite rounding


def bisected(low: float, high: float, is_below: Callable[[float], bool], halves: int = 50) -> Interval:
    """Two numbers around the one from which `is_below` is false, after so many halves of the interval."""
    for _ in range(halves):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high


def bootstrap(values: Values) -> Interval:
    """Studentized bootstrap: quantiles of `studentized` times the values' standard error. Unlike the plain
    percentiles it isn't too short for skewed values."""
    mean, error = float(values.mean()), standard_error(values)
    if error == 0:
        return mean, mean
    low, high = np.quantile(studentized(values), (0.025, 0.975))
    return mean - float(high) * error, mean - float(low) * error


def studentized(values: Values) -> Values:
    """Of resamples of `values` that differ: (their mean − that of the values)/(their standard error)."""
    n = len(values)
    resampled = values[np.random.default_rng(0).integers(n, size=(RESAMPLES, n))]
    errors = resampled.std(axis=1, ddof=1) / math.sqrt(n)
    t: Values = (resampled.mean(axis=1) - values.mean())[errors > 0] / errors[errors > 0]
    return t


@cache
def t_quantile(df: int, level: float = 0.95) -> float:
    """t with P(|T| ≤ t) = `level` for Student's T with `df` degrees of freedom, by bisection."""
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
    """Of the mean of independent values; NaN of fewer than two."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def described(values: Values) -> dict[str, float | None]:
    """Mean, standard error and 95 % interval over prompts; None where unknown: equal values have no error."""
    low, high = interval(values)
    mean = float(values.mean()) if len(values) else math.nan
    row = {"value": mean, "se": standard_error(values) or math.nan, "low": low, "high": high}
    return {name: none_if_nan(x) for name, x in row.items()}


@dataclass(frozen=True)
class Ratio:
    """Σ above / Σ below, of whose terms each cluster has the sums [C]."""

    above: Values
    below: Values

    @classmethod
    def of(cls, above: Values, below: Values, clusters: NDArray[np.int64]) -> Ratio:
        """`above`, `below`, `clusters`: [N] a term of each, and the number of its cluster."""
        numbers = np.unique(clusters, return_inverse=True)[1]
        return cls(*(np.bincount(numbers, terms).astype(np.float64) for terms in (above, below)))

    def __len__(self) -> int:
        return len(self.above)

    @property
    def value(self) -> float:
        return float(self.above.sum() / self.below.sum())

    def without_each(self) -> Values:
        """[C] the value without each cluster."""
        remaining = np.maximum(self.below.sum() - self.below, np.finfo(np.float64).tiny)
        return np.asarray((self.above.sum() - self.above) / remaining)

    @property
    def standard_error(self) -> float:
        """By leaving out one cluster after the other (jackknife); NaN of fewer than two."""
        if len(self) < 2:
            return math.nan
        off = (self.above - self.value * self.below) / (self.below.sum() - self.below)
        return math.sqrt((len(self) - 1) / len(self) * float((off**2).sum()))

    @property
    def effective(self) -> float:
        """So many clusters of one size say as much: (Σ below)²/Σ below²."""
        return float(self.below.sum() ** 2 / (self.below**2).sum())
