"""What is said of a run from the rewards of its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import fill_store, tiny

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig, recipes
from agro.objectives import get
from agro.train.monitors.warnings import notes_on_settings, warn_of_rewards
from agro.train.phases import Phase

ONE, HALF, MOST, EQUAL = [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]


def test_the_ratio_of_each_prompt() -> None:
    """One success of four: off-means ¾, −¼, −¼, −¼; 4/2 · (3/8)/(3/4) = 1, so 1/(2β).

    Half: 0. Three: −1/(2β).
    """
    rewards = np.array([ONE, ONE, ONE, HALF, MOST, EQUAL, [1, 0, 0, np.nan]])
    said = warn_of_rewards(rewards, get("agro_onpolicy"), {"beta": 0.1, "likelihood_ratio": 1.0})
    assert said is not None
    assert said.startswith("on 3 of 5 held-out prompts whose 4 rewards differ (of 7)")
    assert "above 1 (median 5)" in said
    assert "on 0 of 5" in str(warn_of_rewards(rewards, get("agro_onpolicy"), {"beta": 0.51}))
    half = str(warn_of_rewards(rewards, get("agro_onpolicy"), {"beta": 0.26, "likelihood_ratio": 0.5}))
    assert half.startswith("on 0 of 5")
    assert "above 2" in half


def test_nothing_is_said_where_nothing_is_known_or_at_stake() -> None:
    rewards = np.array([ONE])
    assert warn_of_rewards(rewards, get("agro_onpolicy"), {"beta": 0.1})
    assert warn_of_rewards(rewards, get("agro"), {"beta": 0.1}) is None
    assert warn_of_rewards(rewards[:, :2], get("agro_onpolicy"), {"beta": 0.1}) is None
    assert warn_of_rewards(np.array([EQUAL]), get("agro_onpolicy"), {"beta": 0.1}) is None
    for share in ("adaptive", 0.0):
        assert (
            warn_of_rewards(rewards, get("agro_onpolicy"), {"beta": 0.1, "likelihood_ratio": share}) is None
        )


def test_a_step_is_warned_of_where_most_best_responses_are_pushed_down() -> None:
    entry = get("agro_onpolicy")
    warning, options = entry.warnings.metrics_warning, entry.defaults() | {"beta": 0.1}
    said = warning({"reversed_share": 0.75}, options)
    assert said is not None
    assert said.startswith("in 75% of the groups")
    assert "likelihood_ratio" in said
    for share in (0.5, np.nan):
        assert warning({"reversed_share": share}, options) is None
    assert get("agro").warnings.metrics_warning({}, options) is None


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
