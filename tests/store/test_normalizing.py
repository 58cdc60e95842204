"""`agro import --center-by`: rewards relative to those of one user, which can be undone."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from agro.errors import Refused
from agro.logs.importing import Components, Statistics
from agro.store import Store

ROWS = [("alice", 1.0), ("alice", 3.0), ("bob", 10.0), ("bob", 10.0), ("carol", 7.0), ("bob", None)]


RECORDS = [
    {"prompt": f"{i}?", "response": "x", "reward": reward, "user": user}
    for i, (user, reward) in enumerate(ROWS)
]


def test_a_field_that_a_scored_record_lacks_takes_nothing(into: Store, load: Any) -> None:
    message = r"--center-by task: sample 1 .*it has source, role, user.* --map meta.task="
    with pytest.raises(Refused, match=message):
        load(*RECORDS, center_by="task")
    assert into.counts().samples == 0


def test_rewards_are_centered_by_the_other_records_of_a_value(into: Store, load: Any) -> None:
    """By hand: of alice 1 and 3, bob 10 and 10, carol 7 the mean is 6.2, the variance within 2/2 = 1, among
    the means (2 · 4.2² + 2 · 3.8² + .8²)/2 = 32.4, of (5 − 9/5)/2 = 1.6 records: between (32.4 − 1)/1.6."""
    report = load(*RECORDS, center_by="user")
    assert "centered: 5 rewards by 3 values of user, between which 95% of their" in str(report)
    samples = list(into.samples())
    kept = 19.625 / (19.625 + 1)
    shifts = [kept * (3 - 6.2), kept * (1 - 6.2), kept * 3.8, kept * 3.8, 0.0]
    for sample, (user, reward), shift in zip(samples, ROWS, shifts, strict=False):
        assert sample.reward == pytest.approx(reward - shift)
        expected = {"field": "user", "value": user, "shift": pytest.approx(shift), "reward": reward}
        assert sample.meta["normalizer"] == expected
    assert load(*RECORDS, center_by="user").samples == 0
    assert [s.reward for s in into.samples()] == [s.reward for s in samples]
    with pytest.raises(Refused, match="--center-by was user, is not set now"):
        load(*RECORDS)
    load(*RECORDS, replace=True)
    assert [s.reward for s in into.samples()] == [reward for _, reward in ROWS]
    with pytest.raises(Refused, match=r"--center-by task: sample \d+ .* --map meta.task="):
        load(*RECORDS, center_by="task", replace=True)


def of_users(users: int, each: int, apart: float, seed: int) -> list[Statistics]:
    """Ratings with a standard deviation of 1, of users whose means have one of `apart`."""
    rng = random.Random(seed)
    every = []
    for _ in range(users):
        found, lenience = Statistics(), rng.gauss(0, apart)
        for _ in range(each):
            found.add(rng.gauss(lenience, 1))
        every.append(found)
    return every


def test_components_are_those_that_were_drawn():
    found = [Components.of(of_users(60, 10, 0.5, seed)) for seed in range(40)]
    assert statistics.mean(c.within for c in found) == pytest.approx(1, abs=0.03)
    assert statistics.mean(c.between for c in found) == pytest.approx(0.25, abs=0.03)
    assert min(c.surprise for c in found) > 4
    chance = [Components.of(of_users(60, 10, 0.0, seed)) for seed in range(200)]
    assert statistics.stdev(c.surprise for c in chance) == pytest.approx(1, abs=0.15)
    assert sum(c.surprise > 4 for c in chance) == 0


def test_one_value_or_single_records_are_not_moved():
    for every in (of_users(1, 9, 1.0, 0), of_users(9, 1, 1.0, 0)):
        found = Components.of(every)
        assert (found.share, found.surprise) == (0.0, 0.0)
        assert found.shift(every[0], 5.0) == 0.0
