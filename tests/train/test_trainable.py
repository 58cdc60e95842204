"""What a store's records must have for an objective: `agro check`, `--dry-run` and training agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_feed import feed
from tiny_runs import by_someone, fill_store, log_alone, metrics, run_tiny, tiny
from typer.testing import CliRunner

from agro.api.reporting_trainer import Trainer
from agro.cli import app
from agro.errors import Refused
from agro.store import At, DrawnGroups, DrawRule, Store
from agro.types import Sample


def check(path: Path, objective: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["check", str(path), "--objective", objective, "--json"])
    return done.exit_code, json.loads(done.stdout)


def recorded(prompt: str, response: str, **fields: Any) -> Sample:
    """A response of one token after a prompt of four, with its log-prob."""
    tokens = {"tokens": [1, 3, 4, 5, 6], "action": [False] * 4 + [True]}
    known = {"reward": float(response), **tokens, "behavior_logp": [np.nan] * 4 + [-0.5]}
    return Sample(prompt, response, **known | fields)


def log_of(folder: Path, *samples: Sample) -> Path:
    return Path(log_alone(folder, samples)["store"])


def on_the_log(folder: Path, **changes: Any) -> Trainer:
    """A run on the log alone, a group a step."""
    values = {"data": log_alone(folder), "train__groups": 1, **changes}
    return Trainer(tiny(folder, **values), folder / "run")


@pytest.mark.parametrize(
    ("settings", "cut"),
    [
        ({"top_k": 5, "top_p": 0.9}, "top_k 5, top_p 0.9"),
        ({"min_p": 0.05}, "min_p 0.05"),
        ({"temperature": 0}, "temperature 0"),
        ({"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, None),
        ({"top_k": -1, "top_p": None, "min_p": "none"}, None),  # as other samplers say that nothing is cut
        (None, None),
    ],
    ids=str,
)
def test_recorded_log_probs_of_truncated_sampling_are_not_for_ratios(tmp_path, settings, cut) -> None:
    """They are normalized over the tokens that were kept, the trainer's over all."""
    samples = [recorded("100>", "0", sampling=settings), recorded("100>", "1")]
    log = log_of(tmp_path, *samples)
    trainer = on_the_log(tmp_path, objective={"name": "grpo"})
    made = feed(trainer.config)
    drawn = DrawnGroups([s.replace(id=i) for i, s in enumerate(samples, 1)])
    code, report = check(log, "grpo")
    if cut is None:
        assert code == 0
        trainer.plan()
        assert len(made.valid(drawn, ()).samples) == 2
        return
    assert code == 2
    assert f"sample 1 (prompt {samples[0].prompt_id}, sampled with {cut})" in report["problem"]
    assert check(log, "agro")[0] == 0  # it doesn't read them
    for act in (trainer.plan, lambda: made.valid(drawn, ())):
        with pytest.raises(Refused, match=f"behavior_logp: 1 of 2 .*{cut}"):
            act()


@pytest.mark.parametrize(
    ("rewards", "token_rewards", "differs"),
    [
        ((1.0, 0.0), (None, None), True),
        ((1.0, 1.0), (None, 0.5), True),  # the reward of a row includes those of its tokens
        ((1.0, 1.0), (0.5, 0.5), False),
        ((1.0, 0.0, None), (None, None, None), False),  # not complete, so that it isn't drawn
    ],
)
def test_rows_of_an_episode_share_a_reward(tmp_path, rewards, token_rewards, differs) -> None:
    rows = []
    for reward, of_token in zip(rewards, token_rewards, strict=True):
        extra = {} if of_token is None else {"token_reward": [np.nan] * 4 + [of_token]}
        rows.append(recorded("100>", "1", episode="e", reward=reward, **extra))
    log = log_of(tmp_path, *rows, recorded("100>", "1"), recorded("100>", "0"))
    assert check(log, "sft")[0] == 0  # it doesn't read rewards
    code, report = check(log, "agro")
    if not differs:
        assert code == 0
        on_the_log(tmp_path, train__steps=2).run()
        return
    assert code == 2
    assert "episode e" in report["problem"]
    assert "sample 1 " in report["problem"]
    with pytest.raises(Refused, match="episode e"):
        on_the_log(tmp_path).plan()


