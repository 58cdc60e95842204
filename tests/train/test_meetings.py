"""Where parts of a run meet: phases, early ends, resuming, guards, references, episodes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import (
    StopAfter,
    done,
    fill_store,
    metrics,
    run_tiny,
    tiny,
    weights,
    write_prompts,
)

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Interrupted, Refused
from agro.models.policy import Policy
from agro.train import learner
from agro.train.learner import Local
from agro.train.monitors.heldout import HeldOutPrompts
from agro.train.source import InlineSource


def held(folder: Path) -> str:
    return write_prompts(folder / "held.jsonl", range(60, 66))


def test_a_run_that_ended_early_in_a_middle_phase_keeps_the_reference_of_that_phase(tmp_path: Path) -> None:
    """It stays ended where nothing that ends it changes, though what is shown does."""

    def run(last: int, name: str = "run", *monitors: StopAfter, **changes) -> Path:
        steps = {"a": 2, "b": 5, "c": last}
        phases = [{"name": phase, "train": {"steps": n}} for phase, n in steps.items()]
        few = {"train__checkpoint_every": 1, "train__keep": 1}
        return run_tiny(tmp_path, name, *monitors, phases=phases, policy__reference="phase", **few, **changes)

    out = run(2, "run", StopAfter(5))
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000002", "step-00000005"]
    assert done(run(2, resume=True, train__show_every=1)) == 5
    assert weights(run(3, resume=True)) == weights(run(3, "whole"))


def test_a_phase_has_its_own_limits_of_a_forward_pass(tmp_path: Path) -> None:
    phases = [{"name": "a", "train": {"micro_batch": 8}}, {"name": "b", "train": {"micro_batch": 2}}]
    out = run_tiny(tmp_path, phases=phases, train__steps=2)
    read = {s: json.loads((out / f"checkpoints/step-0000000{s}/learner.json").read_text()) for s in (2, 4)}
    assert read == {2: {"sequences": 8, "tokens": None}, 4: {"sequences": 2, "tokens": None}}


def test_a_checkpoint_of_other_weights_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    local = Local(Policy.load(tiny(tmp_path).policy), None, print)
    with pytest.raises(Refused, match=r": model: .*\ba, "):
        local.load(tmp_path, 0)


def measured(folder: Path, rewards: Iterable[float], monkeypatch, **evaluate) -> RunConfig:
    """A run that measures at each step, and finds these rewards."""
    given, real = iter(rewards), HeldOutPrompts._describe
    unknown = {"eval_reward_se": float("nan")}
    monkeypatch.setattr(
        HeldOutPrompts, "_describe", lambda *a: real(*a) | unknown | {"eval_reward": next(given)}
    )
    return tiny(folder, data__eval_prompts=held(folder), evaluate={"every": 1, **evaluate}, train__steps=3)


def test_rewards_that_could_not_be_measured_are_no_best(tmp_path: Path, monkeypatch) -> None:
    config = measured(tmp_path, [float("nan"), 0.2, 0.1, 0.1], monkeypatch, keep_best=True)
    out = Trainer(config, tmp_path / "run").run()
    best = json.loads((out / "best/best.json").read_text(), parse_constant=pytest.fail)  # NaN isn't JSON
    assert (best["step"], best["eval_reward"], best["eval_reward_se"]) == (1, 0.2, None)


def test_the_measurement_of_step_0_made_again_is_not_one_without_progress(
    tmp_path: Path, monkeypatch
) -> None:
    rewards = [0.5, 0.5, 0.4, 0.3, 0.2]  # of step 0, step 0 again, steps 1 to 3
    config = measured(tmp_path, rewards, monkeypatch, patience=2)
    plain = InlineSource.fill

    def interrupted(self, wanted):
        """Ctrl-C while the samples of step 1 are made."""
        if done(tmp_path / "run") == 0:
            signal.raise_signal(signal.SIGINT)
        return plain(self, wanted)

    monkeypatch.setattr(InlineSource, "fill", interrupted)
    with pytest.raises(Interrupted):
        Trainer(config, tmp_path / "run").run()
    monkeypatch.setattr(InlineSource, "fill", plain)
    assert done(Trainer(config, tmp_path / "run", resume=True).run()) == 2


def test_patience_of_all_phases_and_evaluations_of_one(tmp_path: Path) -> None:
    phases = [{"name": "a"}, {"name": "b", "evaluate": {"every": 2}}]
    config = tiny(tmp_path, phases=phases, evaluate__patience=2, data__eval_prompts=held(tmp_path))
    Trainer(config, tmp_path / "run")


def test_the_kl_of_an_evaluation_can_be_left_out(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, data__eval_prompts=held(tmp_path), evaluate__kl=False, train__steps=1)
    assert [m["eval_kl_ref"] for m in metrics(run)] == [None, None]


def test_stored_samples_that_are_never_drawn_may_be_of_held_out_prompts(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db")  # of "100>" and so on, by "someone"
    prompts = tmp_path / "held.jsonl"
    prompts.write_text('{"prompt": "100>", "answer": "0"}\n')
    data = {"data__store": str(tmp_path / "log.db"), "data__replay": 0.5, "data__eval_prompts": str(prompts)}
    run_tiny(tmp_path, data__sources=["policy"], train__steps=2, **data)
    with pytest.raises(Refused, match="1 of 1 held-out prompts are in the training data"):
        run_tiny(tmp_path, "other", data__sources=["policy", "someone"], **data)


def test_no_checkpoint_is_written_between_the_updates_of_a_step(tmp_path: Path, monkeypatch) -> None:
    """The second update of step 2 doesn't fit into memory, for the optimizer has its state by then."""
    config = tiny(tmp_path, train__updates=2, train__checkpoint_every=3, train__steps=4)
    plain = Trainer(config, tmp_path / "plain").run()
    calls: list[int] = []
    real = learner.backward

    def backward(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise Refused("out of memory on a single sequence")
        return real(*args, **kwargs)

    monkeypatch.setattr(learner, "backward", backward)
    with pytest.raises(Refused, match="out of memory"):
        Trainer(config, tmp_path / "run").run()
    assert weights(Trainer(config, tmp_path / "run", resume=True).run()) == weights(plain)
