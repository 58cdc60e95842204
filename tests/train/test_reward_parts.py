"""Rewards in a run: of several parts, which GDPO (arXiv 2601.05242) normalizes, and of a judge whose server
dies."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from loopback import answering
from tiny_runs import REWARDS, metrics, run_tiny, samples_of, tiny, write_prompts

from agro import Batch
from agro.api.reporting_trainer import Trainer
from agro.config import RewardPart, RunConfig
from agro.errors import Refused
from agro.io import connection
from agro.pages.run.page import page
from agro.runs.rundata import load_run
from agro.store import Store
from agro.train.collate import with_reward_parts
from agro.train.phases import Phase
from agro.train.trainable import check_store
from agro.types import Sample


def run(folder: Path, weight: float, reward: dict, **changes) -> Path:
    """The share of 7s is rewarded, and with this weight how near their number is to one."""
    functions = [
        {"name": f"{REWARDS}:sevens", "label": "sevens"},
        {"name": f"{REWARDS}:sober", "label": "sober", "weight": weight},
    ]
    held = write_prompts(folder / "held.jsonl", range(60, 80))
    measured = {"data__eval_prompts": held, "evaluate__every": 5}
    reward = {"functions": functions, **reward}
    return run_tiny(folder, reward=reward, sampler__n=4, train__lr=2e-2, **measured, **changes)


def test_a_reward_that_is_optimized_too_far_is_said(tmp_path: Path) -> None:
    """All 7s earn 1 and are sober 0; a sober response has one of them. The policy passes the peak."""
    folder = run(tmp_path, 0.0, {}, train__steps=25, objective__beta=1e-3)
    rows = metrics(folder)
    held_out = [row["eval_reward_parts"] for row in rows if row["eval_reward_parts"]]
    assert held_out[-1]["sevens"] > held_out[0]["sevens"] + 0.5
    assert held_out[-1]["sober"] < max(parts["sober"] for parts in held_out) - 0.3
    assert rows[-1]["reward_shares"].keys() == {"sevens"}
    known = [row["reward_shares"]["sevens"] for row in rows[1:]]
    assert all(share in (None, pytest.approx(1.0)) for share in known)
    shown = page(load_run(folder))
    for words in ("over-optimized", "sober fell by", "Parts of the held-out reward", "Parts of the reward"):
        assert words in shown


def test_whitened_parts_are_trained_on_and_metrics_stay_as_they_were(tmp_path: Path) -> None:
    """The sum is within ±2 before whitening, and rewards of a step aren't centered in the metrics."""
    folder = run(tmp_path, 1.0, {"whiten": "group", "clip": [-1, 1]}, train__steps=2)
    for row in metrics(folder)[1:]:
        parts = row["reward_parts"]
        assert row["reward_mean"] == pytest.approx(parts["sevens"] + parts["sober"])
        assert sum(row["reward_shares"].values()) == pytest.approx(1)
    assert "Components of the reward differences" in page(load_run(folder))


def rewarded_by(folder: Path, **reward) -> list[Sample]:
    """What a run with this reward samples, and trains on."""
    objective = {"name": "prefix_consistency", "beta": 0.1}
    run = run_tiny(folder, reward=reward, objective=objective, train__steps=2)
    assert metrics(run)[-1]["grad_norm"] > 0
    return samples_of(run)


def test_a_function_rewards_each_token(tmp_path: Path) -> None:
    """1 for each 7, by its id, and nothing where the number of values is wrong."""
    for sample in rewarded_by(tmp_path, name=f"{REWARDS}:dense", places="token"):
        tokens = int(sample.action.sum())
        if sample.response.startswith("0"):
            assert sample.meta["reward_error"] == f"returned {tokens - 1} numbers for {tokens} tokens"
        else:
            assert sample.reward == tokens * ("7" in sample.response)
            assert sample.meta["place_rewards"] == [float("7" in sample.response)] * tokens


def test_a_function_rewards_each_step(tmp_path: Path) -> None:
    """Steps end at a 7. What comes with a step's last token is trained on, and the sum is the reward."""
    samples = rewarded_by(tmp_path, name=f"{REWARDS}:stepwise", places="7")
    assert any(len(sample.meta.get("place_rewards", ())) > 1 for sample in samples)
    for sample in samples:
        assert sample.reward == len(sample.response.replace("7", ""))


UNKNOWN = [math.nan] * 2


