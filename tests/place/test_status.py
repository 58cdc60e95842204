"""Who does what in a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agro.errors import Refused
from agro.place.placement import PlacedRecord, RunStatus
from agro.store.shared import LocalFolder
from agro.train.publications import ProcessReport, Publications, PublishedWeights

PLACED = {"pid": 7, "host": "here", "since": 100.0, "restarts": 2, "ended": ""}


def report(name: str, seen: float, **values: int) -> ProcessReport:
    role = "trainer" if name == "trainer" else "collector"
    return ProcessReport(name, role, since=150.0, host="there", pid=8, seen=seen, **values)  # type: ignore[arg-type]


@pytest.fixture
def publications(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publications:
    """Of a trainer that was heard of 10 seconds ago, and of a collector that is silent."""
    monkeypatch.setattr("time.time", lambda: 190.0)
    made = Publications(LocalFolder(tmp_path / "shared"))
    made.begin({}, [])
    made.publish(PublishedWeights(4, "train", 3), lambda folder: folder.mkdir(parents=True))
    made.report(report("trainer", 0.0, version=4, step=3))
    monkeypatch.setattr("time.time", lambda: 120.0)
    collector = report("collector-1", 0.0, version=3, responses=12)
    made.report(replace(collector, push_error=1.04e-6, dropped=("http://s:2",)))
    monkeypatch.setattr("time.time", lambda: 200.0)
    return made


def test_what_the_supervisor_and_the_processes_say(publications: Publications) -> None:
    """The supervisor knows better where a process is, the process what it does."""
    processes = [
        {"name": "server", "role": "server", **PLACED},
        {"name": "trainer", "role": "trainer", **PLACED, "restarts": 0},
        {"name": "collector-1", "role": "collector", **PLACED, "pid": None, "host": None},
    ]
    status = RunStatus.of(PlacedRecord("local:1", processes), publications)
    assert status.rows() == [
        ("server", "here 7", "100 s ago", "", "", "started again 2 times"),
        ("trainer", "here 7", "100 s ago", "4", "10 s ago", "step 3"),
        (
            "collector-1",
            "there 8",
            "100 s ago",
            "3",
            "80 s ago",
            "silent, 12 responses, last probe 1e-06 nats off, without http://s:2, started again 2 times",
        ),
    ]
    assert status.sentence() == "newest weights: version 4, after step 3; the run continues"


def test_a_run_that_was_not_placed(publications: Publications) -> None:
    publications.withdraw(report("collector-1", 0.0))
    status = RunStatus.of(None, publications)
    assert status.rows() == [("trainer", "there 8", "50 s ago", "4", "10 s ago", "step 3")]
    assert json.dumps(status.to_json())
    assert status.to_json()["placement"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s ago"), (119.0, "119 s ago"), (120.0, "2 min ago"), (7300.0, "2 h ago"), (9e5, "10 d ago")],
)
def test_times_in_words(seconds: float, text: str, publications: Publications) -> None:
    placed = {"name": "server", "role": "server", **PLACED, "since": 200.0 - seconds}
    [row] = RunStatus.of(PlacedRecord("local", [placed]), Publications(LocalFolder(Path("no")))).rows()
    assert row[2] == text


def test_folders_of_runs_alone(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"expected the folder of a run"):
        RunStatus.read(str(tmp_path))
    PlacedRecord("local", [{"name": "server", "role": "server", **PLACED}]).write(tmp_path)
    assert [row[0] for row in RunStatus.read(str(tmp_path)).rows()] == ["server"]  # the trainer loads a model
    (tmp_path / "place.json").unlink()
    record = {"run": "r", "data": {"store": None}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    status = RunStatus.read(str(tmp_path))
    assert (status.rows(), status.sentence()) == ([], "nothing was published yet")
