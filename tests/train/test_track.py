"""Trackers get every step's numbers, and none of them stops a run."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tiny_runs import metrics, run_tiny, weights

from agro.errors import Refused
from agro.runs.track import Trackers


class Stand(ModuleType):
    """Stands for the wandb and trackio modules, and their runs."""

    def __init__(self, name: str, fails_at: int | None) -> None:
        super().__init__(name)
        self.fails_at, self.begun, self.logged, self.ended = fails_at, {}, [], 0

    def init(self, **options):
        self.begun = options
        if self.fails_at == 0:
            raise ConnectionError("no route")
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

    def put(name: str, fails_at: int | None = None) -> Stand:
        stand = Stand(name, fails_at)
        monkeypatch.setitem(sys.modules, name, stand)
        return stand

    return put


def run(tmp_path: Path, name: str = "run", **track) -> Path:
    return run_tiny(tmp_path, name, track=track)


def test_every_step_arrives_and_changes_no_weights(tmp_path: Path, stand) -> None:
    trackers = [stand(name) for name in ("wandb", "trackio")]
    tracked = run(tmp_path, "tracked", to=["wandb", "trackio"], project="sums", name="first")
    rows = metrics(tracked)
    for tracker in trackers:
        assert [step for step, _ in tracker.logged] == [1, 2, 3, 4, 5, 6]
        for (_, numbers), row in zip(tracker.logged, rows, strict=True):
            assert numbers["reward_mean"] == row["reward_mean"]
            assert numbers["objective/consistency"] == row["objective"]["consistency"]
            assert not {"step", "phase", "eval_reward"} & numbers.keys()  # the axis, a text, an unknown
        assert tracker.begun["project"] == "sums"
        assert tracker.begun["name"].startswith("first")
        assert tracker.begun["config"]["train"]["lr"] == 1e-2
        assert tracker.ended == 1
    assert weights(tracked) == weights(run(tmp_path, "plain"))
    run(tmp_path, "tracked", resume=True)  # it may change on the way


@pytest.mark.parametrize("fails_at", [0, 3])
def test_one_that_fails_is_named_once_and_dropped(tmp_path: Path, stand, capsys, fails_at: int) -> None:
    """When it begins, or at a step."""
    failing, working = stand("wandb", fails_at), stand("trackio")
    assert len(metrics(run(tmp_path, to=["wandb", "trackio"]))) == 6
    err = capsys.readouterr().err
    assert err.count("tracker wandb failed and is dropped; the run continues: ConnectionError: no route") == 1
    assert [step for step, _ in failing.logged] == list(range(1, fails_at))
    assert len(working.logged) == 6


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
