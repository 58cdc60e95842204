"""What is said of steps: where nothing can be learned, and where metrics show that settings are wrong; and
notes on a run's settings. No two warnings contradict each other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import REWARDS, log_alone, metrics, run_tiny, tiny, write_prompts

from agro.api.reporting_trainer import Trainer
from agro.config import DataConfig, GuardConfig, RunConfig, recipes
from agro.errors import Refused
from agro.runs.problems import toward_reference
from agro.runs.rundata import empty_metrics
from agro.store import Store
from agro.train.check import check_config, notes_on_settings
from agro.train.monitors import View
from agro.train.monitors.guard import Guard, Signal, Warnings
from agro.train.phases import Phase
from agro.types import Sample

GOOD = {"groups": 4, "groups_equal": 3, "reward_mean": 0.5, "reward_std": 0.5, "grad_norm": 1.0}
EQUAL = GOOD | {"groups_equal": 4}
ZERO = EQUAL | {"reward_mean": 0.0, "reward_std": 0.0}


AGRO = {"name": "agro", "beta": 0.1}
SFT, REINFORCE, RLOO = ({"name": name} for name in ("sft", "reinforce", "rloo"))
KTO, TOPR = {"name": "kto", "beta": 0.1}, {"name": "topr", "baseline": 0.5}
OF_THE_STEP = AGRO | {"baseline": "step"}
NO_GRADIENT = {"grad_norm": 0.0}
SAME = EQUAL | {"reward_std": 0.0} | NO_GRADIENT


@pytest.mark.parametrize(
    ("objective", "row", "expected"),
    [
        (AGRO, GOOD, None),
        (AGRO, EQUAL, "equal rewards within groups"),
        (AGRO, ZERO, "all rewards are 0"),
        (AGRO, EQUAL | {"reward_std": 0.0}, "all rewards are equal"),
        (AGRO, GOOD | {"reward_mean": 0.0}, None),  # rewards of both signs
        (AGRO, GOOD | NO_GRADIENT, "a gradient of 0"),
        (AGRO, GOOD | {"grad_norm": None}, None),  # skipped for a gradient that isn't finite
        (AGRO, {"groups": 0, "groups_equal": 0}, "no valid response"),
        # Equal rewards matter to an objective that compares them; `sft` imitates whatever they are.
        *((SFT, EQUAL, None), (SFT, ZERO, None), (REINFORCE, EQUAL, None), (REINFORCE, ZERO, None)),
        *((RLOO, EQUAL, "equal rewards within groups"), (RLOO, ZERO, "all rewards are 0")),
        # `kto` learns from thumbs down too, with its gradient; where that is 0, rewards of 0 teach nothing.
        *((KTO, ZERO, None), (TOPR, ZERO, None)),
        *((each, ZERO | NO_GRADIENT, "all rewards are 0") for each in (REINFORCE, KTO, TOPR)),
        # One reward for all is named, and not the gradient, also where no groups are compared.
        (OF_THE_STEP, SAME, "all rewards are equal"),
        (OF_THE_STEP, SAME | {"grad_norm": 1.0}, None),  # βρ differs, so the KL is trained on
    ],
)
def test_the_reason_of_a_step(tmp_path, objective, row, expected) -> None:
    [phase] = Phase.all(tiny(tmp_path, objective=objective))
    view = View(phase, 1, {}, empty_metrics() | row)
    Signal(phase, print).after(view)
    assert view.metrics["no_signal"] == expected


def signal_lines(
    folder: Path, rows: Iterable[dict[str, Any]], objective: Any = AGRO, **changes: Any
) -> list[str]:
    """What is said of steps with these metrics about what can be learned from them."""
    said: list[str] = []
    [phase] = Phase.all(tiny(folder, objective=objective, **changes))
    monitor = Signal(phase, said.append)
    for step, row in enumerate(rows, 1):
        monitor.after(View(phase, step, {}, empty_metrics() | row))
    return said


def test_of_one_reward_for_all_the_line_names_it_and_no_rate(tmp_path: Path) -> None:
    [line] = signal_lines(tmp_path, [SAME], objective=OF_THE_STEP, train__steps=1)
    assert "all rewards are equal (each is 0.5, in 4 groups). What to do: see whether the reward" in line
    assert "train.lr" not in line


@pytest.mark.parametrize("row", [ZERO | NO_GRADIENT, EQUAL | NO_GRADIENT])
@pytest.mark.parametrize(
    ("data", "advised"),
    [
        ({"data__replay": 0.5}, True),
        ({"data__replay": 0.5, "data__spread": True}, False),  # it is done already
        ({}, False),  # of fresh samples the prompts are to be changed
    ],
)
def test_equal_groups_of_a_store_are_advised_to_be_left_out(tmp_path, row, data, advised) -> None:
    [line] = signal_lines(tmp_path, [row] * 3, objective=RLOO, **data)
    assert ("data.spread = true, which draws only those" in line) == advised


def groups_of(rewards: Iterable[Iterable[float]]) -> list[Sample]:
    """Responses of these rewards to each prompt."""
    groups = enumerate(rewards)
    return [Sample(f"{100 + g}>", str(i), reward=r) for g, each in groups for i, r in enumerate(each)]


@pytest.mark.test
def test_a_log_of_mostly_equal_groups_is_learned_from_with_spread(tmp_path: Path, capsys) -> None:
    """30 of 32 groups are of wrong responses alone: without data.spread most steps draw only such."""
    data = log_alone(tmp_path, groups_of([[1.0, 0.0, 0.0]] * 2 + [[0.0] * 3] * 30))
    small = {"objective": REINFORCE, "train__groups": 2, "train__steps": 5}
    [line] = said_by(tmp_path, "all", capsys, data=data, **small)
    assert "What to do: where other groups of the store have rewards that differ: data.spread = true" in line
    run = run_tiny(tmp_path, "spread", data=data | {"spread": True}, **small)
    said = capsys.readouterr().err
    assert "30 of 32 groups have equal rewards and aren't drawn (data.spread)" in said
    assert "nothing can be learned" not in said
    assert {row["groups_equal"] for row in metrics(run)} == {0}


def test_a_number_of_spread_is_for_stored_groups_alone(tmp_path: Path) -> None:
    """Those that a step samples all come, in groups of one too. 0 and 1 are false and true."""
    lonely = {"objective": {"name": "reinforce"}, "sampler__n": 1, "data__spread": 0.1}
    check_config(tiny(tmp_path, **lonely))
    assert [DataConfig(spread=value).spread for value in (0, 1)] == [False, True]


def test_a_store_with_too_few_groups_of_different_rewards_names_spread(tmp_path: Path) -> None:
    three = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    data = log_alone(tmp_path, groups_of([*three, *[[0.0] * 3] * 5]), spread=True)
    message = r"got 3 of different rewards \(data\.spread\).*set data\.spread = false"
    with pytest.raises(Refused, match=message):
        run_tiny(tmp_path, data=data)


@pytest.mark.parametrize("name", ["log", "mixed", "replay"])
def test_the_recipes_for_stored_groups_draw_those_that_teach(name: str) -> None:
    assert RunConfig.load(Path(name)).data.spread


def test_it_is_said_after_three_steps_in_a_row_and_every_hundred(tmp_path: Path) -> None:
    rows = [GOOD if step in (3, 6) else ZERO for step in range(1, 301)]
    said = signal_lines(tmp_path, rows, train__steps=300)
    assert [line.split(":")[0] for line in said] == ["step 9", "step 106", "step 206"]
    assert "nothing can be learned, 3 steps in a row: all rewards are 0 (mean reward 0)" in said[0]
    assert "What to do: check that the reward of a right response isn't 0" in said[0]


def test_a_share_that_the_store_does_not_meet_names_what_limits_it(tmp_path: Path) -> None:
    rows = [GOOD | {"replay_missing": missing} for missing in (2, 0, 2, 1, 2, 2)]
    limited = {"data__max_age": 3, "data__sources": ["policy"], "data__max_uses": 1}
    [line] = signal_lines(tmp_path, rows, data__replay=0.5, **limited)
    assert line.startswith("step 5: data.replay = 0.5 requests 2 groups of the store, but again only 0 could")
    assert "data.sources = ('policy',), data.max_age = 3, data.max_uses = 1" in line
    [line] = signal_lines(tmp_path, [GOOD | {"replay_missing": 1}] * 3, data__replay=0.5)
    assert "or more prompts" in line


def said_by(folder: Path, name: str, capsys: pytest.CaptureFixture[str], **changes: Any) -> list[str]:
    run_tiny(folder, name, **changes)
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]


@pytest.mark.test
def test_a_run_whose_rewards_are_all_0_says_so(tmp_path: Path, capsys) -> None:
    reward = {"reward__name": f"{REWARDS}:zero", "evaluate__n": 2}
    held = write_prompts(tmp_path / "held.jsonl", range(60, 64))
    [line] = said_by(tmp_path, "run", capsys, **reward, data__eval_prompts=held)
    assert line.startswith("step 3: nothing can be learned, 3 steps in a row: all rewards are 0")
    rows = metrics(tmp_path / "run")
    assert [m["no_signal"] for m in rows] == [None] + ["all rewards are 0"] * 6
    assert {m["regret"] for m in rows} == {m["eval_regret"] for m in rows} == {None}
    assert len(said_by(tmp_path, "short", capsys, **reward, train__steps=2)) == 1


@pytest.mark.test
def test_a_run_on_a_log_without_differences_says_so(tmp_path: Path, capsys) -> None:
    data = log_alone(tmp_path, groups_of([g / 8] * 3 for g in range(8)))
    [line] = said_by(tmp_path, "run", capsys, data=data)
    assert "equal rewards within groups" in line
    with Store.open(tmp_path / "log.db") as store:
        store.append([Sample("100>", "7", reward=9.0)])
    assert said_by(tmp_path, "other", capsys, data=data, train__groups=8) == []


@pytest.mark.test
def test_a_run_without_a_valid_response_says_so(tmp_path: Path, capsys) -> None:
    short = {"data": log_alone(tmp_path), "train__max_length": 3, "train__steps": 3}
    [line] = said_by(tmp_path, "run", capsys, **short)
    assert "no valid response" in line
    assert "raise train.max_length" in line


@pytest.mark.test
def test_a_run_whose_replay_is_never_met_says_so(tmp_path: Path, capsys) -> None:
    """Rewards are at most 1, so that no group of the run's own store can be drawn."""
    [line] = said_by(tmp_path, "run", capsys, data__replay=0.5, data__min_reward=2.0)
    assert "step 3: data.replay = 0.5 requests 2 groups of the store, but again only 0 could" in line
    assert "data.min_reward = 2.0" in line
    assert [m["replay_missing"] for m in metrics(tmp_path / "run")] == [2] * 6
    assert said_by(tmp_path, "met", capsys, data__replay=0.5) == []
    assert [m["replay_missing"] for m in metrics(tmp_path / "met")] == [2, 0, 0, 0, 0, 0]


