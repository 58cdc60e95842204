"""Monitors by themselves and in runs: what happens to a step that explodes or whose sampler has other
log-probs, where a run ends early, and what monitors may do."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    RESPONSE_ROUNDING,
    StopAfter,
    before_step,
    done,
    logp_rounding,
    metrics,
    run_tiny,
    tiny,
    weights,
    write_prompts,
)

from agro.config import GuardConfig
from agro.errors import Interrupted, Refused
from agro.objectives import Evaluation
from agro.rollout.engines import Continuation
from agro.rollout.engines.hf import HF
from agro.runs.rundata import empty_metrics
from agro.train.feed import Feed, Valid, draws_from
from agro.train.learner import Local
from agro.train.measure import logp_differences
from agro.train.monitors import GO, Action, Monitor, View
from agro.train.monitors.guard import Best, Guard, Warnings
from agro.train.monitors.heldout import HeldOutPrompts
from agro.train.phases import Phase
from agro.train.source import InlineSource
from agro.train.step import Step
from agro.types import Batch, Sample


def view(folder: Path, step: int, known: dict[str, Any] | None = None, **changes: Any) -> View:
    [phase] = Phase.all(tiny(folder, **changes))
    return View(phase, step, {"beta": 0.1}, empty_metrics() | (known or {}))


def kinds(guard: Guard, folder: Path, *losses: float, kl: float | None = None) -> list[str]:
    return [guard.judge(view(folder, 1, {"loss": x, "kl_ref": kl})).kind for x in losses]


@pytest.mark.parametrize(("action", "kind"), [("skip", "skip"), ("stop", "stop"), ("rollback", "roll back")])
def test_a_guard_judges_as_its_rule_says(tmp_path: Path, action: str, kind: str) -> None:
    guard = Guard(GuardConfig(loss=3.0, action=action), "a")
    assert kinds(guard, tmp_path, 1, 1, 1, 1, 1, 4) == [*["go"] * 5, kind]


def test_rollbacks_end_and_are_counted_over_phases(tmp_path: Path) -> None:
    rule = GuardConfig(kl=1.0, action="rollback", rollbacks=2)
    guard = Guard(rule, "a")
    assert kinds(guard, tmp_path, 0.0, 0.0, kl=2.0) == ["roll back"] * 2
    later = Guard(rule, "b")
    later.restore(json.loads(json.dumps(guard.state())))
    assert kinds(later, tmp_path, 0.0, kl=2.0) == ["stop"]


def test_a_guard_remembers_the_losses_of_its_own_phase(tmp_path: Path) -> None:
    rule = GuardConfig(loss=3.0, window=5)
    guard = Guard(rule, "a")
    kinds(guard, tmp_path, *range(1, 8))
    state = json.loads(json.dumps(guard.state()))
    same, other = Guard(rule, "a"), Guard(rule, "b")
    same.restore(state)
    other.restore(state)
    assert (same.losses, other.losses) == ((3, 4, 5, 6, 7), ())


def ignore(metric: str, measured: Mapping[str, Any]) -> None:
    pass


PROMPTS = {"data__eval_prompts": "none.jsonl"}
STORED = {"data__store": "log.db", "data__hold_out": 0.2}  # without prompts to evaluate


@pytest.mark.parametrize(
    ("rules", "metric", "values", "kept", "stops", "said"),
    [
        (PROMPTS | {"patience": 2}, "eval_reward", [0.5, 0.5, None, math.nan, 0.7, 0.6, 0.7], [0, 4], 6, ""),
        (STORED | {"patience": 2}, "eval_auc", [0.5, 0.7, 0.6, 0.65], [0, 1], 3, "0.7000 of step 1"),
        ({"target_kl": 2.0}, "eval_kl_ref", [None, math.nan, 1.99, 2.0], [], 3, "evaluate.target_kl 2"),
    ],
)
def test_a_metric_decides_what_is_kept_and_when_a_run_ends(
    tmp_path, rules, metric, values, kept, stops, said
) -> None:
    """It stops at step `stops`, and `said` is why. Rewards of prompts decide where there are some."""
    best: list[tuple[str, int]] = []
    monitor = Best(keep=lambda name, measured: best.append((name, measured["step"])))
    data = {key: value for key, value in rules.items() if "__" in key}
    evaluate = {"every": 1} | {key: value for key, value in rules.items() if "__" not in key}
    if data:
        evaluate["keep_best"] = True
    ended = []
    for step, value in enumerate(values):
        seen = view(tmp_path, step, {metric: value}, evaluate=evaluate, **data)
        monitor.after(seen)
        ended.append(seen.stop)
    assert best == [(metric, step) for step in kept]
    assert [bool(stop) for stop in ended] == [step == stops for step in range(len(values))]
    assert said in ended[-1]


def test_a_stop_that_another_monitor_asked_for_stays(tmp_path: Path) -> None:
    seen = view(tmp_path, 1)
    seen.stop = "seen enough"
    Best(keep=ignore).after(seen)
    assert seen.stop == "seen enough"


def test_held_out_groups_without_the_metric_are_refused_at_the_start(tmp_path: Path) -> None:
    for rule in ({"patience": 2}, {"keep_best": True}):
        with pytest.raises(Refused, match="eval_auc, which can't be measured on these held-out groups"):
            Best(keep=ignore).after(view(tmp_path, 0, evaluate={"every": 1, **rule}, **STORED))
    Best(keep=ignore).after(view(tmp_path, 0, evaluate={"every": 1}, **STORED))  # nothing waits for it
    Best(keep=ignore).after(view(tmp_path, 1, evaluate={"every": 1, "patience": 2}, **STORED))


def test_held_out_data_are_measured_at_both_ends_and_every_so_often(tmp_path: Path) -> None:
    assert [s for s in range(7) if view(tmp_path, s, evaluate={"every": 4}).is_due] == [0, 4, 6]
    assert [s for s in range(7) if view(tmp_path, s).is_due] == [0, 6]
    stopped = view(tmp_path, 3)
    stopped.stop = "seen enough"
    assert stopped.is_due


def test_a_warning_is_given_once(tmp_path: Path) -> None:
    said: list[str] = []
    warnings = Warnings(said.append)
    for step, ratio in ((1, None), (2, 9.0), (3, 11.0), (4, 12.0)):
        warnings.after(view(tmp_path, step, {"kl_to_reward_spread": ratio, "length_mean": 3.0}))
    assert [line.split(":")[0] for line in said] == ["step 3"]


def test_a_measurement_of_nothing_is_not_shown(tmp_path: Path) -> None:
    assert view(tmp_path, 0).is_empty
    assert not view(tmp_path, 0, {"eval_reward": 0.5}).is_empty
    assert not view(tmp_path, 1).is_empty


def test_a_monitor_does_nothing_unless_it_says_so(tmp_path: Path) -> None:
    plain = Monitor()
    seen = view(tmp_path, 1)
    before = dict(seen.metrics)
    assert plain.judge(seen) is GO
    plain.after(seen)
    assert (seen.metrics, seen.stop, plain.state()) == (before, "", None)


class Closed(Monitor):
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.closed = fails, 0

    def after(self, view: View) -> None:
        if self.fails and view.step == 2:
            raise RuntimeError("broken")

    def close(self) -> None:
        self.closed += 1


def test_monitors_are_closed_once_however_a_run_ends(tmp_path: Path) -> None:
    good, bad = Closed(), Closed(fails=True)
    run_tiny(tmp_path, "good", good)
    with pytest.raises(RuntimeError, match="broken"):
        run_tiny(tmp_path, "bad", bad)
    assert (good.closed, bad.closed) == (1, 1)
    assert [m["step"] for m in metrics(tmp_path / "bad")] == [1]


USUAL = (1.0, 1.0, 2.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("limits", "loss", "kl", "before", "said"),
    [
        ({}, -3.0, None, USUAL, ""),
        ({}, -3.1, None, USUAL, "|loss| is 3.1, above guard.loss = 3 times its median of 1"),
        ({}, 100.0, None, USUAL[:4], ""),  # too few to compare with
        ({}, 1.0, None, (0.0, 0.0, 0.0, 0.0, 2.0), ""),  # nothing to learn from, until now
        ({}, 1.0, 10.1, USUAL, "10.1 nats per response, above guard.kl"),
        ({"loss": None, "kl": None}, 1e9, 1e9, USUAL, ""),
    ],
)
def test_the_rule(tmp_path, limits, loss, kl, before, said) -> None:
    guard = Guard(GuardConfig(**{"loss": 3.0, "kl": 10.0, **limits}), "a")
    guard.losses = before
    action = guard.judge(view(tmp_path, 1, {"loss": loss, "kl_ref": kl}))
    assert (said in action.why, action.kind) == (True, "stop" if said else "go")


def held(folder: Path) -> str:
    return write_prompts(folder / "held.jsonl", range(60, 66))


run = partial(run_tiny, train__steps=10, train__lr=1e-4)


def run_spoiled(folder: Path, at: int, name: str = "run", **changes) -> Path:
    """With weights far off before the gradient of step `at`, as after a bad update."""

    def spoil(feed: Feed, valid: Valid) -> None:
        if done(folder / name) + 1 == at:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in feed.learner.policy.weights().values():
                    p.add_(3 * torch.randn(p.shape, generator=generator))

    changes["guard"] = {"logp_diff": 0, **changes["guard"]}  # the sampler had other weights
    with before_step(spoil):
        return run(folder, name, **changes)


@pytest.mark.parametrize("reference", [{}, {"policy__reference": "ema", "policy__reference_decay": 0.9}])
def test_rollback_takes_the_last_checkpoint_s_weights_at_half_the_rate(tmp_path: Path, reference) -> None:
    changes = {"guard": {"loss": 100.0, "action": "rollback"}, **reference}
    out = run_spoiled(tmp_path, 8, **changes)
    rows = metrics(out)
    assert [m["rolled_back"] for m in rows] == [0] * 7 + [1, 0, 0]
    assert rows[8]["lr"] == rows[6]["lr"] / 2
    assert [m["version"] for m in rows] == list(range(1, 11))  # other weights, another version
    assert abs(rows[8]["loss"]) < abs(rows[7]["loss"]) / 100
    assert weights(run_spoiled(tmp_path, 8, name="other", **changes)) == weights(out)


def test_rollback_of_the_first_steps_goes_to_the_start(tmp_path: Path) -> None:
    out = run_spoiled(tmp_path, 3, guard={"kl": 0.5, "action": "rollback"}, train__checkpoint_every=100)
    assert [m["rolled_back"] for m in metrics(out)][:5] == [0, 0, 0, 1, 0]  # step 4's samples show it
    assert metrics(out)[4]["kl_ref"] == pytest.approx(0.0, abs=RESPONSE_ROUNDING)


class Note(Monitor):
    """What a monitor is shown, in order."""

    name = "note"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.restored: list[str] = []

    def receive(self, samples: Sequence[Sample]) -> None:
        assert all(s.reward is not None and s.id is not None for s in samples)
        self.events.append(f"train on {len(samples)}")

    def judge(self, view: View) -> Action:
        assert view.metrics["loss"] is not None
        return Action()

    def after(self, view: View) -> None:
        if view.metrics["eval_n"] is not None:
            self.events.append(f"evaluated {view.metrics['eval_n']}")
        self.events.append(f"step {view.step}")
        view.metrics["seen"] = len(self.events)

    def state(self) -> list[str]:
        return self.events

    def restore(self, state: list[str]) -> None:
        self.restored = state


def test_a_monitor_sees_each_step_adds_to_it_and_may_end_the_run(tmp_path: Path) -> None:
    note = Note()
    changes = {"data__eval_prompts": held(tmp_path), "evaluate__every": 2, "train__steps": 4}
    out = run(tmp_path, "run", note, StopAfter(2), **changes)
    events = ["evaluated 6", "step 0", "train on 12", "step 1", "train on 12", "evaluated 6", "step 2"]
    assert note.events == events
    assert [m["seen"] for m in metrics(out)] == [2, 4, 7]  # what it added is logged
    assert (out / "model").is_dir()
    again = Note()
    assert done(run(tmp_path, "run", again, resume=True, **changes)) == 2
    assert again.events == []
    run(tmp_path, "run", again, resume=True, **changes | {"train__steps": 5})  # other steps: it may go on
    assert again.restored == events
    assert again.events[0] == "train on 12"
    assert done(out) == 5


class Veto(Monitor):
    """Asks for `action` at step 3."""

    def __init__(self, action: Action) -> None:
        self.action = action

    def judge(self, view: View) -> Action:
        return self.action if view.step == 3 else Action()


def test_a_monitor_may_skip_an_update_or_stop_before_the_weights_move(tmp_path: Path, capsys) -> None:
    rows = metrics(run(tmp_path, "skipped", Veto(Action("skip", "a whim")), train__steps=5))
    assert [m["skipped"] for m in rows] == [0, 0, 1, 0, 0]
    assert [m["version"] for m in rows] == [1, 2, 2, 3, 4]
    assert rows[2]["lr"] is None
    assert "update skipped: a whim" in capsys.readouterr().err
    with pytest.raises(Refused, match="step 3: a whim"):
        run(tmp_path, "stopped", Veto(Action("stop", "a whim")))
    assert done(tmp_path / "stopped") == 2
    assert (tmp_path / "stopped/checkpoints/step-00000002").is_dir()


def test_a_monitor_may_roll_back_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    back = Veto(Action("roll back", "a whim"))
    rows = metrics(run(tmp_path, "back", back, train__steps=5))
    assert [m["rolled_back"] for m in rows] == [0, 0, 1, 0, 0]
    assert [m["version"] for m in rows] == [1, 2, 3, 4, 5]
    assert rows[3]["lr"] == rows[1]["lr"] / 2
    with pytest.raises(Refused, match=r"step 3: a whim, .*guard\.action"):
        run(tmp_path, "none", back, train__checkpoint_every=100)


def test_log_probs_of_the_reference_belong_to_the_update(tmp_path: Path, monkeypatch, capsys) -> None:
    plain = Local.logp

    def slow(self, batch, of="policy"):
        time.sleep(0.5)
        return plain(self, batch, of)

    monkeypatch.setattr(Local, "logp", slow)
    run_tiny(tmp_path, train__steps=1, guard={"stage_seconds": 0.1})
    assert re.search("updating .*no progress", capsys.readouterr().err)


SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3}


@pytest.fixture
def off(monkeypatch) -> list[float]:
    """What an engine's log-probs are too low by, nats a token; after the first token, which is unknown."""
    shift = [0.0]
    plain = HF.decode

    def decode(engine: HF, *request) -> Iterator[Continuation]:
        for decoded in plain(engine, *request):
            logp = decoded.logp - shift[0]
            logp[0] = np.nan if len(logp) > 1 else logp[0]
            yield replace(decoded, logp=logp)

    monkeypatch.setattr(HF, "_gap", lambda *_: (0.0, 1.0))  # the engine's own probe
    monkeypatch.setattr(HF, "decode", decode)
    return shift


