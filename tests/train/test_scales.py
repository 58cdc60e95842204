"""Rewards of several scales in a group are refused, or mapped by `data.reward_scale`."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_runs import before_step, tiny

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.store import Store
from agro.train.phases import Phase
from agro.train.trainable import check_drawn, check_scales, check_store, rescaled
from agro.types import Sample

GRADES = {"annotators": {"factor": 0.25, "offset": -0.25}}  # 1 … 5 to 0 … 1


def data(**values: object):
    return RunConfig.of({"data": values}).data


def made(source: str, *rewards: float, prompt: str = "1>") -> list[Sample]:
    return [Sample(prompt, str(i), reward=r, role="log", source=source) for i, r in enumerate(rewards)]


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "log.db") as store:
        store.append([*made("checker", 0.0, 1.0), *made("annotators", 1.0, 5.0)])
        yield store


def test_sources_of_different_scales_are_refused_where_they_meet(store):
    with pytest.raises(
        Refused, match=r"checker go from 0 to 1, those of annotators from 1 to 5.*reward_scale"
    ):
        check_scales(data(), store)
    check_scales(data(reward_scale={**GRADES, "checker": {}}), store)
    check_scales(data(reward_scale=GRADES), store)  # mapped, the ranges agree
    check_scales(data(sources=["checker"]), store)
    with pytest.raises(Refused, match="different scales"):
        check_store(Phase("", RunConfig.of({"objective": {"name": "agro"}}), 0, 1), store)
    check_store(Phase("", RunConfig.of({"objective": {"name": "sft"}}), 0, 1), store)  # reads no rewards


def test_apart_or_within_one_scale_they_may_have_any_range(tmp_path):
    with Store.open(tmp_path / "log.db") as store:
        store.append([*made("a", 0.0, 0.01), *made("b", 0.9, 1.0), *made("c", -1.0, 2.9)])
        store.append(made("d", 1.0, 100.0, prompt="2>"))
        check_scales(data(), store)


def test_a_map_changes_rewards_and_those_of_tokens():
    [sample] = made("annotators", 5.0)
    sample = sample.replace(
        tokens=np.array([1, 2], np.int32),
        action=np.array([False, True]),
        tokenizer="t",
        token_reward=np.array([np.nan, 4.0], np.float32),
    )
    [mapped] = rescaled([sample], data(reward_scale=GRADES))
    assert mapped.reward == 1.0
    assert mapped.token_reward[1] == 1.0
    assert rescaled(made("checker", 1.0), data(reward_scale=GRADES))[0].reward == 1.0


def test_a_step_is_refused_too_where_scales_meet_that_the_store_did_not_show():
    with pytest.raises(Refused, match="meet in a group of this step"):
        check_drawn([*made("policy", 0.0, 1.0), *made("annotators", 4.0)], data())
    check_drawn([*made("policy", 0.0), *made("annotators", 4.0, prompt="2>")], data())


def test_a_run_trains_on_mapped_rewards(tmp_path, store):
    config = tiny(
        tmp_path,
        data={"store": str(store.path), "replay": 1.0, "reward_scale": GRADES},
        train__steps=1,
        train__groups=1,
    )
    rewards = []
    with before_step(lambda feed, valid: rewards.extend(s.reward for s in valid.samples)):
        Trainer(config, tmp_path / "run").run()
    assert sorted(rewards) == [0.0, 0.0, 1.0, 1.0]
