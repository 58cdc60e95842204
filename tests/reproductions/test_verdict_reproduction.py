"""The verdict's false positives and power, on a few of the simulated settings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reproductions.verdict import off_policy


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