def test_the_run_stops_before_the_weights_move(tmp_path: Path, off: list[float]) -> None:
    off[0] = 0.2
    words = (
        r"step 1: .*logp_diff_fresh = 0\.2 nats per token, above guard\.logp_diff = 0\.1.*processed_logprobs"
    )
    with pytest.raises(Refused, match=words):
        run_tiny(tmp_path)
    assert done(tmp_path / "run") == 0
    assert not list((tmp_path / "run/checkpoints").glob("step-*[1-9]"))
    off[0] = 0.0
    assert done(run_tiny(tmp_path, resume=True)) == 6


@pytest.mark.parametrize(
    ("nats", "changes", "measured"),
    [
        (0.05, {}, 0.05),
        (0.2, {"guard__logp_diff": 0.3}, 0.2),
        (0.2, {"guard__logp_diff": 0}, 0.2),
        (0.2, {"sampler__temperature": 0.5}, None),
        (0.2, {"sampler__temperature": 0.0}, None),
        (0.2, {"sampler__top_p": 0.8}, None),
    ],
)
def test_the_limit_is_a_setting_and_another_distribution_is_not_compared(
    tmp_path, off, nats, changes, measured
) -> None:
    off[0] = nats
    run = run_tiny(tmp_path, train__steps=2, **changes)
    found = [m[name] for m in metrics(run) for name in ("logp_diff_fresh", "logp_diff_mean")]
    assert found == pytest.approx([measured] * 4, abs=logp_rounding(run))


