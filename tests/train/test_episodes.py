"""Episodes in the loop: sampled, scored, trained on, measured, and a broken environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import logp_rounding, metrics, tiny, weights, write_prompts

from agro.api.reporting_trainer import Trainer
from agro.errors import Refused
from agro.pages.run.page import page
from agro.runs.rundata import load_run
from agro.store import Store

ENVIRONMENT = '''
import os, time
from agro.rollout.envs import Turn
class Again:
    """A second turn for everybody; the reward is the share of 7s in both."""
    name, stop = "again", ("5",)
    def __init__(self, fails=False):
        self.fails = fails
    def reset(self, prompt):
        return []
    def step(self, state, text):
        if self.fails and state:
            raise RuntimeError("no more")
        state.append(text)
        earned = text.count("7") / 6
        return Turn(None, earned, True) if len(state) == 2 else Turn(">", earned)
class Stuck(Again):
    def step(self, state, text):
        state.append(text)
        if text.startswith("7"):
            time.sleep(60)
        if text.startswith("8"):
            os._exit(3)
        return Turn(None, 1.0, True) if len(state) == 2 else Turn(">", 0.0)
class Silent(Again):
    def step(self, state, text):
        state.append(text)
        return Turn(done=len(state) == 2, observation=">")
'''


def run(tmp_path: Path, name: str, environment: str, resume: bool = False, **changes) -> Path:
    (tmp_path / "again.py").write_text(ENVIRONMENT)
    section = {"name": f"{tmp_path / 'again.py'}:{environment}", "options": changes.pop("options", {})}
    config = tiny(tmp_path, environment=section, policy__new__context=32, **changes)
    return Trainer(config, tmp_path / name, resume=resume).run()


def test_episodes_are_trained_on_and_measured(tmp_path: Path) -> None:
    held = write_prompts(tmp_path / "held.jsonl", range(60, 80))
    folder = run(
        tmp_path, "run", "Again", data__eval_prompts=held, train__groups=8, train__steps=30, train__lr=2e-2
    )
    rows = metrics(folder)
    assert rows[-1]["eval_reward"] > rows[0]["eval_reward"] + 0.1  # at random about 2 · 3 / 12 / 6 = 0.08
    assert rows[-1]["eval_n"] == 20
    assert max(m["logp_diff_max"] for m in rows[1:]) < logp_rounding(folder)
    with Store.open(folder / "store.db", read_only=True) as store:
        samples = list(store.samples())
    assert len(samples) == 30 * 8 * 3
    assert {s.meta["turns"] for s in samples} == {1, 2}  # 1: the first turn was cut
    texts = [s.response.replace(">", "") if s.meta["turns"] == 2 else s.response for s in samples]
    assert all(s.reward == pytest.approx(t.count("7") / 6) for s, t in zip(samples, texts))
    assert sum(int(s.action.sum()) for s in samples) == sum(m["sampled_tokens"] or 0 for m in rows)


def test_the_configured_reward_scores_the_last_turn(tmp_path: Path) -> None:
    folder = run(
        tmp_path, "run", "Silent", reward={"name": "exact"}, train__steps=2, objective={"name": "grpo"}
    )
    with Store.open(folder / "store.db", read_only=True) as store:
        for s in store.samples():
            assert s.reward == float(s.meta["last_turn"] == s.meta["answer"])


def test_the_same_run_with_episodes_has_the_same_weights(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole", "Again")
    assert weights(whole) == weights(run(tmp_path, "again", "Again"))


def test_a_broken_environment_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"environment again: RuntimeError: no more \(again.py:13\)"):
        run(tmp_path, "run", "Again", options={"fails": True}, reward__max_failed=0.1)
    folder = run(tmp_path, "free", "Again", options={"fails": True}, reward__max_failed=1.0, train__steps=2)
    with Store.open(folder / "store.db", read_only=True) as store:
        states = {("reward_error" in s.meta, s.reward is None, s.meta["turns"]) for s in store.samples()}
    assert (True, True, 2) in states
    assert all(failed == unknown for failed, unknown, _ in states)


def test_an_environment_that_is_not_there_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("agro.train.trainer.Policy.load", None)
    with pytest.raises(Refused, match="has no 'Agian'"):
        run(tmp_path, "run", "Agian")
    assert not (tmp_path / "run").exists()


def test_an_environment_that_hangs_or_dies_costs_its_episodes_alone(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(ENVIRONMENT)
    section = {"name": f"{tmp_path / 'again.py'}:Stuck", "timeout": 0.3}
    config = tiny(tmp_path, environment=section, policy__new__context=32, train__steps=1, sampler__n=3)
    folder = Trainer(config, tmp_path / "run").run()
    with Store.open(folder / "store.db", read_only=True) as store:
        failed = list(store.samples(state="failed"))
        scored = list(store.samples(scored=True))
    assert failed
    assert all(s.reward is None and s.meta["finish"] == "error" for s in failed)
    errors = {s.meta["reward_error"] for s in failed}
    assert errors <= {
        "environment again: timed out after 0.3 s",
        "environment again: its process ended with status 3",
    }
    assert len(scored) + len(failed) == 4 * 3
    assert sum(m["rewards_failed"] or 0 for m in metrics(folder)) == len(failed)
    shown = page(load_run(folder))
    assert all(error in shown for error in errors)
