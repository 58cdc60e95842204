"""The verdict's false positives and power, on a few of the simulated settings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reproductions.verdict import off_policy
from reproductions.verdict.off_policy import TRUE_V, Judged, measure_values
from reproductions.verdict.run import Case, draw, measure, near_copies, tables


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
    copied = near_copies(2, means=(0.5,))
    page = tables({"nothing learned": [none], "known gain": [gained | {"gain": 0.2}], "near-copies": copied})
    assert f"| 0/1, 300 | {none['better']:.2%} |" in page


def test_copies_that_count_as_prompts_are_called_better_too_often() -> None:
    rows = near_copies(60, means=(0.5,))
    large = [row for row in rows if row["sizes"] == "20 × 10"]
    assert sum(row["better"] for row in large) / 2 <= 0.025 + 3 * math.sqrt(0.025 / 120)
    assert sum(row["better, as if alone"] for row in large) / 2 > 0.15


def test_the_true_gain_is_that_of_the_tables_and_the_interval_holds_it() -> None:
    world = off_policy.world(3.0, "rewards", other_author=False)
    for table in (world.author, world.start, world.trained):
        assert np.exp(table).sum(1) == pytest.approx(1)
    x = np.repeat(np.arange(200), 400)
    y = [np.random.default_rng(i).choice(27, p=np.exp(world.trained[i // 400])) for i in range(0, 80_000, 8)]
    sampled = world.rewards[x[::8], y].mean() - (np.exp(world.start) * world.rewards).sum(1).mean()
    assert world.gain == pytest.approx(sampled, abs=0.02)
    row = off_policy.measure(world, 100, 4, 60, 0)
    assert row["estimable"] == 1
    assert row["covers"] >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / 60)
    away = off_policy.measure(off_policy.world(10.0, "away", other_author=True), 100, 4, 10, 0)
    assert away["estimable"] == 0


@pytest.mark.parametrize("by_token", [False, True])
def test_the_true_value_is_that_of_the_tables(by_token: bool) -> None:
    judged = Judged(3.0, "rewards", other_author=False, by_token=by_token)
    p = np.exp(judged.policy.sum(-1))
    assert judged.value == pytest.approx(float((p * judged.rewards.sum(-1)).sum(1).mean()))
    rows = {row["estimate"]: row for row in measure_values(judged, (100, 4), 40, 0)}
    best = rows["doubly_robust"]
    assert abs(best["bias"]) <= 3 * best["sd"] / math.sqrt(40 * best["estimable"])
    assert best["covers"] >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / 40)
    assert rows[TRUE_V]["sd"] < best["sd"]