def fresh(**changes) -> Sample:
    known = {"tokens": [4, 5], "action": [False, True], "sampling": SAMPLING, "version": 0, "role": "policy"}
    return Sample("a", "b", **known | changes)


@pytest.mark.parametrize(
    ("sample", "over_kept", "same"),
    [
        (fresh(), False, True),
        (fresh(sampling=None), False, False),  # unknown
        (fresh(sampling={"seed": 3}), False, False),
        (fresh(sampling=SAMPLING | {"temperature": 0.5}), False, False),
        (fresh(sampling=SAMPLING | {"top_k": 5}), True, False),
        (fresh(sampling=SAMPLING | {"min_p": 0.1}), False, False),
        (fresh(sampling=SAMPLING | {"top_p": 0.9}, kept=[5, 6], kept_count=[0, 2]), False, False),
        (fresh(sampling=SAMPLING | {"top_p": 0.9}, kept=[5, 6], kept_count=[0, 2]), True, True),
        (fresh(sampling=SAMPLING | {"skipped_layers": [2]}), False, False),
        (fresh(context_tokens=[4]), False, True),
        (fresh(context_tokens=[7, 4]), False, False),
        (fresh(meta={"hint": "h"}), False, False),
    ],
)
def test_which_samples_have_the_log_probs_of_the_policy(sample: Sample, over_kept: bool, same: bool) -> None:
    assert draws_from(sample, 1.0, over_kept=over_kept) == same