def warnings_of(folder: Path, rows: Iterable[dict[str, Any]], objective: dict[str, Any] = AGRO) -> list[str]:
    """What is warned of in steps with these metrics."""
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
    assert warnings_of(tmp_path, rows[:19], objective) == []
    [line] = warnings_of(tmp_path, rows + rows, objective)
    falling = "step 20: over the last 20 steps log π/π_ref of the best stored responses is -0.15"
    assert line.startswith(falling)
    assert way in line
    noisy = [{"log_ratio_best": 1.0 if step % 2 else -1.1} for step in range(40)]
    assert warnings_of(tmp_path, noisy, objective) == []


def test_a_kl_beyond_that_of_the_best_responses_is_warned_of(tmp_path: Path) -> None:
    """The limit is held out where it is measured, else the mean of the steps: here 1 and 1.28."""
    log = {"kl_of_best": 1.0, "eval_kl_ref_se": 0.1}
    held_out = log | {"eval_kl_of_best": 1.28}
    few = log | {"eval_kl_ref": 1.21, "kl_of_best_groups": 2}  # 8 groups in 4 steps say nothing, 10 do
    alone = {"kl_of_best": 1.0, "eval_kl_ref": 1.1, "eval_kl_ref_se": None}
    [line] = warnings_of(tmp_path, [log | {"eval_kl_ref": 1.21}] * 2)
    assert line.startswith("step 1: eval_kl_ref is 1.21 nats per response")
    assert "has 1 (" in line
    assert "has 1.28 (" in warnings_of(tmp_path, [held_out | {"eval_kl_ref": 1.49}])[0]
    assert "in 10 groups" in warnings_of(tmp_path, [few] * 5)[0]
    assert len(warnings_of(tmp_path, [alone])) == 1
    for rows in (
        [log | {"eval_kl_ref": 1.19}],
        [held_out | {"eval_kl_ref": 1.47}],
        [few] * 4,
        [alone | {"staleness_mean": 3.0}, {"eval_kl_ref": 9.0}],
    ):
        assert warnings_of(tmp_path, rows) == []
    assert warnings_of(tmp_path, [alone], {"name": "sft"}) == []


