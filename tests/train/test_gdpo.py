"""The parts of rewards that GDPO (arXiv 2601.05242) normalizes, from the functions of a run to the batch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import tiny

from agro import Batch
from agro.config import RewardPart
from agro.errors import Refused
from agro.store import Store
from agro.train.collate import with_reward_parts
from agro.train.trainer import BaseTrainer
from agro.types import Sample

FUNCTIONS = (
    RewardPart(name="exact"),
    RewardPart(name="length", weight=0.5),
    RewardPart(name="seen", weight=0.0),
)


def test_a_batch_has_the_parts_with_a_weight_in_the_order_of_the_functions() -> None:
    recorded = ({"length": -2.0, "exact": 1.0, "seen": 7.0}, {"exact": None, "length": 3.0}, None)
    samples = [Sample("x", "y", meta={} if parts is None else {"reward_parts": parts}) for parts in recorded]
    batch = Batch.of(mask=[[0, 1]] * 3, reward=[0.0] * 3, group=["x"] * 3)
    extra = with_reward_parts(batch, samples, FUNCTIONS).extra
    np.testing.assert_equal(
        extra["reward_parts"].numpy(), [[1.0, -2.0], [math.nan, 3.0], [math.nan, math.nan]]
    )
    assert extra["part_weights"].tolist() == [[1.0, 0.5]] * 3


def test_a_run_trains_on_the_parts_of_its_own_rewards(tmp_path: Path) -> None:
    overlong = {"name": "overlong", "options": {"max_tokens": 3, "buffer": 2}}
    config = tiny(tmp_path, objective={"name": "gdpo"}, reward={"functions": [{"name": "exact"}, overlong]})
    BaseTrainer(config, tmp_path / "run").run()
    with Store.open(tmp_path / "run" / "store.db", read_only=True) as store:
        assert all(sample.meta["reward_parts"].keys() == {"exact", "overlong"} for sample in store.samples())


def test_one_reward_has_no_parts(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"objective gdpo needs reward_parts .*reward\.functions"):
        BaseTrainer(tiny(tmp_path, objective={"name": "gdpo"}), tmp_path / "run").run()
