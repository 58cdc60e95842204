"""Episodes in the loop: sampled, scored, trained on, measured, a broken environment, and the cross-entropy of
what an environment answered.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import logp_rounding, metrics, run_tiny, samples_of, tiny, write_prompts

from agro import config, objectives
from agro.errors import Refused
from agro.models.policy import Policy
from agro.objectives.evaluation import differentiate
from agro.pages.run.page import page
from agro.runs.rundata import load_run
from agro.store import Store
from agro.train.check import check_config
from agro.train.collate import collate
from agro.train.step import MicroBatch, Passes, backward
from agro.train.trainable import check_store
from agro.types import Batch, Sample

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
        if text.startswith("7"):
            time.sleep(60)
        if text.startswith("8"):
            os._exit(3)
        return super().step(state, text)
class Silent(Again):
    def step(self, state, text):
        state.append(text)
        return Turn(done=len(state) == 2, observation=">")
'''


def run(tmp_path: Path, name: str, environment: str, **changes) -> Path:
    (tmp_path / "again.py").write_text(ENVIRONMENT)
    section = {"name": f"{tmp_path / 'again.py'}:{environment}"}
    return run_tiny(tmp_path, name, environment=section, policy__new__context=32, **changes)


def test_episodes_are_trained_on_and_measured(tmp_path: Path) -> None:
    held = write_prompts(tmp_path / "held.jsonl", range(60, 80))
    train = {"train__groups": 8, "train__steps": 30, "train__lr": 2e-2}
    folder = run(tmp_path, "run", "Again", data__eval_prompts=held, **train)
    rows = metrics(folder)
    assert rows[-1]["eval_reward"] > rows[0]["eval_reward"] + 0.1  # at random about 2 · 3 / 12 / 6 = 0.08
    assert rows[-1]["eval_n"] == 20
    assert max(m["logp_diff_max"] for m in rows[1:]) < logp_rounding(folder)
    samples = samples_of(folder)
    assert len(samples) == 30 * 8 * 3
    assert {s.meta["turns"] for s in samples} == {1, 2}  # 1: the first turn was cut
    texts = [s.response.replace(">", "") if s.meta["turns"] == 2 else s.response for s in samples]
    assert [s.reward for s in samples] == pytest.approx([t.count("7") / 6 for t in texts])
    assert sum(int(s.action.sum()) for s in samples) == sum(m["sampled_tokens"] or 0 for m in rows)


def test_the_configured_reward_scores_the_last_turn(tmp_path: Path) -> None:
    exact = {"reward": {"name": "exact"}, "objective": {"name": "grpo"}}
    for s in samples_of(run(tmp_path, "run", "Silent", train__steps=2, **exact)):
        assert s.reward == float(s.meta["last_turn"] == s.meta["answer"])


def test_a_broken_environment_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    fails = {"environment__options": {"fails": True}, "train__steps": 2}
    with pytest.raises(Refused, match=r"environment again: RuntimeError: no more \(again.py:13\)"):
        run(tmp_path, "run", "Again", **fails, reward__max_failed=0.1)
    samples = samples_of(run(tmp_path, "free", "Again", **fails, reward__max_failed=1.0))
    states = {("reward_error" in s.meta, s.reward is None, s.meta["turns"]) for s in samples}
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
    folder = run(tmp_path, "run", "Stuck", environment__timeout=0.3, train__steps=1)
    failed = samples_of(folder, state="failed")
    assert failed
    assert all(s.reward is None and s.meta["finish"] == "error" for s in failed)
    errors = {s.meta["reward_error"] for s in failed}
    assert errors <= {
        "environment again: timed out after 0.3 s",
        "environment again: its process ended with status 3",
    }
    assert len(samples_of(folder, scored=True)) + len(failed) == 4 * 3
    assert sum(m["rewards_failed"] or 0 for m in metrics(folder)) == len(failed)
    shown = page(load_run(folder))
    assert all(error in shown for error in errors)


SHARE = 0.1
ACTIONS = ([0, 0, 1, 1, 0, 0, 1, 0], [0, 1, 0, 1, 0], [0, 0, 1, 1], [0, 1, 1, 0, 0, 0])
OBSERVED = ([0, 0, 0, 0, 1, 1, 0, 1], [0, 0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 1, 1, 1])  # 8 tokens
REWARDS, WEIGHTS = (1.0, 0.0, 2.0, 5.0), (1.0, 1.0, 3.0, 3.0)


def episodes() -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(
            "ab"[i // 2],
            "",
            reward,
            version=0,
            tokens=rng.integers(0, 6, len(action)),
            action=action,
            behavior_logp=np.where(action, -1.5, np.nan),
        )
        for i, (action, reward) in enumerate(zip(ACTIONS, REWARDS))
    ]


def batch_of_episodes() -> Batch:
    return collate(episodes(), 0, observed=True).replace(weight=torch.tensor(WEIGHTS, dtype=torch.float64))


@pytest.fixture(scope="module")
def policy() -> Policy:
    spec = config.NewModel(alphabet="abcdef", hidden=16, layers=1, heads=2, context=16)
    made = Policy.load(config.PolicyConfig(new=spec, temperature=1.3), seed=0)
    made.model.double()
    return made


def test_what_the_environment_answered_is_marked() -> None:
    """Also not the tokens between actions of which the first isn't learned from."""
    for sample, observed in zip(episodes(), OBSERVED):
        assert sample.observed.tolist() == [bool(x) for x in observed]
    assert episodes()[0].replace(learn=[0, 0, 0, 0, 0, 0, 1, 0]).observed.tolist() == [False] * 7 + [True]
    assert Sample("a", "b").observed is None
    batch = batch_of_episodes()
    assert batch.extra["observed"].sum() == 8
    assert not (batch.extra["observed"] & batch.mask).any()
    assert "observed" not in collate(episodes(), 0).extra


