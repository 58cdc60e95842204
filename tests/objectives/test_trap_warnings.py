"""What on-policy AGRO says of its trap, from its options, from rewards at the start, and in a step."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from agro.objectives.methods import consistency

NAN = math.nan
# μ₃/(2β Var) of one success in four is ½/β, of three in four −½/β; equal and unknown rewards say nothing.
REWARDS = np.array([[0, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, NAN, 1, 0]], dtype=np.float64)


def test_of_options() -> None:
    assert "½ − β = 0.4" in str(consistency.options_warning({"beta": 0.1, "likelihood_ratio": 1.0}))
    for beta, c in ((0.5, 1.0), (0.1, 0.9), (0.1, "adaptive")):
        assert consistency.options_warning({"beta": beta, "likelihood_ratio": c}) is None


@pytest.mark.parametrize(
    ("beta", "c", "said"),
    [
        (0.1, 1.0, r"on 2 of 3 .* whose 4 rewards differ \(of 5\) .* above 1 \(median 5\)"),
        (0.5, 1.0, r"on 0 of 3 .* above 1 \(median 1\)"),
        (0.1, 0.25, r"on 2 of 3 .* above 4 \(median 5\)"),
        (0.1, 0.1, r"on 0 of 3 .* above 10 \(median 5\)"),
    ],
)
def test_of_rewards(beta: float, c: float, said: str) -> None:
    found = consistency.rewards_warning(REWARDS, {"beta": beta, "likelihood_ratio": c})
    assert re.search(said, str(found))


def test_of_three_rewards_there_is_a_ratio_and_of_two_none() -> None:
    """Of 0, 0, 1: 3/1 · (2/9)/(2/3) / 2β = ½/β."""
    options = {"beta": 0.1, "likelihood_ratio": 1.0}
    assert "(median 5)" in str(consistency.rewards_warning(np.array([[0.0, 0.0, 1.0]]), options))
    assert consistency.rewards_warning(np.array([[0.0, 1.0]]), options) is None


@pytest.mark.parametrize(("beta", "c"), [(0.1, "adaptive"), (0.0, 1.0), (0.1, 0.0)])
def test_without_a_trap_nothing_is_said_of_rewards(beta: float, c: object) -> None:
    assert consistency.rewards_warning(REWARDS, {"beta": beta, "likelihood_ratio": c}) is None
    assert consistency.rewards_warning(REWARDS[3:], {"beta": 0.1, "likelihood_ratio": 1.0}) is None


def test_of_metrics() -> None:
    assert "60%" in str(consistency.metrics_warning({"reversed_share": 0.6}, {}))
    assert consistency.metrics_warning({"reversed_share": 0.5}, {}) is None
    assert consistency.metrics_warning({"reversed_share": NAN}, {}) is None