@pytest.mark.parametrize(
    ("key", "names", "known"),
    [
        ("sources", ["someone", "sumone"], "has sumone; .* other .1., someone .32."),
        ("roles", ["expert"], "has expert; .* log .33."),
        ("roles", [], "empty list .* log .33."),
        ("reward_scale", {"sumone": {}}, "has sumone; .* other .1., someone .32."),
    ],
)
def test_a_name_that_no_sample_has_is_refused(tmp_path: Path, key: str, names: list[str], known: str) -> None:
    log = log_of(tmp_path, *by_someone(), Sample("1>", "2", reward=1.0, source="other"))
    for replay in (0.5, 1.0):
        with pytest.raises(Refused, match=rf"data\.{key}: .* {known}"):
            run_tiny(tmp_path, data__store=str(log), data__replay=replay, **{f"data__{key}": names})


def test_a_source_of_a_table_of_shares_is_known_beside_a_role(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db")
    shares = {"data__store": str(tmp_path / "log.db"), "data__replay": {"log": 0.5, "sumone": 0.25}}
    with pytest.raises(Refused, match=r"data\.replay: no sample .* has sumone; .* someone"):
        Trainer(tiny(tmp_path, **shares), tmp_path / "run").plan()


def test_a_run_may_name_the_samples_that_it_makes_itself(tmp_path: Path) -> None:
    """Into a store of its own, into one with samples of others, for a later phase; not before it samples."""
    own = {"data__sources": ["policy"], "data__roles": ["policy"], "train__steps": 3}
    run = run_tiny(tmp_path, "own", **own, data__replay=0.5)
    assert [m["replay_share"] for m in metrics(run)] == [0.0, 0.5, 0.5]
    fill_store(tmp_path / "log.db")
    log = {**own, "data__store": str(tmp_path / "log.db")}
    phases = [{"name": "fresh"}, {"name": "stored", "data": {"replay": 1.0}}]
    Trainer(tiny(tmp_path, **log, data__replay=0.5), tmp_path / "mixed").plan()
    Trainer(tiny(tmp_path, **log, phases=phases), tmp_path / "phases").plan()
    with pytest.raises(Refused, match=r"data\.sources: .* has policy;"):
        Trainer(tiny(tmp_path, **log, phases=phases[::-1]), tmp_path / "early").plan()


def test_the_best_of_a_group_are_for_objectives_of_single_responses(tmp_path: Path) -> None:
    """Of 0, 1, 1 `sft` gets both of 1, and the 0 that is alone; with a least reward (RAFT) not the latter."""
    log = log_of(tmp_path, *(recorded("100>", each) for each in "011"), recorded("101>", "0"))

    def best(name: str, least: float | None = None) -> Trainer:
        data = {"data__best_of_group": True, "data__min_reward": least}
        return on_the_log(tmp_path, objective={"name": name}, **data)

    best("sft").plan()
    with pytest.raises(Refused, match=r"rloo compares the responses of a group .*data\.best_of_group"):
        best("rloo").plan()
    with pytest.raises(Refused, match=r"no samples that .* data\.min_reward and data\.best_of_group admit"):
        best("sft", 2.0).plan()
    for step, (least, expected) in enumerate(((None, [0.0, 1.0, 1.0]), (0.5, [1.0, 1.0])), 1):
        config = best("sft", least).config
        with Store.open(log) as store:
            rule = DrawRule(2, config.data, scored_only=False, fewer=True)
            drawn = store.draw(rule, At("r", step, 0, 0))
        valid = feed(config).valid(drawn, ())
        assert sorted(s.reward for s in valid.samples) == expected
