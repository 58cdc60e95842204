"""Epochs over a store become steps once, when the run begins."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import StopAfter, fill_store, metrics, tiny, weights, whole_and_resumed, write_toml
from typer.testing import CliRunner

from agro.api.reporting_trainer import Trainer
from agro.cli import app
from agro.config import RunConfig
from agro.errors import Refused
from agro.store import Store, is_held_out
from agro.types import Sample


def logged(folder: Path, epochs: float | None = 3, **changes: Any) -> RunConfig:
    """Ten stored groups, four a step."""
    if not (folder / "log.db").exists():
        fill_store(folder / "log.db", groups=10)
    values: dict[str, Any] = {
        "data__store": str(folder / "log.db"),
        "data__replay": 1.0,
        "train": {"epochs": epochs, "groups": 4, "lr": 1e-2, "checkpoint_every": 2, "schedule": "linear"},
    }
    return tiny(folder, **values | changes)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 5), (3, 8), (0.4, 1), (0.1, 1), (1.25, 4)])
def test_steps_are_passes_over_the_stored_groups(tmp_path: Path, epochs: float, steps: int) -> None:
    """ceil(epochs × 10 / 4)."""
    trainer = Trainer(logged(tmp_path, epochs), tmp_path / "run")
    assert [phase.ends for phase in trainer.phases] == [steps]


def test_groups_that_are_never_drawn_do_not_count(tmp_path: Path) -> None:
    """Of other sources, held out, or without two scored responses: ten of the log, less those held out."""
    logged(tmp_path)
    with Store.open(tmp_path / "log.db") as store:
        store.append(Sample(f"{g}>", "1", reward=1.0, source="other") for g in range(200, 205))
        store.append(Sample(f"{g}>", "1", source="someone") for g in range(300, 305))
        ids = {s.prompt_id for s in store.samples(sources=["someone"], scored=True)}
    kept = sum(not is_held_out(i, 0.4) for i in ids)
    assert 0 < kept < 10
    config = logged(tmp_path, 4, data__sources=["someone"], data__hold_out=0.4)
    trainer = Trainer(config, tmp_path / "run")
    assert trainer.epochs == {"train": {"epochs": 4, "groups": kept, "steps": kept}}


def test_the_run_is_that_of_so_many_steps_and_draws_each_group_as_often(tmp_path: Path, capsys) -> None:
    out = Trainer(logged(tmp_path, 2), tmp_path / "run").run()
    assert "note: train: train.epochs = 2: 5 steps over 10 stored groups" in capsys.readouterr().err
    train = logged(tmp_path).train.model_dump() | {"epochs": None, "steps": 5}
    assert weights(out) == weights(Trainer(logged(tmp_path, train=train), tmp_path / "steps").run())
    record = json.loads((out / "config.json").read_text())
    assert (record["train"]["steps"], record["train"]["epochs"]) == (5, None)
    assert record["epochs"] == {"train": {"epochs": 2, "groups": 10, "steps": 5}}
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        [drawn] = {
            c.uses
            for c in store.draws.candidates(
                Trainer(logged(tmp_path), out).phases[0].rule(1), record["run"], 0
            )
        }
    assert drawn == 2
    repeated = RunConfig.load(out / "config.json")
    assert repeated.train.steps == 5


def test_a_resumed_run_keeps_its_steps_where_the_store_grew(tmp_path: Path) -> None:
    config = logged(tmp_path)
    plain = Trainer(config, tmp_path / "plain").run()
    Trainer(config, tmp_path / "run", monitors=[StopAfter(3)]).run()
    fill = [Sample(f"{g}>", str(i), reward=float(i)) for g in range(500, 540) for i in range(2)]
    resumed = Trainer(config, tmp_path / "run", resume=True)
    with Store.open(tmp_path / "log.db") as store:
        store.append(fill)
    assert Trainer(config, tmp_path / "new").phases[0].ends == 38  # ceil(3 × 50 / 4)
    grown = Trainer(config, tmp_path / "run", resume=True)
    assert [t.phases[0].ends for t in (resumed, grown)] == [8, 8]
    assert len(metrics(plain)) == 8
    longer = Trainer(logged(tmp_path, 4), tmp_path / "run", resume=True)
    assert longer.phases[0].ends == 50


def test_an_interrupted_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    whole_and_resumed(logged, tmp_path, 5)


def test_phases_have_epochs_or_steps_of_their_own(tmp_path: Path) -> None:
    phases = [
        {"name": "a"},
        {"name": "b", "train": {"steps": 7}},
        {"name": "c", "train": {"epochs": 1}},
    ]
    trainer = Trainer(logged(tmp_path, phases=phases), tmp_path / "run")
    assert [phase.steps for phase in trainer.phases] == [8, 7, 3]
    out = trainer.run()
    record = json.loads((out / "config.json").read_text())
    assert [p["train"]["steps"] for p in record["phases"]] == [8, 7, 3]
    assert record["epochs"].keys() == {"a", "c"}
    Trainer(logged(tmp_path, phases=phases), out, resume=True).run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__replay": 0.5}, r"train\.epochs = 3 .* expected data\.replay = 1 .* got data\.replay = 0\.5"),
        (
            {"phases": [{"name": "a", "data": {"replay": 0}, "train": {"steps": 1}}, {"name": "b"}]},
            r"phase b: train\.epochs = 3 .* got data\.replay = 0\.0 \(a\), 1\.0 \(b\)",
        ),
        ({"data__sources": ["nobody"]}, r"train\.epochs = 3 .*log\.db has none that may be drawn"),
        ({"data__store": "absent.db"}, r"train\.epochs = 3 .*absent\.db has none"),
        ({"train__steps": 5}, r"train: expected one of train\.steps and train\.epochs"),
        ({"train__epochs": 0}, r"train\.epochs"),
        ({"phases": [{"name": "a", "train": {"steps": 1, "epochs": 1}}]}, r"phase a: train: expected one of"),
    ],
)
def test_epochs_of_what_is_not_stored_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(Refused, match=message):
        Trainer(logged(tmp_path, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_on_the_command_line_epochs_replace_the_steps_of_a_recipe(tmp_path: Path) -> None:
    file = write_toml(tmp_path / "recipe.json", logged(tmp_path, None))
    assert RunConfig.load(file).train.steps == 100
    assert RunConfig.load(file, ["train.epochs=3"]).train.steps is None
    other = write_toml(tmp_path / "epochs.json", logged(tmp_path, 2))
    assert RunConfig.load(other, ["train.steps=3"]).train.epochs is None
    with pytest.raises(Refused, match=r"expected one of train\.steps and train\.epochs"):
        RunConfig.load(file, ["train.epochs=3", "train.steps=3"])
    phases = [{"name": "a", "train": {"steps": 1}}, {"name": "b", "train": {"steps": 1}}]
    several = write_toml(tmp_path / "several.json", logged(tmp_path, None, phases=phases))
    with pytest.raises(Refused, match=r"would change nothing: every phase sets"):
        RunConfig.load(several, ["train.epochs=3"])
    assert RunConfig.load(several, ["phases.b.train.epochs=3"]).phase("b").train.epochs == 3


def test_a_dry_run_shows_the_steps(tmp_path: Path) -> None:
    file = write_toml(tmp_path / "recipe.json", logged(tmp_path))
    shown = CliRunner().invoke(app, ["train", str(file), "--dry-run"])
    assert "train: agro, 8 steps, 8 updates" in shown.stdout
    assert "train.epochs = 3: 8 steps over 10 stored groups" in shown.stdout
    plan = CliRunner().invoke(app, ["train", str(file), "--dry-run", "--json"])
    assert json.loads(plan.stdout)["phases"][0]["steps"] == 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__replay": 0.0}, "set train.steps = 45 instead: 60 prompts × 3 / 4"),
        (
            {"data__replay": 0.0, "data__hold_out": 0.1},
            "set train.steps = 41 instead: about 54 prompts × 3 / 4",
        ),
        ({"data__replay": 0.5}, "set train.steps instead, for fresh samples the number of prompts × 3 / 4"),
    ],
)
def test_epochs_of_fresh_samples_are_answered_with_steps(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=re.escape(said)):
        Trainer(logged(tmp_path, **changes), tmp_path / "run")
