"""The moving average of the weights: its numbers, what it is used for, and what a resumed run has of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import rounding
from safetensors.torch import load_file
from test_references import of_model
from tiny_runs import before_step, fill_store, metrics, tiny, weights, write_prompts

from agro.api.reporting_trainer import Trainer
from agro.config import PolicyConfig, RunConfig
from agro.models.policy import Policy
from agro.rollout import Activity
from agro.train.learner import Average, Local
from agro.train.monitors import Action, Monitor, View
from agro.train.monitors.heldout import HeldOutLog
from agro.train.phases import Phase


def averaged(folder: Path, **changes: Any) -> RunConfig:
    held = write_prompts(folder / "held.jsonl", range(60, 80))
    values = {"data__eval_prompts": held, "evaluate__every": 2, "train__weights_average": 0.5, **changes}
    return tiny(folder, **values)


def test_the_average_warms_up_to_its_decay() -> None:
    """By hand: shares of the old average are 1/10, 2/11, 3/12, then .3 instead of 4/13 = .308."""
    weight = torch.nn.Parameter(torch.tensor([0.0]))
    average = Average({"w": weight}, {"w": weight})
    expected = 0.0
    for value, kept in ((1.0, 1 / 10), (2.0, 2 / 11), (4.0, 3 / 12), (-1.0, 0.3)):
        weight.data.fill_(value)
        average.update(0.3)
        expected = kept * expected + (1 - kept) * value
        assert average.weights["w"].item() == pytest.approx(expected, abs=rounding(4.0)["atol"])
    with average.in_place():
        assert weight.item() == average.weights["w"].item()
    assert weight.item() == -1.0


def test_the_average_of_bfloat16_is_float32() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    average = Average({"w": weight}, {"w": weight})
    average.updates = 10**6
    average.update(0.999)
    weight.data.fill_(1.0078125)  # the next bfloat16
    average.update(0.999)
    last_place = torch.finfo(torch.float32).eps  # of numbers near 1; the average moves by 65 of them
    assert average.weights["w"].item() == pytest.approx(1 + 0.001 * 0.0078125, abs=2 * last_place)
    with average.in_place():
        assert weight.dtype == torch.bfloat16


def test_averages_are_measured_and_saved_and_change_no_training(tmp_path: Path) -> None:
    """What a step samples, draws and trains on is that of a run without an average; the model isn't."""
    learners: list[Local] = []
    shown: list[bool] = []

    class Look(Monitor):
        """Whether monitors see the averages."""

        def after(self, view: View) -> None:
            if view.step:
                weights, average = learners[-1].policy.weights(), learners[-1].average.weights
                pairs = zip(weights.values(), average.values(), strict=True)
                shown.append(all(torch.equal(w, own) for w, own in pairs))

    with before_step(lambda feed, valid: learners.append(feed.learner)):
        with_average = Trainer(averaged(tmp_path), tmp_path / "with", monitors=[Look()]).run()
    assert shown == [True] * 6
    without = Trainer(averaged(tmp_path, train__weights_average=None), tmp_path / "without").run()
    trained = ("reward_mean", "loss", "grad_norm", "sampled_tokens", "kl_ref")
    rows = [[[m[k] for k in trained] for m in metrics(run)[1:]] for run in (with_average, without)]
    assert rows[0] == rows[1]
    checkpoints = [run / "checkpoints" / "step-00000006" for run in (with_average, without)]
    raw, plain = (load_file(folder / "model.safetensors") for folder in checkpoints)
    assert all(torch.equal(raw[name], plain[name]) for name in raw)
    saved = Policy.load(PolicyConfig(model=str(with_average / "model"))).weights()
    own = load_file(checkpoints[0] / "average.safetensors")
    assert all(torch.equal(saved[name], own[name]) for name in own)
    assert not (checkpoints[1] / "average.safetensors").exists()
    assert weights(with_average) != weights(without)


def test_held_out_numbers_are_those_of_the_saved_average(tmp_path: Path) -> None:
    """AUC and ½ Var(R) of held-out groups, computed anew with RUN/model: float32 rounding apart."""
    log = fill_store(tmp_path / "log.db", groups=12) | {"data__hold_out": 0.3}
    config = tiny(tmp_path, **log, train__weights_average=0.8, train__updates=2)
    out = Trainer(config, tmp_path / "run").run()
    start = Trainer(config, tmp_path / "other")._load_policy()
    learner = Local(Policy.load(PolicyConfig(model=str(out / "model"))), start, print)
    learner.enter(config, began=None, resumed=None)
    found = HeldOutLog.load(Phase.all(config)[0], learner, Activity()).measure(0.1)
    for name in ("eval_auc", "eval_consistency"):
        assert metrics(out)[-1][name] == pytest.approx(found[name], abs=rounding(found[name])["atol"])


def test_a_rollback_takes_the_average_of_the_checkpoint(tmp_path: Path) -> None:
    class Back(Monitor):
        def judge(self, view: View) -> Action:
            first = view.step == 3 and not self.done
            self.done = self.done or first
            return Action("roll back", "a whim") if first else Action()

        done = False

    config = averaged(tmp_path, train__steps=3)
    folder = Trainer(config, tmp_path / "run", monitors=[Back()]).run() / "checkpoints"
    two, three = (load_file(folder / f"step-0000000{i}" / "average.safetensors") for i in (2, 3))
    assert all(torch.equal(two[name], three[name]) for name in two)


def test_an_adapter_is_averaged_and_merged(tmp_path: Path) -> None:
    values = of_model(tmp_path, lora={"rank": 2}).model_dump()
    values["train"]["weights_average"] = 0.9
    out = Trainer(RunConfig.of(values), tmp_path / "averaged").run()
    last = out / "checkpoints" / "step-00000006"
    own, raw = load_file(last / "average.safetensors"), load_file(last / "model.safetensors")
    found = {
        name.replace("base_model.model.", ""): weight
        for name, weight in load_file(out / "adapter" / "adapter_model.safetensors").items()
    }
    saved = {name.replace(".default", "").replace("base_model.model.", ""): t for name, t in own.items()}
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert not all(torch.equal(own[name], raw[name]) for name in raw)
