"""Warnings about a step's metrics: when they are given, and that no two of them contradict each other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny

from agro import config
from agro.runs.metrics import empty_metrics
from agro.runs.problems import toward_reference
from agro.train.monitors import View
from agro.train.monitors.guard import Guard
from agro.train.monitors.warnings import Warnings
from agro.train.phases import Phase

AGRO = {"name": "agro", "beta": 0.1}


def said(folder: Path, rows: Iterable[dict[str, Any]], objective: dict[str, Any] = AGRO) -> list[str]:
    """What is said of steps with these metrics."""
    lines: list[str] = []
    warnings = Warnings(lines.append)
    [phase] = Phase.all(tiny(folder, objective=objective, train__steps=100))
    options = {key: value for key, value in objective.items() if key != "name"}
    for step, row in enumerate(rows, 1):
        warnings.after(View(phase, step, options, empty_metrics() | row))
    return lines


def test_a_clip_in_each_of_twenty_steps_is_said_once(tmp_path: Path) -> None:
    """Norms 2, 3, … over train.clip = 1; one of exactly 1, which isn't clipped, begins the count again."""
    norms = [2.0, 1.0, *range(2, 21)]
    assert said(tmp_path, ({"grad_norm": norm} for norm in norms)) == []
    [line] = said(tmp_path, ({"grad_norm": norm} for norm in [*norms, None, 21.0, 22.0]))
    assert line.startswith("step 23: note: each of the last 20 gradients was clipped (median norm 11.5,")
    assert "train.lr alone decides" in line


@pytest.mark.parametrize(
    ("objective", "way"),
    [
        (AGRO, 'objective.weight = "reference"'),
        (AGRO | {"weight": "reference"}, "a larger objective.beta or a lower train.lr"),
        ({"name": "rloo", "beta": 0.1}, 'objective.weight = "reference"'),
        ({"name": "kl_pg", "beta": 0.1}, "a larger objective.beta or a lower train.lr"),
    ],
)
def test_best_responses_that_fall_are_warned_of_with_the_way_out(
    tmp_path: Path, objective: dict[str, Any], way: str
) -> None:
    """−0.2 and −0.1 in turn: mean −0.15, far below 0 by its error of 0.05/√20."""
    rows = [{"log_ratio_best": -0.1 * (1 + step % 2)} for step in range(20)]
    assert said(tmp_path, rows[:19], objective) == []
    [line] = said(tmp_path, rows + rows, objective)
    assert line.startswith(
        "step 20: over the last 20 steps log π/π_ref of the best stored responses is -0.15"
    )
    assert way in line
    noisy = [{"log_ratio_best": 1.0 if step % 2 else -1.1} for step in range(40)]
    assert said(tmp_path, noisy, objective) == []


def test_a_kl_beyond_that_of_the_best_responses_is_warned_of(tmp_path: Path) -> None:
    """The limit is held out where it is measured, else the mean of the steps: here 1 and 1.28."""
    log = {"kl_of_best": 1.0, "eval_kl_ref_se": 0.1}
    assert said(tmp_path, [log | {"eval_kl_ref": 1.19}]) == []
    [line] = said(tmp_path, [log | {"eval_kl_ref": 1.21}] * 2)
    assert line.startswith("step 1: eval_kl_ref is 1.21 nats per response")
    assert "has 1 (" in line
    held_out = log | {"eval_kl_of_best": 1.28}
    assert said(tmp_path, [held_out | {"eval_kl_ref": 1.47}]) == []
    assert "has 1.28 (" in said(tmp_path, [held_out | {"eval_kl_ref": 1.49}])[0]
    few = log | {"eval_kl_ref": 1.21, "kl_of_best_groups": 2}  # 8 groups in 4 steps say nothing, 10 do
    assert said(tmp_path, [few] * 4) == []
    assert "in 10 groups" in said(tmp_path, [few] * 5)[0]
    alone = {"kl_of_best": 1.0, "eval_kl_ref": 1.1, "eval_kl_ref_se": None}
    assert len(said(tmp_path, [alone])) == 1
    assert said(tmp_path, [alone | {"staleness_mean": 3.0}, {"eval_kl_ref": 9.0}]) == []
    assert said(tmp_path, [alone], {"name": "sft"}) == []


DWARFED = {"kl_to_reward_spread": 50.0, "length_mean": 9.0, "groups": 4, "groups_equal": 2}


def test_a_beta_is_called_too_large_only_where_most_rewards_differ(tmp_path: Path) -> None:
    assert "a smaller objective.beta" in said(tmp_path, [DWARFED])[0]
    assert said(tmp_path, [DWARFED | {"groups_equal": 3}]) == []


def test_no_method_is_told_both_a_smaller_and_a_larger_beta(tmp_path: Path) -> None:
    """The trap of `agro_onpolicy` has a way out of its own, whatever β is."""
    reversed_ = DWARFED | {"objective": {"reversed_share": 0.75}}
    for objective in ({"name": "agro_onpolicy", "beta": 0.1}, {"name": "agro_onpolicy", "beta": 0.6}):
        [line] = said(tmp_path, [reversed_, DWARFED], objective)
        assert 'objective.likelihood_ratio = "adaptive"' in line
        assert "β" not in line
    assert said(tmp_path, [DWARFED], {"name": "agro_onpolicy", "beta": 0.1}) == []
    assert len(said(tmp_path, [DWARFED], {"name": "agro_onpolicy", "beta": 0.6})) == 1


def test_a_larger_beta_is_not_advised_where_it_dwarfs_the_rewards(tmp_path: Path) -> None:
    weighted = AGRO | {"weight": "reference"}
    rows = [DWARFED | {"log_ratio_best": -1.0 - step} for step in range(20)]
    lines = said(tmp_path, rows, weighted)
    assert ["smaller objective.beta" in line for line in lines] == [True, False]
    assert "larger" not in lines[1]
    for ratio, larger in ((None, True), (10.0, True), (10.1, False)):
        assert ("larger objective.beta" in toward_reference(ratio)) == larger


def test_a_guard_advises_a_larger_beta_for_the_kl_alone(tmp_path: Path) -> None:
    """½ Var(R) explodes where βρ does, which a larger β makes worse."""
    [phase] = Phase.all(tiny(tmp_path))
    known = empty_metrics() | {"loss": 1.0, "kl_ref": 2.0}
    why = Guard(config.GuardConfig(kl=1.0), "a").judge(View(phase, 1, {}, known)).why
    assert "with a larger objective.beta or a lower train.lr, or raise" in why
    why = Guard(config.GuardConfig(kl=1.0), "a").judge(View(phase, 1, {}, known | DWARFED)).why
    assert "with a lower train.lr, or raise" in why
    guard = Guard(config.GuardConfig(loss=3.0), "a")
    losses = [1.0] * 5 + [9.0]
    *_, last = (guard.judge(View(phase, 1, {}, known | {"loss": loss})).why for loss in losses)
    assert "with a lower train.lr, or raise" in last
