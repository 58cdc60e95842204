"""Objectives that mix own responses with an expert's, or learn from a teacher: edges, metrics and refusals.

Of an expert (sections 1 and 11.0 to 11.4): two own responses of one token, with rewards 1 and 0, and an
expert's with the reward 1: the group's mean is 2/3, its advantages 1/3, -2/3 and 1/3. test_agreement.py
compares loss and gradient at any numbers with plain loops.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from agro import Batch, objectives
from agro.errors import Refused
from agro.train.phases import options_at
from agro_papers.methods.experts import shape_reward

ROLES = ["policy", "policy", "expert"]


def batch(role: list[str], reward: list[float], logp: list[float], **more: Any) -> tuple[Any, Batch]:
    """One token a response, own ones at the behavior policy; an expert's log-probs are unknown."""
    rows = [[0.0, x] for x in logp]
    known = [None if r == "expert" else row for r, row in zip(role, rows)]
    B = len(role)
    return rows, Batch.of(
        mask=[[False, True]] * B,
        reward=reward,
        role=role,
        **{"group": [0] * B, "behavior_logp": known, "old_logp": known, **more},
    )


def grad(name: str, rows: Any, given: Batch, **options: Any) -> list[float]:
    return objectives.evaluate(name, rows, given, **options).grad[:, 1].tolist()


def test_chord_without_own_or_without_experts_rows() -> None:
    """Each term has its own count: the expert's is 0 without any, and stays as it is alone."""
    rows, given = batch([*ROLES, "expert"], [1, 0, math.nan, math.nan], [-1, -2, -3, -3], group=[0, 0, 0, 1])
    own, alone = given.rows(torch.arange(2)), given.rows(torch.tensor([3]))
    assert grad("chord", rows[:2], own) == pytest.approx(grad("chord", rows, given)[:2], rel=1e-14)
    assert grad("chord", rows[3:], alone, mu=1.0, expert_weight="none") == [-1.0]


def test_what_is_unknown_of_own_rows_is_refused() -> None:
    rows, given = batch(ROLES, [1, 0, math.nan], [-1, -2, -3])
    for changes in ({"behavior_logp": None}, {"reward": torch.full((3,), math.nan)}):
        with pytest.raises(Refused, match="1 of 3 rows have it, 2 don't"):
            objectives.evaluate("chord", rows, given.replace(**changes))
    with pytest.raises(Refused, match="groups of at least 2 responses: 0 of 1 groups"):
        objectives.evaluate("chord", rows[1:], given.rows(torch.tensor([1, 2])))
    same = given.replace(response=torch.tensor([0, 1, 1]), reward=torch.zeros(3))
    with pytest.raises(Refused, match=r"role: .*rows of one response have different values"):
        objectives.evaluate("chord", rows, same)


def test_the_schedule_of_mu() -> None:
    """W = 4, D = 8, P = 0.9, U = 0.1: 0, P/2 at W/2, P at W, the middle at W + D/2, U from W + D on."""
    mu = {"start": 0.9, "end": 0.1, "steps": 8, "shape": "cosine", "warmup": 4}
    found = [options_at({"x": mu}, step)["x"] for step in (0, 2, 4, 8, 12, 99)]
    assert found == pytest.approx([0.0, 0.45, 0.9, 0.5, 0.1, 0.1], rel=1e-12)
    at_once = {"start": 0.9, "end": 0.1, "steps": 0, "warmup": 0}
    assert options_at({"x": at_once}, 0)["x"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["luffy", "ampo", "guide"])
def test_a_group_without_a_wrong_response_stands_still(name: str) -> None:
    rows, given = batch(ROLES, [1, 1, 1], [-1, -2, -3], extra={"hinted": [0, 1, 0]})
    given = given.replace(behavior_logp=torch.tensor(rows, dtype=torch.float64))
    assert grad(name, rows, given) == [0, 0, 0]