@pytest.mark.parametrize(
    ("functions", "recorded", "parts", "weights"),
    [
        pytest.param(
            [{"name": "exact"}, {"name": "length", "weight": 0.5}, {"name": "seen", "weight": 0.0}],
            [{"length": -2.0, "exact": 1.0, "seen": 7.0}, {"exact": None, "length": 3.0}, None],
            [[1.0, -2.0], UNKNOWN, UNKNOWN],
            [1.0, 0.5],
            id="those with a weight, in the order of the functions",
        ),
        pytest.param(
            [{"name": "a", "gate": 1.0}, {"name": "b", "at_most": 2.0}],
            [{"a": 1.0, "b": 5.0}, {"a": 0.0, "b": 5.0}, "a foreign log's own"],
            [[1.0, 2.0], [0.0, 0.0], UNKNOWN],
            [1.0, 1.0],
            id="b counts as at most 2, and only where a reaches 1",
        ),
    ],
)
def test_the_parts_of_a_batch(functions, recorded, parts, weights) -> None:
    samples = [Sample("x", "y", meta={} if each is None else {"reward_parts": each}) for each in recorded]
    batch = Batch.of(mask=[[0, 1]] * 3, reward=[0.0] * 3, group=["x"] * 3)
    extra = with_reward_parts(batch, samples, tuple(RewardPart(**each) for each in functions)).extra
    np.testing.assert_equal(extra["reward_parts"].numpy(), parts)
    assert extra["part_weights"].tolist() == [weights] * 3


def test_a_run_trains_on_the_parts_of_its_own_rewards(tmp_path: Path) -> None:
    overlong = {"name": "overlong", "options": {"max_tokens": 3, "buffer": 2}}
    run = run_tiny(tmp_path, objective={"name": "gdpo"}, reward={"functions": [{"name": "exact"}, overlong]})
    with Store.open(run / "store.db", read_only=True) as store:
        assert all(sample.meta["reward_parts"].keys() == {"exact", "overlong"} for sample in store.samples())


def test_a_log_without_parts_is_refused_before_the_run(tmp_path: Path) -> None:
    """It has rewards and the log-probs of who wrote it, which is all that the clipped objectives need."""
    wrote = {"tokens": np.arange(3), "action": np.array([False, True, True])}
    wrote["behavior_logp"] = np.array([np.nan, -1.0, -2.0], np.float32)
    with Store.open(tmp_path / "log.db") as store:
        store.append(Sample("x", str(i), reward=float(i), **wrote) for i in range(2))
        config = RunConfig.load("gdpo", [f"data.store={store.path}", "data.replay=1", "policy.model=MODEL"])
        with pytest.raises(Refused, match=r"reward_parts .* sample 1 \(prompt .*has no value of exact"):
            check_store(Phase.all(config)[0], store)


def share_of_sevens(response: str) -> float:
    return 10 * response.count("7") / max(1, len(response))


class Judge:
    """Scores by the share of 7s. After `alive` replies it hangs up."""

    def __init__(self, alive: int) -> None:
        self.alive = alive

    def answer(self, path, body, headers):
        self.alive -= 1
        if self.alive < 0:
            return None
        material = json.loads(json.loads(body)["messages"][1]["content"])
        content = json.dumps({"score": share_of_sevens(material["response"])})
        return 200, {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}


def judged_at(url: str, retries: int) -> dict:
    return {"name": "judge", "options": {"url": f"{url}/v1", "model": "m", "retries": retries}}


def test_a_judge_that_dies_leaves_rewards_unknown_and_the_run_goes_on(tmp_path: Path, monkeypatch) -> None:
    """12 responses a step: the first step is judged, and 2 of the second. More than half are unknown: the run
    stops with the cause. When the server is back it is resumed, and ends."""
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.001)
    judging = Judge(alive=14)
    with answering(judging.answer) as url:
        config = tiny(tmp_path, reward=judged_at(url, retries=1), train__steps=3)
        with pytest.raises(Refused, match=r"10 of 12 .* could not be scored"):
            Trainer(config, tmp_path / "run").run()
        with Store.open(tmp_path / "run/store.db", read_only=True) as store:
            samples = list(store.samples(redone=True))
        unknown = [s for s in samples if s.reward is None]
        assert (len(samples), len(unknown)) == (24, 10)
        assert all("judge: http://127.0.0.1" in s.meta["reward_error"] for s in unknown)
        judging.alive = 10**6
        Trainer(config, tmp_path / "run", resume=True).run()
    assert [row["step"] for row in metrics(tmp_path / "run") if row["step"]] == [1, 2, 3]
    with Store.open(tmp_path / "run/store.db", read_only=True) as store:
        last = list(store.samples())
    assert len(last) == 36
    assert all(s.reward == pytest.approx(share_of_sevens(s.response)) for s in last)


def test_a_few_unknown_rewards_do_not_stop_a_run(tmp_path: Path) -> None:
    """2 of the last step's 12 are unknown, and dropped, not 0."""
    with answering(Judge(alive=22).answer) as url:
        folder = run_tiny(tmp_path, reward=judged_at(url, retries=0), train__steps=2)
    last = metrics(folder)[-1]
    assert (last["rewards_failed"], last["dropped_reasons"]["no reward"]) == (2, 2)
