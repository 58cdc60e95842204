"""What is said of a run's settings before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import fill_store, tiny

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig, recipes
from agro.train.monitors.warnings import notes_on_settings
from agro.train.phases import Phase


def on_a_log(folder: Path, **objective: Any) -> RunConfig:
    fill_store(folder / "log.db")
    data = {"store": str(folder / "log.db"), "replay": 1.0}
    return tiny(folder, data=data, objective={"name": "agro", "beta": 0.1, **objective}, train__steps=2)


def test_agro_on_stored_responses_without_a_weight_is_warned_of_once_and_in_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = on_a_log(tmp_path)
    start = "phase train: agro trains on stored responses without a weight"
    assert [note.startswith(start) for note in Trainer(config, tmp_path / "run").plan()["notes"]].count(
        True
    ) == 1
    Trainer(config, tmp_path / "run").run()
    [line] = [line for line in capsys.readouterr().err.splitlines() if "without a weight" in line]
    assert line.startswith(f"note: {start}")
    assert 'objective.weight = "reference"' in line
    for weight in ("reference", "behavior"):
        assert notes_on_settings(Phase.all(on_a_log(tmp_path, weight=weight))) == []
    assert notes_on_settings(Phase.all(tiny(tmp_path))) == []


@pytest.mark.parametrize(
    ("name", "updates", "idle"),
    [("gvpo", 1, True), ("oapl", 1, True), ("gvpo", 2, False), ("rebel", 1, True), ("vargrad", 1, False)],
)
def test_an_anchor_that_is_the_policy_itself_is_noted(
    tmp_path: Path, name: str, updates: int, idle: bool
) -> None:
    """log π/μ differs from 0 from the second update of a batch on, and on stored samples."""
    config = tiny(tmp_path, objective={"name": name, "beta": 0.1}, train__updates=updates)
    assert ("log π/μ is 0" in str(notes_on_settings(Phase.all(config)))) == idle
    stored = tiny(tmp_path, objective={"name": "gvpo", "beta": 0.1}, data__replay=0.5)
    assert "log π/μ is 0" not in str(notes_on_settings(Phase.all(stored)))
    lagging = tiny(tmp_path, objective={"name": "gvpo", "beta": 0.1}, source__sync_every=4)
    assert "log π/μ is 0" not in str(notes_on_settings(Phase.all(lagging)))


@pytest.mark.parametrize(
    ("changed", "named"),
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
def test_the_baseline_of_the_step_is_noted_on_samples_that_are_not_fresh(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    own = {"name": "agro", "beta": 0.1, "baseline": "step"}
    said = "\n".join(notes_on_settings(Phase.all(tiny(tmp_path, objective=own, **changed))))
    assert ('baseline = "step" keeps the optimum on fresh samples alone' in said) == bool(named)
    assert named in said
    others = tiny(tmp_path, objective={**own, "baseline": "others"}, **changed)
    assert 'baseline = "step"' not in "\n".join(notes_on_settings(Phase.all(others)))


@pytest.mark.parametrize("name", recipes.recipes())
def test_a_recipe_that_is_noted_says_what_it_lacks(name: str) -> None:
    said = "\n".join(notes_on_settings(Phase.all(RunConfig.load(Path(name)))))
    assert "without a weight" not in said
    assert not ("log π/μ is 0" in said and not recipes.get(name).missing)