DWARFED = {"kl_to_reward_spread": 50.0, "length_mean": 9.0, "groups": 4, "groups_equal": 2}


def test_a_beta_is_called_too_large_only_where_most_rewards_differ(tmp_path: Path) -> None:
    assert "a smaller objective.beta" in warnings_of(tmp_path, [DWARFED])[0]
    assert warnings_of(tmp_path, [DWARFED | {"groups_equal": 3}]) == []


def test_no_method_is_told_both_a_smaller_and_a_larger_beta(tmp_path: Path) -> None:
    """The trap of `agro_onpolicy` has a way out of its own, whatever β is."""
    reversed_ = DWARFED | {"objective": {"reversed_share": 0.75}}
    for beta, warned in ((0.1, 0), (0.6, 1)):
        objective = {"name": "agro_onpolicy", "beta": beta}
        [line] = warnings_of(tmp_path, [reversed_, DWARFED], objective)
        assert 'objective.likelihood_ratio = "adaptive"' in line
        assert "β" not in line
        assert len(warnings_of(tmp_path, [DWARFED], objective)) == warned


def test_a_larger_beta_is_not_advised_where_it_dwarfs_the_rewards(tmp_path: Path) -> None:
    weighted = AGRO | {"weight": "reference"}
    rows = [DWARFED | {"log_ratio_best": -1.0 - step} for step in range(20)]
    lines = warnings_of(tmp_path, rows, weighted)
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


