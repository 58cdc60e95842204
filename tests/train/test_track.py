"""Trackers get every step's numbers, and none of them stops a run."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tiny_runs import metrics, tiny, weights

from agro.api.reporting_trainer import Trainer
from agro.errors import Refused
from agro.runs.track import Trackers


class Stand:
    """Stands for the wandb and trackio modules, and their runs."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.begun, self.logged, self.ended = fails_at, {}, [], 0

    def init(self, **options):
        self.begun = options
        return self

    def Settings(self, **options):
        return options

    def log(self, numbers, step):
        if step == self.fails_at:
            raise ConnectionError("no route")
        self.logged.append((step, numbers))

    def finish(self):
        self.ended += 1


@pytest.fixture
def stand(monkeypatch):
    """A function: put a stand-in for a module into place."""

    def put(name: str, **options) -> Stand:
        stand = Stand(**options)
        module = ModuleType(name)
        for attribute in ("init", "Settings", "log", "finish"):
            setattr(module, attribute, getattr(stand, attribute))
        monkeypatch.setitem(sys.modules, name, module)
        return stand

    return put


def run(tmp_path: Path, name: str = "run", **track) -> Path:
    return Trainer(tiny(tmp_path, track=track), tmp_path / name).run()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_every_step_arrives(tmp_path: Path, stand, name: str) -> None:
    tracker = stand(name)
    rows = metrics(run(tmp_path, to=[name], project="sums", name="first"))
    assert [step for step, _ in tracker.logged] == [1, 2, 3, 4, 5, 6]
    for (_, numbers), row in zip(tracker.logged, rows, strict=True):
        assert numbers["reward_mean"] == row["reward_mean"]
        assert numbers["objective/consistency"] == row["objective"]["consistency"]
        assert not {"step", "phase", "eval_reward"} & numbers.keys()  # the axis, a text, an unknown
    assert tracker.begun["project"] == "sums"
    assert tracker.begun["name"].startswith("first")
    assert tracker.begun["config"]["train"]["lr"] == 1e-2
    assert tracker.ended == 1


def test_tracking_changes_no_weights_and_may_change_on_the_way(tmp_path: Path, stand) -> None:
    stand("wandb")
    assert weights(run(tmp_path, "tracked", to=["wandb"])) == weights(run(tmp_path, "plain"))
    Trainer(tiny(tmp_path), tmp_path / "tracked", resume=True).run()


def test_one_that_fails_on_the_way_is_named_once_and_dropped(tmp_path: Path, stand, capsys) -> None:
    failing, working = stand("wandb", fails_at=3), stand("trackio")
    assert len(metrics(run(tmp_path, to=["wandb", "trackio"]))) == 6
    err = capsys.readouterr().err
    assert err.count("tracker wandb failed and is dropped; the run continues: ConnectionError: no route") == 1
    assert [step for step, _ in failing.logged] == [1, 2]
    assert len(working.logged) == 6


def test_one_that_cannot_begin_is_dropped_too(tmp_path: Path, stand, monkeypatch, capsys) -> None:
    stand("wandb")
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **_: 1 / 0)
    assert len(metrics(run(tmp_path, to=["wandb"]))) == 6
    assert (
        "tracker wandb failed and is dropped; the run continues: ZeroDivisionError" in capsys.readouterr().err
    )


def test_one_that_is_not_installed_is_refused_at_the_start(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what makes an import fail
    with pytest.raises(Refused, match=r"wandb can't be imported .*pip install wandb"):
        run(tmp_path, to=["wandb"])
    assert not (tmp_path / "run").exists()


def test_what_is_not_a_finite_number_is_not_sent() -> None:
    found = {}

    class One:
        def log(self, step, numbers):
            found.update(numbers)

        def close(self): ...

    Trackers({"one": One()}, print).log(
        {"step": 1, "a": 2, "b": math.nan, "c": None, "d": True, "e": "x", "f": {"g": 0.5}}
    )
    assert found == {"a": 2.0, "f/g": 0.5}


def installed(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} isn't installed (pip install '.[track]')")


def test_tensorboard_itself(tmp_path: Path) -> None:
    installed("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run(tmp_path, to=["tensorboard"])
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    read = [(e.step, e.value) for e in events.Scalars("reward_mean")]
    assert read == [(m["step"], pytest.approx(m["reward_mean"], rel=1e-6)) for m in metrics(folder)]


def test_wandb_itself_offline(tmp_path: Path, monkeypatch, capsys) -> None:
    installed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = run(tmp_path, to=["wandb"])
    assert "failed" not in capsys.readouterr().err
    [record] = folder.glob("wandb/offline-run-*/*.wandb")
    assert b"reward_mean" in record.read_bytes()


def test_trackio_itself(tmp_path: Path, monkeypatch, capsys) -> None:
    installed("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run(tmp_path, to=["trackio"], project="sums")
    assert "failed" not in capsys.readouterr().err
    import sqlite3

    with sqlite3.connect(tmp_path / "trackio" / "sums.db") as connection:
        assert connection.execute("SELECT count(*) FROM metrics").fetchall() == [(6,)]
