"""Monitors by themselves: what each of them makes of a step's metrics, and what it keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from tiny_runs import metrics, tiny

from agro import config
from agro.api.reporting_trainer import Trainer
from agro.errors import Refused
from agro.runs.metrics import FOLLOWED, empty_metrics
from agro.train.monitors import GO, Monitor, View
from agro.train.monitors.guard import Best, Guard
from agro.train.monitors.warnings import Warnings
from agro.train.phases import Phase


def view(folder: Path, step: int, known: dict[str, Any] | None = None, **changes: Any) -> View:
    [phase] = Phase.all(tiny(folder, **changes))
    return View(phase, step, {"beta": 0.1}, empty_metrics() | (known or {}))


def kinds(guard: Guard, folder: Path, *losses: float, kl: float | None = None) -> list[str]:
    return [guard.judge(view(folder, 1, {"loss": x, "kl_ref": kl})).kind for x in losses]


def test_a_guard_judges_as_its_rule_says(tmp_path: Path) -> None:
    for action, expected in (("skip", "skip"), ("stop", "stop"), ("rollback", "roll back")):
        guard = Guard(config.GuardConfig(loss=3.0, action=action), "a")
        assert kinds(guard, tmp_path, 1, 1, 1, 1, 1) == ["go"] * 5
        assert kinds(guard, tmp_path, 4) == [expected]
    assert (
        "guard.kl"
        in Guard(config.GuardConfig(kl=1.0), "a").judge(view(tmp_path, 1, {"loss": 0.0, "kl_ref": 2.0})).why
    )


def test_rollbacks_end_and_are_counted_over_phases(tmp_path: Path) -> None:
    rule = config.GuardConfig(kl=1.0, action="rollback", rollbacks=2)
    guard = Guard(rule, "a")
    assert kinds(guard, tmp_path, 0.0, 0.0, kl=2.0) == ["roll back"] * 2
    later = Guard(rule, "b")
    later.restore(json.loads(json.dumps(guard.state())))
    assert kinds(later, tmp_path, 0.0, kl=2.0) == ["stop"]


def test_a_guard_remembers_the_losses_of_its_own_phase(tmp_path: Path) -> None:
    rule = config.GuardConfig(loss=3.0, window=5)
    guard = Guard(rule, "a")
    kinds(guard, tmp_path, *range(1, 8))
    state = json.loads(json.dumps(guard.state()))
    same, other = Guard(rule, "a"), Guard(rule, "b")
    same.restore(state)
    other.restore(state)
    assert (same.losses, other.losses) == ((3, 4, 5, 6, 7), ())


def test_the_state_of_the_best_survives_a_stop(tmp_path: Path) -> None:
    best = Best(keep=ignore)
    assert best.state() is None
    rules = {"evaluate": {"patience": 2, "every": 1}, "data__eval_prompts": str(tmp_path / "none.jsonl")}
    for step, reward in enumerate([0.5, 0.7, 0.6]):
        best.after(view(tmp_path, step, {"eval_reward": reward}, **rules))
    again = Best(keep=ignore)
    again.restore(json.loads(json.dumps(best.state())))
    assert (again.value, again.step, again.waited) == (0.7, 1, 1)


def ignore(metric: str, measured: Mapping[str, Any]) -> None:
    pass


PROMPTS = {"data__eval_prompts": "none.jsonl"}
STORED = {"data__store": "log.db", "data__hold_out": 0.2}  # without prompts to evaluate


@pytest.mark.parametrize(
    ("rules", "metric", "values", "kept", "stops", "said"),
    [
        (PROMPTS | {"patience": 2}, "eval_reward", [0.5, 0.5, None, math.nan, 0.7, 0.6, 0.7], [0, 4], 6, ""),
        (PROMPTS | {"target": 0.9}, "eval_reward", [0.8, 0.9], [0, 1], 1, "evaluate.target"),
        (STORED | {"patience": 2}, "eval_auc", [0.5, 0.7, 0.6, 0.65], [0, 1], 3, "0.7000, which step 1 had"),
        (STORED | {"patience": 2}, "eval_consistency", [0.5, 0.3, 0.4, 0.35], [0, 1], 3, "0.3000, which"),
        (STORED | {"patience": 2}, "eval_log_ratio_best", [0.0, 0.2, -0.1, 0.1], [0, 1], 3, "0.2000, which"),
        (STORED | {"target": 0.1}, "eval_consistency", [0.11, 0.1], [0, 1], 1, "evaluate.target"),
        ({"target_kl": 2.0}, "eval_kl_ref", [None, math.nan, 1.99, 2.0], [], 3, "evaluate.target_kl 2"),
    ],
)
def test_a_metric_decides_what_is_kept_and_when_a_run_ends(
    tmp_path: Path,
    rules: dict[str, Any],
    metric: str,
    values: list[Any],
    kept: list[int],
    stops: int,
    said: str,
) -> None:
    """It stops at step `stops`, and `said` is why. Rewards of prompts decide where there are some."""
    best: list[tuple[str, int]] = []
    monitor = Best(keep=lambda name, measured: best.append((name, measured["step"])))
    data = {key: value for key, value in rules.items() if "__" in key}
    evaluate = {"every": 1, **{key: value for key, value in rules.items() if "__" not in key}}
    if data:
        evaluate["keep_best"] = True
    if metric not in ("eval_reward", "eval_auc", "eval_kl_ref"):
        evaluate["metric"] = metric
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
    for rule in ({"patience": 2}, {"keep_best": True}, {"target": 0.0}):
        with pytest.raises(Refused, match="eval_auc can't be measured on these held-out groups"):
            Best(keep=ignore).after(view(tmp_path, 0, evaluate={"every": 1, **rule}, **STORED))
    Best(keep=ignore).after(view(tmp_path, 0, evaluate={"every": 1}, **STORED))  # nothing waits for it
    Best(keep=ignore).after(view(tmp_path, 1, evaluate={"every": 1, "patience": 2}, **STORED))


def test_held_out_data_are_measured_at_both_ends_and_every_so_often(tmp_path: Path) -> None:
    due = [view(tmp_path, s, evaluate={"every": 4}).is_due for s in range(7)]
    assert due == [True, False, False, False, True, False, True]
    assert [view(tmp_path, s).is_due for s in range(7)] == [True, *[False] * 5, True]
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
    Trainer(tiny(tmp_path), tmp_path / "good", monitors=[good]).run()
    with pytest.raises(RuntimeError, match="broken"):
        Trainer(tiny(tmp_path), tmp_path / "bad", monitors=[bad]).run()
    assert (good.closed, bad.closed) == (1, 1)
    assert [m["step"] for m in metrics(tmp_path / "bad")] == [1]


def test_every_metric_that_can_be_followed_is_a_choice() -> None:
    kind = config.EvaluateConfig.model_fields["metric"].annotation
    [choices] = [get_args(part) for part in get_args(kind) if get_args(part)]
    assert set(choices) == FOLLOWED.keys()