@pytest.mark.test
def test_agro_on_stored_responses_without_a_weight_is_warned_of_once_and_in_the_plan(
    tmp_path, capsys
) -> None:
    data = log_alone(tmp_path)
    trainer = Trainer(tiny(tmp_path, data=data, train__steps=2), tmp_path / "run")
    start = "phase train: agro trains on stored responses without a weight"
    assert sum(note.startswith(start) for note in trainer.plan()["notes"]) == 1
    trainer.run()
    [line] = [line for line in capsys.readouterr().err.splitlines() if "without a weight" in line]
    assert line.startswith(f"note: {start}")
    assert 'objective.weight = "reference"' in line
    for weight in ("reference", "behavior"):
        assert notes(tmp_path, AGRO | {"weight": weight}, data=data) == ""
    assert notes(tmp_path, AGRO) == ""


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, ""),
        ({"data__replay": 0.5}, "with data.replay some"),
        ({"train__updates": 2}, "with train.updates = 2 some"),
        ({"source__sync_every": 4}, "with source.kind = inline, whose samples may be of earlier weights"),
    ],
)
def test_the_baseline_of_the_step_is_noted_on_samples_that_are_not_fresh(tmp_path, changes, named) -> None:
    said = notes(tmp_path, AGRO | {"baseline": "step"}, **changes)
    assert ('baseline = "step" keeps the optimum only on fresh samples' in said) == bool(named)
    assert named in said
    assert 'baseline = "step"' not in notes(tmp_path, AGRO | {"baseline": "others"}, **changes)


@pytest.mark.test
@pytest.mark.parametrize("name", recipes.recipes())
def test_no_recipe_is_without_a_weight(name: str) -> None:
    said = "\n".join(notes_on_settings(Phase.all(RunConfig.load(Path(name)))))
    assert "without a weight" not in said