def gradient(policy: Policy, name: str, options: dict, size: int) -> tuple[float, torch.Tensor]:
    policy.zero_grad()
    resolved = objectives.get(name).resolve(name, options)
    step = backward(policy, batch_of_episodes(), name, resolved, Passes(MicroBatch(size)))
    return step.evaluation.loss, torch.cat([p.grad.flatten() for p in policy.model.parameters()])


@pytest.mark.parametrize(("name", "options"), [("grpo", {"ratio": "behavior"}), ("rloo", {})])
def test_it_is_the_mean_cross_entropy_of_the_observations_of_the_step(name, options, policy) -> None:
    """Written a second time with the model's logits, response by response; for every micro-batch.

    Rows of weight 1 have 5 observations, those of weight 3 have 3.
    """
    policy.zero_grad()
    batch = batch_of_episodes()
    rows = []
    total = torch.zeros((), dtype=torch.float64)
    for sample, observed, weight in zip(episodes(), OBSERVED, WEIGHTS):
        tokens = torch.tensor(sample.tokens).long()
        logp = (policy.model(input_ids=tokens[None]).logits[0] / 1.3).log_softmax(1)
        row = torch.zeros(8, dtype=torch.float64)
        row[1 : len(tokens)] = logp[torch.arange(len(tokens) - 1), tokens[1:]]
        rows.append(row)
        total = total - weight * sum(row[t] for t, is_observed in enumerate(observed) if is_observed)
    cross_entropy = total / (5 * 1 + 3 * 3)
    plain = objectives.evaluate(name, torch.stack(rows).detach(), batch, **options)
    ((plain.grad * torch.stack(rows)).sum() + SHARE * cross_entropy).backward()
    expected = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    assert plain.grad.norm() > 0.01
    for size in (1, 2, 3, 4):
        loss, found = gradient(policy, name, {**options, "observations": SHARE}, size)
        assert loss == pytest.approx(plain.loss + SHARE * cross_entropy.item(), abs=1e-9)
        assert torch.allclose(found, expected, rtol=0, atol=1e-9)


def test_each_mask_has_its_own_gradient_and_0_elsewhere() -> None:
    batch, resolved = batch_of_episodes(), objectives.get("rloo").resolve("rloo", {"observations": SHARE})
    noise = -torch.rand(2, *batch.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    streams = dict(zip(("logp", "observed_logp"), noise))
    found = differentiate("rloo", objectives.get("rloo"), streams, batch, resolved)
    without = objectives.evaluate("rloo", noise[0], batch)
    assert torch.equal(found.grads["logp"], without.grad)
    assert (found.grads["logp"] != 0).equal(batch.mask)
    assert (found.grads["observed_logp"] != 0).equal(batch.extra["observed"])
    assert float(found.grads["observed_logp"].sum()) == pytest.approx(-SHARE, abs=1e-15)


def test_a_step_without_an_answer_adds_nothing() -> None:
    batch = collate(episodes()[2:3] * 2, 0, observed=True)
    logp = -torch.ones(batch.mask.shape, dtype=torch.float64)
    out = objectives.evaluate("rloo", logp, batch, streams={"observed_logp": logp}, observations=SHARE)
    assert np.isnan(out.metrics["observation_loss"])
    assert (out.grads["observed_logp"] == 0).all()


def test_what_has_no_observations_is_refused_before_a_run(tmp_path: Path) -> None:
    plain = collate(episodes(), 0)
    logp = torch.zeros(plain.mask.shape)
    with pytest.raises(Refused, match=r"objective rloo needs the tokens that an environment answered"):
        objectives.evaluate("rloo", logp, plain, streams={"observed_logp": logp}, observations=SHARE)
    with pytest.raises(Refused, match=r"answered .*there is neither \[environment\] nor data\.store"):
        run_tiny(tmp_path, objective__observations=SHARE)
    for name, texts, refusal in (
        ("log.db", ("7", "8"), pytest.raises(Refused, match=r"0 of 2 samples in .*log\.db")),
        ("episodes.db", ("7>7", "8>8"), nullcontext()),
    ):
        log = {"data": {"store": str(tmp_path / name), "replay": 1.0}, "train__groups": 1}
        [phase] = check_config(tiny(tmp_path, **log, objective__observations=SHARE))
        with Store.open(tmp_path / name) as store:
            for text in texts:
                tokens = [1, *(int(c) if c.isdigit() else 10 for c in text)]
                action = [0, *(c.isdigit() for c in text)]
                store.append([Sample("001>", text, float(text[0] == "7"), tokens=tokens, action=action)])
            with refusal:
                check_store(phase, store)


def test_a_run_learns_what_its_environment_answers(tmp_path: Path) -> None:
    """It always answers >, one of 11 tokens: log 11 = 2.4 nats at first."""
    rows = metrics(run(tmp_path, "run", "Again", train__lr=3e-2, objective__observations=SHARE))
    found = [row["objective"]["observation_loss"] for row in rows if row["step"]]
    assert found[0] == pytest.approx(np.log(11), abs=0.5)
    assert found[-1] < 0.8 * found[0]
