"""The test of ratings that somebody may stop at any time: its errors by enumeration, and its power."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from agro.stats.sequential import (
    expected_more,
    fewest_more,
    interval,
    is_decided,
    log_evidence,
    p_value,
)

MOST = 500  # ratings


def table(share: float) -> NDArray[np.float64]:
    """[n, wins]: log E against `share`, computed anew, as a product: of rating n + 1 the predicted share is
    (wins + 1)/(n + 2) (Laplace's rule of succession)."""
    found = np.full((MOST + 1, MOST + 2), -math.inf)
    found[0, 0] = 0.0
    for n in range(MOST):
        for wins in range(n + 1):
            won, lost = (wins + 1) / (n + 2), (n - wins + 1) / (n + 2)
            found[n + 1, wins + 1] = found[n, wins] + math.log(won / share)
            if wins == 0:
                found[n + 1, 0] = found[n, 0] + math.log(lost / (1 - share))
    return found


def stopped(share: float, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n]: the probability that n ratings, each of which is a win with `share`, have decided; enumerated."""
    alive, total, by_n = np.zeros(MOST + 2), 0.0, []
    alive[0] = 1.0
    for n in range(1, MOST + 1):
        alive = share * np.roll(alive, 1) + (1 - share) * alive
        decides = evidence[n] > math.log(20)
        total += float(alive[decides].sum())
        alive[decides] = 0.0
        by_n.append(total)
    return np.array(by_n)


def test_evidence_is_that_of_the_rule_of_succession() -> None:
    for share in (0.5, 0.3):
        expected = table(share)
        for n, wins in ((1, 0), (1, 1), (8, 8), (40, 13), (500, 300)):
            assert log_evidence(wins, n - wins, share) == pytest.approx(expected[n, wins], abs=1e-9)
    assert p_value(8, 0) == pytest.approx(9 / 2**8)
    assert p_value(3, 3) == p_value(0, 0) == 1.0
    assert (is_decided(8, 0), is_decided(7, 0), is_decided(0, 8)) == (True, False, True)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.95])
def test_who_stops_at_any_time_errs_in_at_most_5_percent(share: float) -> None:
    """The interval leaves out the true share at some time in 1 to 5 % of runs; of 0.5 it is where p < .05. A
    look at the sign test after each of 200 ratings errs in 28 %."""
    error = float(stopped(share, table(share))[-1])
    assert 0.01 < error < 0.05
    if share == 0.5:
        assert error == pytest.approx(0.0340, abs=1e-4)


def test_simulated_nulls_are_called_different_in_at_most_5_percent() -> None:
    rng = np.random.default_rng(0)
    wins = rng.integers(0, 2, (10_000, 200)).cumsum(axis=1)
    n = np.arange(1, 201)
    decides = np.array([[w <= size and is_decided(w, size - w) for w in range(201)] for size in n.tolist()])
    called = decides[n - 1, wins].any(axis=1).mean()
    assert 0.02 < called < 0.05
    assert called == pytest.approx(stopped(0.5, table(0.5))[199], abs=0.006)  # three standard errors


@pytest.mark.parametrize(("share", "median", "by_128"), [(0.6, 210, 0.30), (0.7, 47, 0.95), (0.8, 19, 1.0)])
def test_power(share: float, median: int, by_128: float) -> None:
    found = stopped(share, table(0.5))
    assert int(np.searchsorted(found, 0.5)) + 1 == median
    assert found[127] == pytest.approx(by_128, abs=0.005)


def test_the_interval_agrees_with_the_test() -> None:
    for n in (1, 7, 8, 40, 300):
        for wins in {0, 1, n // 3, n // 2, int(0.65 * n), n - 1, n} - {-1}:
            low, high = interval(wins, n - wins)
            assert 0 <= low <= wins / n <= high <= 1
            assert (not low <= 0.5 <= high) == (p_value(wins, n - wins) < 0.05) == is_decided(wins, n - wins)
            assert interval(n - wins, wins) == pytest.approx((1 - high, 1 - low), abs=1e-12)
            for end in {low, high} - {0.0, 1.0}:
                assert log_evidence(wins, n - wins, end) == pytest.approx(math.log(20), abs=1e-6)


def test_what_is_still_needed() -> None:
    assert fewest_more(0, 0) == fewest_more(1, 0) + 1 == 8
    assert (fewest_more(8, 0), fewest_more(0, 9)) == (0, 0)
    for wins, losses in ((2, 3), (10, 4), (0, 3)):
        least = fewest_more(wins, losses)
        ahead, behind = max(wins, losses), min(wins, losses)
        assert is_decided(ahead + least, behind)
        assert not is_decided(ahead + least - 1, behind)
    assert expected_more(0, 0, 3, 100) is None  # ties say nothing
    assert expected_more(5, 5, 0, 10_000) is None
    assert (expected_more(4, 0, 0, 100), expected_more(4, 0, 4, 100)) == (4, 7)  # 5.4 and 7.5 of 8
    assert expected_more(4, 0, 4, 6) is None
