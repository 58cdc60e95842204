"""Off-policy comparison: exact where weights are equal, right on average, silent where it can't know."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agro.stats.off_policy import LEAST, compare_on_log, interval


def test_of_its_own_log_a_policy_is_worth_the_mean_reward() -> None:
    rewards = np.arange(40.0)
    out = compare_on_log(np.zeros(40), np.zeros(40), rewards, np.arange(40))
    assert (out.a, out.difference, out.low, out.high, out.p) == (19.5, 0, 0, 0, 1)
    assert (out.ess, out.mean_weight, out.clusters, out.obstacle) == (40, 1, 40, "")


def test_weights_by_hand() -> None:
    """Weights 1 and 3 of rewards 0 and 1: (1 · 0 + 3 · 1)/4, and (1 + 3)²/(1 + 9) effective responses."""
    out = compare_on_log(np.zeros(2), np.log([1.0, 3.0]), np.array([0.0, 1.0]), np.arange(2))
    assert out.b == pytest.approx(0.75)
    assert out.ess == pytest.approx(1.6)
    assert out.mean_weight == pytest.approx(2)
    assert "2 of the log's responses count, and 30 are needed" in out.obstacle
    shifted = compare_on_log(np.full(2, -9.0), np.log([1.0, 3.0]) + 5, np.array([0.0, 1.0]), np.arange(2))
    assert shifted.difference == pytest.approx(out.difference)


def test_a_policy_that_left_the_log_isnt_estimated() -> None:
    """It gives each logged response e⁻²⁰ of the probability: the weights are equal, so all of them count."""
    rng = np.random.default_rng(0)
    out = compare_on_log(np.zeros(400), np.full(400, -20.0), rng.random(400), np.arange(400))
    assert out.ess == pytest.approx(400)
    assert "the log doesn't have what a policy writes" in out.obstacle
    hopeless = compare_on_log(np.zeros(400), np.full(400, -9e5), rng.random(400), np.arange(400))
    assert hopeless.mean_weight > 0


def test_one_prompt_is_no_sample() -> None:
    out = compare_on_log(np.zeros(40), np.zeros(40), np.ones(40), np.zeros(40, int))
    assert math.isnan(out.p)
    assert "one held-out prompt" in out.obstacle


def logs(rng: np.random.Generator, prompts: int) -> tuple[np.ndarray, ...]:
    """Two responses to each prompt out of five, by μ; the second policy moves half of the weight to the
    last, which is right at half of the prompts: the true difference follows from the tables."""
    mu, pi = np.array([0.3, 0.3, 0.2, 0.1, 0.1]), np.array([0.15, 0.15, 0.1, 0.05, 0.55])
    is_right = rng.random((prompts, 5)) < np.array([0.2, 0.2, 0.2, 0.2, 0.5])
    x, y = np.repeat(np.arange(prompts), 2), rng.choice(5, 2 * prompts, p=mu)
    return np.zeros(2 * prompts), np.log(pi / mu)[y], is_right[x, y].astype(float), x


GAIN = 0.45 * 0.2 + 0.55 * 0.5 - (0.9 * 0.2 + 0.1 * 0.5)


@pytest.mark.test
def test_the_interval_covers_the_true_difference() -> None:
    """95 % nominal: 93 to 97.5 % of 2,000 logs, whose own error is .5 %; the bias is below .01."""
    rng = np.random.default_rng(1)
    found = [compare_on_log(*logs(rng, 200)) for _ in range(2000)]
    assert min(out.ess for out in found) > LEAST
    assert np.mean([out.difference for out in found]) == pytest.approx(GAIN, abs=0.01)
    assert 0.93 <= np.mean([out.low <= GAIN <= out.high for out in found]) <= 0.975


@pytest.mark.test
def test_copies_are_one_unit() -> None:
    """Each response four times over: with clusters the interval is as wide as without copies."""
    a, b, rewards, x = logs(np.random.default_rng(2), 100)
    once = compare_on_log(a, b, rewards, x)
    copied = compare_on_log(*(np.tile(value, 4) for value in (a, b, rewards)), np.tile(x, 4))
    assert copied.high - copied.low == pytest.approx(once.high - once.low, rel=0.05)


def test_without_skewness_and_with_all_clusters_alike_it_is_students_interval() -> None:
    """Values 0 and 1, 50 each: no skewness, and all 100 matter. Student's t of 99 degrees of
    freedom is 1.984217, the standard error of the mean √(.25/99)."""
    terms = np.repeat([0.0, 1.0], 50)
    low, high, p = interval(0.5, (terms.sum() - terms) / 99)
    assert (low, high) == pytest.approx(
        (0.5 - 1.984217 * math.sqrt(0.25 / 99), 0.5 + 1.984217 * math.sqrt(0.25 / 99))
    )
    assert p < 1e-12


def test_a_few_large_terms_make_the_upper_end_far() -> None:
    """One in twenty terms is 20, the others 0: the mean 1 is likelier too low than too high."""
    terms = np.tile([20.0, *[0.0] * 19], 5)
    low, high, p = interval(1.0, (terms.sum() - terms) / 99)
    assert high - 1 > 2 * (1 - low) > 0
    assert (p < 0.05) is bool(low > 0)
