"""The parts of rewards that GDPO (arXiv 2601.05242) normalizes, from the functions of a run to the batch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import tiny

from agro import Batch
from agro.config import RewardPart, RunConfig
from agro.errors import Refused
from agro.pages.store.check_report import rank
from agro.store import Store
from agro.train.collate import with_reward_parts
from agro.train.phases import Phase
from agro.train.trainable import check_store
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
    np.testing.assert_equal(extra["reward_parts"].numpy(), [[1.0, -2.0], [math.nan] * 2, [math.nan] * 2])
    assert extra["part_weights"].tolist() == [[1.0, 0.5]] * 3


def test_parts_are_within_caps_and_behind_gates() -> None:
    """b counts as at most 2, and only where a reaches 1; a foreign log's own text is none of them."""
    functions = (RewardPart(name="a", gate=1.0), RewardPart(name="b", at_most=2.0))
    recorded = ({"a": 1.0, "b": 5.0}, {"a": 0.0, "b": 5.0}, "a foreign log's own")
    samples = [Sample("x", "y", meta={"reward_parts": parts}) for parts in recorded]
    batch = Batch.of(mask=[[0, 1]] * 3, reward=[0.0] * 3, group=["x"] * 3)
    found = with_reward_parts(batch, samples, functions).extra["reward_parts"].numpy()
    np.testing.assert_equal(found, [[1.0, 2.0], [0.0, 0.0], [math.nan] * 2])


def test_a_run_trains_on_the_parts_of_its_own_rewards(tmp_path: Path) -> None:
    overlong = {"name": "overlong", "options": {"max_tokens": 3, "buffer": 2}}
    config = tiny(tmp_path, objective={"name": "gdpo"}, reward={"functions": [{"name": "exact"}, overlong]})
    BaseTrainer(config, tmp_path / "run").run()
    with Store.open(tmp_path / "run" / "store.db", read_only=True) as store:
        assert all(sample.meta["reward_parts"].keys() == {"exact", "overlong"} for sample in store.samples())


def test_a_log_without_parts_is_refused_before_the_run_and_not_listed_as_possible(tmp_path: Path) -> None:
    """It has rewards and the log-probs of who wrote it, which is all that the clipped objectives need."""
    wrote = {"tokens": np.arange(3), "action": np.array([False, True, True])}
    wrote["behavior_logp"] = np.array([np.nan, -1.0, -2.0], np.float32)
    with Store.open(tmp_path / "log.db") as store:
        store.append(Sample("x", str(i), reward=float(i), **wrote) for i in range(2))
        impossible = {each.name: each.reason for each in rank(store).impossible}
        assert "cispo" not in impossible
        assert impossible["gdpo"] == "the parts of several rewards"
        config = RunConfig.load("gdpo", [f"data.store={store.path}", "data.replay=1", "policy.model=MODEL"])
        with pytest.raises(Refused, match=r"reward_parts .* sample 1 \(prompt .*has no value of exact"):
            check_store(Phase.all(config)[0], store)
