"""Whitening, clipping and the shares of parts: numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agro.config import RunConfig
from agro.errors import Refused
from agro.objectives.advantage import normalized_by_part
from agro.objectives.reduce import Groups
from agro.rewards.shaping import shaped, shares
from agro.types import Batch, Sample


def settings(**reward):
    return RunConfig.of({"reward": reward}).reward


def of(prompt, reward, **parts):
    meta = {"reward_parts": parts} if parts else {}
    return Sample(prompt, f"r{reward}", reward=reward, prompt_id=prompt, meta=meta)


TWO = {"functions": [{"name": "a"}, {"name": "b", "weight": 0.1}, {"name": "c", "weight": 0}]}


def test_one_reward_over_its_group_or_its_step():
    """Groups (0, 2) and (5, 5): ±√½ and 0. Over the step the mean is 3 and the deviation √(18/3)."""
    samples = [of("p", 0.0), of("p", 2.0), of("q", 5.0), of("q", 5.0), of("q", None)]
    by_group = [s.reward for s in shaped(samples, settings(name="exact", whiten="group"))]
    assert by_group[:2] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-6)
    assert by_group[2:] == [0.0, 0.0, None]
    by_step = [s.reward for s in shaped(samples, settings(name="exact", whiten="batch"))]
    assert by_step[:4] == pytest.approx([-3 / 6**0.5, -1 / 6**0.5, 2 / 6**0.5, 2 / 6**0.5], abs=1e-6)
    clipped = shaped(samples, settings(name="exact", whiten="batch", clip=[-1, 0.5]))
    assert [s.reward for s in clipped] == [-1.0, pytest.approx(-1 / 6**0.5, abs=1e-6), 0.5, 0.5, None]
    assert [s.reward for s in shaped(samples, settings(name="exact", clip=[1, 3]))] == [1, 2, 3, 3, None]


def test_equal_rewards_are_whitened_to_0():
    """Also where their mean isn't exactly them, as of three times 0.1."""
    samples = [of("p", 0.1)] * 3
    for over in ("group", "batch"):
        assert [s.reward for s in shaped(samples, settings(name="exact", whiten=over))] == [0.0] * 3


def test_parts_are_whitened_each_before_their_weights():
    """a is (0, 1, 1, 0), b (100, 0, 100, 0): ±√¾ each, so b adds a tenth however large it is.

    GDPO's advantage is this before it is normalized over the step.
    """
    rows = [(0.0, 100.0), (1.0, 0.0), (1.0, 100.0), (0.0, 0.0)]
    samples = [of("p", a + 0.1 * b, a=a, b=b, c=None) for a, b in rows]
    whitened = [s.reward for s in shaped(samples, settings(whiten="group", **TWO))]
    assert whitened == pytest.approx([0.75**0.5 * x for x in (-0.9, 0.9, 1.1, -1.1)], abs=2e-6)
    parts = torch.tensor(rows, dtype=torch.float64)
    extra = {"reward_parts": parts, "part_weights": torch.tensor([[1.0, 0.1]] * 4, dtype=torch.float64)}
    batch = Batch.of(mask=[[0, 1]] * 4, reward=[0.0] * 4, group=["p"] * 4, extra=extra)
    advantage = normalized_by_part(Groups.of(batch)).numpy()
    assert advantage == pytest.approx(np.array(whitened) / np.std(whitened), abs=1e-12)


def test_shares_of_the_variance_within_groups():
    """Both parts independent: Var a = ¼, Var .1 b = 25, so 1/101 and 100/101. What differs between groups
    alone has none of it."""
    rows = [(0.0, 100.0), (1.0, 0.0), (1.0, 100.0), (0.0, 0.0)]
    samples = [of("p", a + 0.1 * b, a=a, b=b) for a, b in rows]
    found = shares([*samples, of("q", 999.0, a=999.0, b=0.0)], settings(**TWO))
    assert found == pytest.approx({"a": 1 / 101, "b": 100 / 101})
    assert shares([of("q", 1.0, a=1.0, b=0.0)], settings(**TWO)) == {"a": None, "b": None}


def test_a_part_that_works_against_the_others_has_a_negative_share():
    """a = (0, 1), b = (5, 0): the sum is (.5, 1), of which a makes 2 and .1 b −1."""
    samples = [of("p", 0.5, a=0.0, b=5.0), of("p", 1.0, a=1.0, b=0.0)]
    assert shares(samples, settings(**TWO)) == pytest.approx({"a": 2.0, "b": -1.0})


def test_a_log_without_parts_is_refused_by_whitening_and_has_no_share():
    imported = [of("p", 1.0), of("p", 0.0)]
    with pytest.raises(Refused, match="of its part a nothing is recorded"):
        shaped(imported, settings(whiten="group", **TWO))
    assert shares(imported, settings(**TWO)) == {"a": None, "b": None}
