"""Monitors by themselves: what each of them makes of a step's metrics, and what it keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import metrics, tiny

from agro import config
from agro.metrics import empty_metrics
from agro.train.monitors import GO, Monitor, View
from agro.train.monitors.guard import Guard
from agro.train.monitors.heldout import is_due
from agro.train.monitors.stopping import Best
from agro.train.monitors.warnings import Warnings
from agro.train.phases import Phase
from agro.train.trainer import Trainer


def view(folder: Path, step: int, known: dict[str, Any] | None = None, **changes: Any) -> View:
    [phase] = Phase.all(tiny(folder, **changes))
    return View(phase, step, {"beta": 0.1}, empty_metrics() | (known or {}))


def kinds(guard: Guard, folder: Path, *losses: float, kl: float | None = None) -> list[str]:
    return [guard.judge(view(folder, 1, {"loss": x, "kl_ref": kl})).kind for x in losses]


def test_a_guard_judges_as_its_rule_says(tmp_path: Path) -> None:
    for action, expected in (("skip", "skip"), ("stop", "stop"), ("rollback", "roll back")):
        guard = Guard(config.Guard(loss=3.0, action=action), "a")
        assert kinds(guard, tmp_path, 1, 1, 1, 1, 1) == ["go"] * 5
        assert kinds(guard, tmp_path, 4) == [expected]
    assert (
        "guard.kl"
        in Guard(config.Guard(kl=1.0), "a").judge(view(tmp_path, 1, {"loss": 0.0, "kl_ref": 2.0})).why
    )


def test_rollbacks_end_and_are_counted_over_phases(tmp_path: Path) -> None:
    rule = config.Guard(kl=1.0, action="rollback", rollbacks=2)
    guard = Guard(rule, "a")
    assert kinds(guard, tmp_path, 0.0, 0.0, kl=2.0) == ["roll back"] * 2
    later = Guard(rule, "b")
    later.restore(json.loads(json.dumps(guard.state())))
    assert kinds(later, tmp_path, 0.0, kl=2.0) == ["stop"]


def test_a_guard_remembers_the_losses_of_its_own_phase(tmp_path: Path) -> None:
    rule = config.Guard(loss=3.0, window=5)
    guard = Guard(rule, "a")
    kinds(guard, tmp_path, *range(1, 8))
    state = json.loads(json.dumps(guard.state()))
    same, other = Guard(rule, "a"), Guard(rule, "b")
    same.restore(state)
    other.restore(state)
    assert (same.losses, other.losses) == ((3, 4, 5, 6, 7), ())


def test_the_best_is_kept_and_patience_counts(tmp_path: Path) -> None:
    kept: list[int] = []
    best = Best(keep=lambda measured: kept.append(measured["step"]))
    rewards = [0.5, 0.5, None, math.nan, 0.7, 0.6, 0.7]
    rule = {"evaluate": {"keep_best": True, "patience": 2, "every": 1}}
    rule["data__eval_prompts"] = str(tmp_path / "none.jsonl")
    stops = []
    for step, reward in enumerate(rewards):
        seen = view(tmp_path, step, {"eval_reward": reward}, **rule)
        best.after(seen)
        stops.append(bool(seen.stop))
    assert kept == [0, 4]
    assert stops == [False] * 6 + [True]
    again = Best(keep=lambda measured: None)
    again.restore(json.loads(json.dumps(best.state())))
    assert (again.reward, again.step, again.waited) == (0.7, 4, 2)
    assert Best(keep=lambda measured: None).state() is None


def test_a_target_ends_a_run(tmp_path: Path) -> None:
    seen = view(tmp_path, 3, {"eval_reward": 0.9}, evaluate={"target": 0.9})
    Best(keep=lambda measured: None).after(seen)
    assert "evaluate.target" in seen.stop
    assert seen.last


def test_held_out_data_are_measured_at_both_ends_and_every_so_often(tmp_path: Path) -> None:
    due = [is_due(view(tmp_path, s, evaluate={"every": 4})) for s in range(7)]
    assert due == [True, False, False, False, True, False, True]
    assert [is_due(view(tmp_path, s)) for s in range(7)] == [True, *[False] * 5, True]
    stopped = view(tmp_path, 3)
    stopped.stop = "seen enough"
    assert is_due(stopped)


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
    Trainer(tiny(tmp_path), tmp_path / "good", monitors=[good]).run()
    with pytest.raises(RuntimeError, match="broken"):
        Trainer(tiny(tmp_path), tmp_path / "bad", monitors=[bad]).run()
    assert (good.closed, bad.closed) == (1, 1)
    assert [m["step"] for m in metrics(tmp_path / "bad")] == [1]
