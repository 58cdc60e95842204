"""The verdict's false positives and power, on a few of the simulated settings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reproductions.verdict.run import Case, draw, measure, tables


@pytest.mark.parametrize("kind", ["0/1", "graded"])
def test_the_rewards_are_as_the_case_says(kind: str) -> None:
    before, after = draw(Case(kind, 40_000, 0.5, 0.5, 0.2), np.random.default_rng(0))
    assert (before.mean(), after.mean()) == pytest.approx((0.5, 0.7), abs=0.01)
    if kind == "0/1":
        before, after = draw(Case(kind, 40_000, 0.2, 0.5), np.random.default_rng(0))
        assert np.corrcoef(before, after)[0, 1] == pytest.approx(0.5, abs=0.02)


def test_nothing_learned_is_seldom_better_and_a_gain_is_found() -> None:
    none = measure(Case("0/1", 300, 0.5, 0.5), 400, 0)
    assert none["better"] <= 0.025 + 3 * math.sqrt(0.025 / 400)
    gained = measure(Case("0/1", 300, 0.5, 0.5, 0.2), 100, 0)
    assert gained["better"] > 0.95
    page = tables({"nothing learned": [none], "known gain": [gained | {"gain": 0.2}]})
    assert f"| 0/1 | 300 | 1 | {none['better']:.2%} |" in page