def test_guide_without_hints_is_grpo() -> None:
    rows, given = batch(["policy"] * 3, [1, 0, 1], [-1, -2, -3], extra={"hinted": [0.0] * 3})
    assert grad("guide", rows, given) == pytest.approx(grad("grpo", rows, given), rel=1e-14)


def test_tempsamps_shape() -> None:
    """0.8 - (e^(0.8 - r) - 1)/(e - 1), and 0.8 + 0.01 log(r + 0.2): the specification's numbers."""
    found = shape_reward(torch.tensor([0, 0.2, 0.5, 0.8, 1], dtype=torch.float64), 0.8)
    assert found.tolist() == pytest.approx([0.087, 0.322, 0.596, 0.8, 0.802], abs=5e-4)
    around = shape_reward(torch.tensor([0.8 - 1e-9, 0.8 + 1e-9], dtype=torch.float64), 0.8)
    assert 0 < float(around.diff()) < 1e-8


def test_tempsamps_anchor_ignores_the_experts_reward() -> None:
    """Own advantages ±1/√2 of rewards 1 and 0; the expert's is 1.2 times the best."""
    for reward in (1.0, -5.0, math.nan):
        rows, given = batch(ROLES, [1, 0, reward], [-1, -2, -3])
        found = grad("tempsamp_r1", rows, given, fix="anchor")
        root = 0.5 / (math.sqrt(0.5) + 1e-6)
        assert found == pytest.approx([-root / 3, root / 3, -1.2 * root / 3], rel=1e-12)
    rows, given = batch(ROLES, [1, 1, 1], [-1, -2, -3])
    assert grad("tempsamp_r1", rows, given, fix="anchor") == [0, 0, 0]


def test_hnpg_takes_old_responses_of_an_expert_for_its_value_alone() -> None:
    """V = 0.3: own r = 1, off by 0.7; the expert's r = 0, off by −0.3, and no gradient in its log-probs."""
    given: dict[str, Any] = {"mask": [[0, 1]] * 2, "reward": [1.0, 0.0], "group": "aa"}
    logp, values = [[0.0, -1.0]] * 2, {"value": [0.3, 0.3]}
    batch = Batch.of(role=["policy", "expert"], staleness=[0.0, math.nan], **given)
    out = objectives.evaluate("hnpg", logp, batch, streams=values, offline=0.5)
    np.testing.assert_allclose(out.grad[:, 1], [-0.7, 0.0], rtol=1e-13)
    np.testing.assert_allclose(out.grads["value"], [-0.7, 0.5 * 0.3], rtol=1e-13)
    stale = Batch.of(role=["policy", "policy"], staleness=[0.0, 3.0], **given)
    with pytest.raises(Refused, match=r"objective hnpg needs samples of staleness 0.*row 1"):
        objectives.evaluate("hnpg", logp, stale, streams=values)


def kept(nll: list[float], low: float, high: float) -> list[int]:
    B = len(nll)
    given = Batch.of(mask=[[False, True]] * B, reward=[math.nan] * B, group=range(B))
    out = objectives.evaluate("middle_band", [[0.0, -x] for x in nll], given, low=low, high=high)
    assert out.metrics["kept_share"] == pytest.approx((out.grad[:, 1] != 0).mean() if B else 0)
    return np.flatnonzero(out.grad[:, 1]).tolist()


def test_the_middle_band() -> None:
    """Of ten the second to the eighth; a constant more in all changes nothing, a wider band takes no one
    out."""
    nll = [5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 9.0, 7.0, 8.0, 10.0]
    assert [nll[i] for i in kept(nll, 0.2, 0.8)] == [5, 4, 2, 3, 6, 7, 8]
    assert kept([x + 3 for x in nll], 0.2, 0.8) == kept(nll, 0.2, 0.8)
    assert set(kept(nll, 0.2, 0.8)) < set(kept(nll, 0.1, 0.9))
    assert kept(nll, 0.0, 1.0) == list(range(10))
    assert kept([2.0] * 5, 0.4, 0.6) == list(range(5))