def test_only_known_log_probs_of_comparable_rows_count() -> None:
    """Differences: .1 and unknown at staleness 0, .4 at staleness 2, and 9 of another distribution."""
    behavior = [[math.nan, -1.1, math.nan], [math.nan, -1.4, -1.4], [math.nan, -10.0, -10.0]]
    recorded = {"behavior_logp": behavior, "staleness": [0, 2, 0]}
    batch = Batch.of(mask=[[False, True, True]] * 3, reward=[0.0] * 3, group=["a"] * 3, **recorded)
    logp = torch.tensor([[0.0, -1.0, -1.0]] * 3, dtype=torch.float64)
    step = Step(Evaluation(0.0, {}, {}), {"logp": logp}, batch)
    found = logp_differences(step, [True, True, False])
    assert found == pytest.approx({"logp_diff_mean": 0.3, "logp_diff_max": 0.4, "logp_diff_fresh": 0.1})
    stale = logp_differences(step, [False, True, False])
    assert stale == pytest.approx({"logp_diff_mean": 0.4, "logp_diff_max": 0.4})
    assert logp_differences(step, [False, False, False]) == {}
    logp[0, 1] = -math.inf  # a token that the trainer's policy never draws
    assert logp_differences(step, [True, True, False])["logp_diff_fresh"] == math.inf


