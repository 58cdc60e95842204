"""The log's mean reward beside the model's own: both by one reward, on the same prompts."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agro import config
from agro.config import NewModel, RewardConfig, RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.pages.store import check_store
from agro.pages.store import measurements as module
from agro.pages.store.measurements import OwnReward, own_reward
from agro.rewards import load_reward
from agro.store import Store
from agro.types import Sample

RUN = RunConfig.of({"sampler": {"max_new": 3}})


@pytest.fixture
def policy() -> Policy:
    new = NewModel(alphabet="0123456789>", hidden=16, layers=1, heads=2, context=16)
    return Policy.load(config.PolicyConfig(new=new), seed=0)


def fill(path: Path, right: int, prompts: int = 30) -> Store:
    """Of four responses to each prompt so many are right; the stored rewards say nothing."""
    store = Store.open(path)
    store.append(
        Sample(f"{100 + g}>", "77" if i < right else "0", reward=5.0 + i % 2, meta={"answer": "77"})
        for g in range(prompts)
        for i in range(4)
    )
    return store


def measured(store: Store, policy: Policy, name: str = "exact") -> OwnReward:
    with closing(load_reward(RewardConfig(name=name))) as reward:
        return own_reward(store, policy, reward, RUN)


def test_both_are_scored_by_the_reward_on_the_same_prompts(tmp_path: Path, policy: Policy) -> None:
    with fill(tmp_path / "log.db", 3) as store:
        found = measured(store, policy)
    assert (found.log, found.log_se, found.prompts) == (0.75, 0.0, 30)  # 3 of 4, to every prompt
    assert found.own < 0.2  # two digits of eleven symbols by chance
    assert 0 < found.own_se == found.difference_se or found.own == 0
    share = (0.75 * 4 + found.own * 4) / 8  # of 0 and 1, as many of the log as of the policy
    assert found.spread == pytest.approx(np.sqrt(share * (1 - share)))
    assert found.lead == pytest.approx((0.75 - found.own) / found.spread)


@pytest.mark.parametrize(("right", "said"), [(3, "may help"), (0, "isn't expected to help")])
def test_the_verdict_says_what_it_means(tmp_path: Path, policy: Policy, right: int, said: str) -> None:
    with fill(tmp_path / "log.db", right) as store:
        report = replace(check_store(store, RUN), own_reward=measured(store, policy))
    assert f"{said}" in " ".join(str(v) for v in report.verdicts)
    assert "30 of its prompts" in str(report)
    assert report.to_json()["own_reward"]["prompts"] == 30


def test_prompts_without_room_or_scores_are_left_out(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROMPTS", 8)
    with fill(tmp_path / "log.db", 1) as store:
        assert measured(store, policy).prompts == 8
    with Store.open(tmp_path / "long.db") as store:
        store.append([Sample("1" * 20 + ">", "1", reward=1.0, meta={"answer": "1"})])
        with pytest.raises(Refused, match="expected prompts that leave room"):
            measured(store, policy)
    with Store.open(tmp_path / "no.db") as store:
        store.append([Sample("1>", "1", reward=1.0)])  # without an answer
        with pytest.raises(Refused, match="no prompt has a scored response of both"):
            measured(store, policy)


def test_the_command(tmp_path: Path, policy: Policy) -> None:
    from typer.testing import CliRunner

    from agro.cli import app

    def check(*arguments: Any) -> Any:
        return CliRunner().invoke(app, ["check", str(tmp_path / "log.db"), *map(str, arguments)])

    fill(tmp_path / "log.db", 3).close()
    model = tmp_path / "model"
    policy.model.save_pretrained(model)
    policy.tokenizer.save_pretrained(model)
    found = check("--model", model, "--reward", "exact", "--set", "sampler.max_new=3", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["own_reward"]["log"] == 0.75
    assert "--reward scores responses of --model" in check("--reward", "exact").stderr
    assert "--option is of --reward" in check("--option", "a=1").stderr
