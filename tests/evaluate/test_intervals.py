"""Intervals: how often they hold what they are of, and the known values of Wilson's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agro.stats.intervals import bootstrap, interval, t_quantile, wilson


def test_wilson_by_its_formula() -> None:
    """Of 0 in 10: the upper end is z²/(n + z²)."""
    assert wilson(0.0, 3)[0] == 0.0  # not 5e-17
    assert wilson(0.0, 10) == (0.0, pytest.approx(1.959964**2 / (10 + 1.959964**2)))
    low, high = wilson(0.9, 50)
    for p in (low, high):  # where (share − p)² = z² p (1 − p) / n
        assert (0.9 - p) ** 2 == pytest.approx(1.959964**2 * p * (1 - p) / 50)


@pytest.mark.parametrize("n", [100, 300])
@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_a_share_s_interval_holds_it_19_times_of_20(n: int, p: float) -> None:
    passed = np.random.default_rng(0).binomial(n, p, size=4000)
    holds = [low <= p <= high for low, high in (wilson(x / n, n) for x in passed)]
    assert 0.93 <= np.mean(holds) <= 0.975  # a share of 100 has few values: the coverage moves in steps


@pytest.mark.test
@pytest.mark.parametrize("kind", ["pass@1 of 8", "pass@4 of 8", "graded"])
def test_the_bootstrap_s_interval_holds_the_mean_19_times_of_20(kind: str) -> None:
    """Prompts of very different difficulty, as in practice: Beta(½, 1) or so."""
    random = np.random.default_rng(1)
    holds = []
    for _ in range(400):
        difficulty = random.beta(0.5, 1.0, size=100)
        passed = random.binomial(8, difficulty)
        if kind == "pass@1 of 8":
            values, truth = passed / 8, 1 / 3
        elif kind == "pass@4 of 8":
            none = np.array([math.comb(8 - x, 4) / math.comb(8, 4) for x in passed])
            values = 1 - none
            truth = 1 - math.prod((1 + k) / (1.5 + k) for k in range(4))  # E (1 − p)⁴
        else:
            values, truth = random.exponential(difficulty), 1 / 3
        low, high = bootstrap(values)
        holds.append(low <= truth <= high)
    assert 0.92 <= np.mean(holds) <= 0.98  # standard error 0.011


def test_which_interval_is_taken() -> None:
    shares = np.array([0.0, 1.0, 1.0])
    assert interval(shares) == wilson(2 / 3, 3)
    graded = np.linspace(0.0, 1.0, 12)
    assert interval(graded) == bootstrap(graded)
    assert np.isnan(interval(np.full(5, 0.5))).all()  # equal, which isn't certain
    rare = np.array([0.25] + [0.0] * 99)
    assert interval(rare) == wilson(0.0025, 100)
    assert interval(1 - rare) == wilson(0.9975, 100)
    assert all(map(math.isnan, interval(np.array([1.0]))))
    assert np.isnan(interval(np.array([2.0, 5.0]))).all()  # and not 3.5 to 3.5


def test_t_quantiles() -> None:
    """Student's table (Abramowitz and Stegun, table 26.10, two-sided 0.95)."""
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042, 120: 1.980}
    assert {df: round(t_quantile(df), 3) for df in table} == table
