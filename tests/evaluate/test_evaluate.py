"""pass@k against all subsets, and the mean over prompts by hand."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from agro.rollout.evaluate import Heldout, best_of_k, pass_at_k
from agro.stats.intervals import wilson


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
    assert found.to_json(None)["best@2"]["value"] == 0.9


def test_equal_values_have_no_error() -> None:
    """Prompts of one reward don't say how far another may be; of shares Wilson's interval bounds that."""
    row = Heldout(np.full((2, 2), 0.5), ()).to_json(None)["reward_mean"]
    low, high = wilson(0.5, 2)
    assert row == {"value": 0.5, "se": None, "low": low, "high": high}
    row = Heldout(np.full((2, 2), 3.0), ()).to_json(None)["reward_mean"]
    assert row == {"value": 3, "se": None, "low": None, "high": None}


def test_means_are_over_prompts_and_the_unknown_counts_nowhere() -> None:
    found = Heldout(np.array([[1.0, 0.0], [1.0, math.nan], [math.nan, math.nan]]), ())
    assert found.mean == pytest.approx((0.5 + 1) / 2)
    assert found.se == pytest.approx(np.std([0.5, 1], ddof=1) / math.sqrt(2))
    assert found.unscored == 3
    assert found.to_json(1.0)["pass@2"] == {"value": 1.0, "se": None, "low": None, "high": None}
    assert found.to_json(1.5)["accuracy"]["value"] == 0.0
    assert found.to_json(None).keys() == {"reward_mean", "pass_at", "unscored"}
    assert math.isnan(Heldout(np.full((2, 1), math.nan), ()).mean)
