"""What is measured of responses, by hand and by enumeration: pass@k, best@k, majority@k and intervals."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from agro.pages.run.evaluation import answer_of, best_of_k, by_prompt, majority_of_k, pass_at_k, summary
from agro.rollout.evaluate import Heldout
from agro.stats.intervals import bootstrap, interval, t_quantile, wilson
from agro.types import Sample


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int) -> None:
    for passed in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([i < passed for i in range(n)], k))
            assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert math.isnan(pass_at_k(n, 0, n + 1))


def test_best_at_k_is_the_mean_over_subsets_of_their_best() -> None:
    rewards = np.array([0.2, 0.9, -1.0, 0.5, 0.5, 0.0])
    for k in range(1, 7):
        expected = np.mean([max(subset) for subset in combinations(rewards.tolist(), k)])
        assert best_of_k(rewards, k) == pytest.approx(expected)
    assert math.isnan(best_of_k(rewards, 7))
    found = Heldout(np.array([[0.2, 0.9], [0.5, math.nan]]), ())
    assert summary(found, None)["best@2"]["value"] == 0.9


def test_equal_values_have_no_error() -> None:
    """Prompts of one reward don't say how far another may be; of shares Wilson's interval bounds that."""
    row = summary(Heldout(np.full((2, 2), 0.5), ()), None)["reward_mean"]
    low, high = wilson(0.5, 2)
    assert row == {"value": 0.5, "se": None, "low": low, "high": high}
    row = summary(Heldout(np.full((2, 2), 3.0), ()), None)["reward_mean"]
    assert row == {"value": 3, "se": None, "low": None, "high": None}


def test_means_are_over_prompts_and_the_unknown_counts_nowhere() -> None:
    found = Heldout(np.array([[1.0, 0.0], [1.0, math.nan], [math.nan, math.nan]]), ())
    assert found.mean == pytest.approx((0.5 + 1) / 2)
    assert found.se == pytest.approx(np.std([0.5, 1], ddof=1) / math.sqrt(2))
    assert found.unscored == 3
    assert summary(found, 1.0)["pass@2"] == {"value": 1.0, "se": None, "low": None, "high": None}
    assert summary(found, 1.5)["accuracy"]["value"] == 0.0
    assert summary(found, None).keys() == {"reward_mean", "pass_at", "unscored"}
    assert math.isnan(Heldout(np.full((2, 1), math.nan), ()).mean)


def test_majority_by_hand() -> None:
    """Two right answers a, two equal wrong ones b, and a single c. Of three: {a, a, x} in 3 choices of 10 is
    right, {b, b, x} in 3 wrong, {a, b, c} in 4 a tie of three: 3/10 + 4/10 · 1/3."""
    passed, voted = [True, True, False, False, False], ["a", "a", "b", "b", "c"]
    assert majority_of_k(passed, voted, 3) == pytest.approx(0.3 + 0.4 / 3)
    assert majority_of_k(passed, voted, 1) == pytest.approx(0.4)
    assert majority_of_k(passed, voted, 5) == pytest.approx(0.5)
    assert math.isnan(majority_of_k(passed, voted, 6))
    assert majority_of_k([True, False, False], ["a", None, None], 3) == 1  # no answer votes for nothing
    assert majority_of_k([False, False], [None, None], 2) == 0


def test_drawn_majorities_are_near_all_of_them() -> None:
    """C(15, 8) = 6,435 choices; 1,000 are drawn, whose mean has an error of at most .016."""
    passed, voted = [True] * 6 + [False] * 9, ["a"] * 6 + list("bbbbcccdd")
    every = []
    for chosen in combinations(range(15), 8):
        counts = {x: sum(voted[i] == x for i in chosen) for x in "abcd"}
        winners = [x for x in counts if counts[x] == max(counts.values())]
        every.append(("a" in winners) / len(winners))
    assert majority_of_k(passed, voted, 8) == pytest.approx(np.mean(every), abs=0.05)


@pytest.mark.parametrize(
    ("reward", "meaning", "response", "expected"),
    [
        ("exact", None, " 4\n", "4"),
        ("math", None, r"So 2 + 2 is \boxed{4}.", "4"),
        ("regex", None, "I add. The final answer is 4", "4"),
        ("exact", 17.0, "four", 17.0),
    ],
)
def test_the_same_answer(reward: str, meaning: float | None, response: str, expected: object) -> None:
    assert answer_of(Sample("2+2?", response), meaning, reward) == expected


def test_of_an_evaluation_with_lengths_and_truncation() -> None:
    """Responses of 2, 1, 3 and 2 tokens to one prompt, three of them "4", the last one cut."""
    samples = []
    for index, (response, length) in enumerate([("4", 2), ("5", 1), ("4", 3), ("4", 2)]):
        tokens, action = np.zeros(length + 1, np.int32), np.arange(length + 1) > 0
        meta = {"index": index, "finish": "length" if index == 3 else "stop"}
        samples.append(Sample("2+2?", response, tokens=tokens, action=action, meta=meta))
    found = Heldout(np.array([[1.0, 0.0, 1.0, 1.0]]), tuple(samples), reward="exact")
    report = summary(found, 1.0)
    assert report["majority@4"]["value"] == 1
    assert (report["length"]["value"], report["truncated"]["value"]) == (2, 0.25)
    [record] = by_prompt(found)
    assert (record["lengths"], record["truncated"]) == ([2, 1, 3, 2], [False, False, False, True])


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
