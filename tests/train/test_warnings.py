"""Warnings about a step's metrics, of which no two contradict each other, and notes on a run's settings."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import fill_store, tiny

from agro.api.reporting_trainer import Trainer
from agro.config import GuardConfig, RunConfig, recipes
from agro.runs.problems import toward_reference
from agro.runs.rundata import empty_metrics
from agro.train.check import notes_on_settings
from agro.train.monitors import View
from agro.train.monitors.guard import Guard, Warnings
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


@pytest.mark.parametrize(
    ("objective", "way"),
    [
        (AGRO, 'objective.weight = "reference"'),
        (AGRO | {"weight": "reference"}, "a larger objective.beta or a lower train.lr"),
        ({"name": "rloo", "beta": 0.1}, 'objective.weight = "reference"'),
        ({"name": "kl_pg", "beta": 0.1}, "a larger objective.beta or a lower train.lr"),
    ],
)
def test_best_responses_that_fall_are_warned_of_with_the_way_out(tmp_path, objective, way) -> None:
    """−0.2 and −0.1 in turn: mean −0.15, far below 0 by its error of 0.05/√20."""
    rows = [{"log_ratio_best": -0.1 * (1 + step % 2)} for step in range(20)]
    assert said(tmp_path, rows[:19], objective) == []
    [line] = said(tmp_path, rows + rows, objective)
    falling = "step 20: over the last 20 steps log π/π_ref of the best stored responses is -0.15"
    assert line.startswith(falling)
    assert way in line
    noisy = [{"log_ratio_best": 1.0 if step % 2 else -1.1} for step in range(40)]
    assert said(tmp_path, noisy, objective) == []


def test_a_kl_beyond_that_of_the_best_responses_is_warned_of(tmp_path: Path) -> None:
    """The limit is held out where it is measured, else the mean of the steps: here 1 and 1.28."""
    log = {"kl_of_best": 1.0, "eval_kl_ref_se": 0.1}
    held_out = log | {"eval_kl_of_best": 1.28}
    few = log | {"eval_kl_ref": 1.21, "kl_of_best_groups": 2}  # 8 groups in 4 steps say nothing, 10 do
    alone = {"kl_of_best": 1.0, "eval_kl_ref": 1.1, "eval_kl_ref_se": None}
    [line] = said(tmp_path, [log | {"eval_kl_ref": 1.21}] * 2)
    assert line.startswith("step 1: eval_kl_ref is 1.21 nats per response")
    assert "has 1 (" in line
    assert "has 1.28 (" in said(tmp_path, [held_out | {"eval_kl_ref": 1.49}])[0]
    assert "in 10 groups" in said(tmp_path, [few] * 5)[0]
    assert len(said(tmp_path, [alone])) == 1
    for rows in (
        [log | {"eval_kl_ref": 1.19}],
        [held_out | {"eval_kl_ref": 1.47}],
        [few] * 4,
        [alone | {"staleness_mean": 3.0}, {"eval_kl_ref": 9.0}],
    ):
        assert said(tmp_path, rows) == []
    assert said(tmp_path, [alone], {"name": "sft"}) == []


DWARFED = {"kl_to_reward_spread": 50.0, "length_mean": 9.0, "groups": 4, "groups_equal": 2}


def test_a_beta_is_called_too_large_only_where_most_rewards_differ(tmp_path: Path) -> None:
    assert "a smaller objective.beta" in said(tmp_path, [DWARFED])[0]
    assert said(tmp_path, [DWARFED | {"groups_equal": 3}]) == []


def test_no_method_is_told_both_a_smaller_and_a_larger_beta(tmp_path: Path) -> None:
    """The trap of `agro_onpolicy` has a way out of its own, whatever β is."""
    reversed_ = DWARFED | {"objective": {"reversed_share": 0.75}}
    for beta, warned in ((0.1, 0), (0.6, 1)):
        objective = {"name": "agro_onpolicy", "beta": beta}
        [line] = said(tmp_path, [reversed_, DWARFED], objective)
        assert 'objective.likelihood_ratio = "adaptive"' in line
        assert "β" not in line
        assert len(said(tmp_path, [DWARFED], objective)) == warned


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

    def advice(rows: list[dict[str, Any]], **rule: float) -> str:
        guard = Guard(GuardConfig(**rule), "a")
        *_, last = (guard.judge(View(phase, 1, {}, known | row)) for row in rows)
        return last.why

    assert "with a larger objective.beta or a lower train.lr, or raise" in advice([{}], kl=1.0)
    assert "with a lower train.lr, or raise" in advice([DWARFED], kl=1.0)
    exploding = [{"loss": loss} for loss in [1.0] * 5 + [9.0]]
    assert "with a lower train.lr, or raise" in advice(exploding, loss=3.0)


def notes(folder: Path, objective: dict[str, Any], **changes: Any) -> str:
    return "\n".join(notes_on_settings(Phase.all(tiny(folder, objective=objective, **changes))))


def test_agro_on_stored_responses_without_a_weight_is_warned_of_once_and_in_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_store(tmp_path / "log.db")
    log = {"data": {"store": str(tmp_path / "log.db"), "replay": 1.0}}
    trainer = Trainer(tiny(tmp_path, **log, train__steps=2), tmp_path / "run")
    start = "phase train: agro trains on stored responses without a weight"
    assert sum(note.startswith(start) for note in trainer.plan()["notes"]) == 1
    trainer.run()
    [line] = [line for line in capsys.readouterr().err.splitlines() if "without a weight" in line]
    assert line.startswith(f"note: {start}")
    assert 'objective.weight = "reference"' in line
    for weight in ("reference", "behavior"):
        assert notes(tmp_path, AGRO | {"weight": weight}, **log) == ""
    assert notes(tmp_path, AGRO) == ""


@pytest.mark.parametrize(
    ("name", "changes", "idle"),
    [
        *(("gvpo", {}, True), ("oapl", {}, True), ("rebel", {}, True), ("vargrad", {}, False)),
        ("gvpo", {"train__updates": 2}, False),
        ("gvpo", {"data__replay": 0.5}, False),
        ("gvpo", {"source__sync_every": 4}, False),
    ],
)
def test_an_anchor_that_is_the_policy_itself_is_noted(tmp_path, name, changes, idle) -> None:
    """log π/μ differs from 0 from the second update of a batch on, and on stored and earlier samples."""
    assert ("log π/μ is 0" in notes(tmp_path, {"name": name, "beta": 0.1}, **changes)) == idle


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, ""),
        ({"data__replay": 0.5}, "with data.replay some"),
        ({"train__updates": 2}, "with train.updates = 2 some"),
        (
            {"source__sync_every": 4},
            "with source.kind = inline, whose samples may be of earlier weights some",
        ),
    ],
)
def test_the_baseline_of_the_step_is_noted_on_samples_that_are_not_fresh(tmp_path, changes, named) -> None:
    said = notes(tmp_path, AGRO | {"baseline": "step"}, **changes)
    assert ('baseline = "step" keeps the optimum on fresh samples alone' in said) == bool(named)
    assert named in said
    assert 'baseline = "step"' not in notes(tmp_path, AGRO | {"baseline": "others"}, **changes)


@pytest.mark.parametrize("name", recipes.recipes())
def test_a_recipe_that_is_noted_says_what_it_lacks(name: str) -> None:
    said = "\n".join(notes_on_settings(Phase.all(RunConfig.load(Path(name)))))
    assert "without a weight" not in said
    assert not ("log π/μ is 0" in said and not recipes.get(name).missing)