def measured(folder: Path, rewards: Iterable[float], monkeypatch, **evaluate) -> dict[str, Any]:
    """Settings of a run that measures at each step, and finds these rewards."""
    given, real = iter(rewards), HeldOutPrompts._describe

    def describe(*args):
        return real(*args) | {"eval_reward": next(given), "eval_reward_se": math.nan}

    monkeypatch.setattr(HeldOutPrompts, "_describe", describe)
    rule = {"every": 1, **evaluate}
    return {"data__eval_prompts": held(folder), "evaluate": rule, "train__steps": 3}


def test_rewards_that_could_not_be_measured_are_no_best(tmp_path: Path, monkeypatch) -> None:
    out = run_tiny(tmp_path, **measured(tmp_path, [math.nan, 0.2, 0.1, 0.1], monkeypatch, keep_best=True))
    best = json.loads((out / "best/best.json").read_text(), parse_constant=pytest.fail)  # NaN isn't JSON
    assert (best["step"], best["eval_reward"], best["eval_reward_se"]) == (1, 0.2, None)


def test_the_measurement_of_step_0_made_again_is_no_lack_of_progress(tmp_path: Path, monkeypatch) -> None:
    rewards = [0.5, 0.5, 0.4, 0.3, 0.2]  # of step 0, step 0 again, steps 1 to 3
    changes = measured(tmp_path, rewards, monkeypatch, patience=2)
    plain = InlineSource.fill

    def interrupted(self, wanted):
        """Ctrl-C while the samples of step 1 are made."""
        if done(tmp_path / "run") == 0:
            signal.raise_signal(signal.SIGINT)
        return plain(self, wanted)

    monkeypatch.setattr(InlineSource, "fill", interrupted)
    with pytest.raises(Interrupted):
        run_tiny(tmp_path, **changes)
    monkeypatch.setattr(InlineSource, "fill", plain)
    assert done(run_tiny(tmp_path, resume=True, **changes)) == 2


def test_the_kl_of_an_evaluation_can_be_left_out(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, data__eval_prompts=held(tmp_path), evaluate__kl=False, train__steps=1)
    assert [m["eval_kl_ref"] for m in metrics(run)] == [None, None]
