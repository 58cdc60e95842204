"""`agro train CONFIG --place local:2`: a run of several processes, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forked
import pytest
from test_elsewhere import check
from tiny_runs import done, tiny, write_prompts, write_toml

from agro.cli.runs import ps
from agro.errors import Refused
from agro.pages.run import report
from agro.pages.run.live import LivePage
from agro.place import supervisor
from agro.place.placement import PlacedProcess, PlacedRecord, Placement, TrainCommand, log_file
from agro.place.supervisor import place

STEPS = 8


class ForkedProcess:
    """A fork of a process that has the libraries loaded: the tests aren't about how long Python starts."""

    host = "here"

    def __init__(self, argv: list[str], environment: Mapping[str, str], log: Path) -> None:
        self._process = forked.Process(argv, env=environment, stdout=log, stderr=log)

    @property
    def pid(self) -> int | None:
        return self._process._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)


def forking(logs: Path, environment: Mapping[str, str]) -> Any:
    def launch(process: PlacedProcess, again: bool) -> ForkedProcess:
        variables = {**os.environ, **environment}
        return ForkedProcess(process.argv(sys.executable, again), variables, log_file(logs, process))

    return launch


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "launch_here", forking)


def command(folder: Path, **changes: object) -> TrainCommand:
    held_out = write_prompts(folder / "held.jsonl", range(60, 70))
    changes = {"data__max_age": 2, **changes}
    made = tiny(folder, data__eval_prompts=held_out, train__steps=STEPS, **changes)
    return TrainCommand(write_toml(folder / "recipe.json", made), (), folder / "run")


def processes(run: Path) -> dict[str, dict[str, Any]]:
    """What is recorded of each, by its name."""
    placed = PlacedRecord.read(run)
    assert placed is not None
    return {process["name"]: process for process in placed.processes}


def kill_at(run: Path, steps: Mapping[int, str]) -> threading.Thread:
    """Kill a process when the run has come to a step."""

    def work() -> None:
        for step, name in steps.items():
            while done(run) < step:
                time.sleep(0.05)
            os.kill(int(processes(run)[name]["pid"]), signal.SIGKILL)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("store", ["file", "postgres"])
def test_a_run_goes_on_when_its_processes_die(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: str, request: pytest.FixtureRequest
) -> None:
    run = tmp_path / "run"
    url = request.getfixturevalue("postgres_url") if store == "postgres" else None
    killer = kill_at(run, {2: "collector-1", 5: "trainer"})
    assert place(Placement.parse("local:2"), command(tmp_path, data__store=url)) == 0
    killer.join()
    check(run, STEPS, url)
    said = capsys.readouterr().err
    assert "note: --place local:2: 2 other processes sample" in said
    for name in ("collector-1", "trainer"):
        assert f"{name} (pid " in said
        assert f"{name} is started again (pid " in said
    assert (run / "model" / "model.safetensors").exists()

    ps(str(run), as_json=True)
    status = json.loads(capsys.readouterr().out)
    version = status["published"]["version"]
    assert version >= STEPS  # steps that the killed trainer lost have versions that are never used again
    assert status["published"] == {"version": version, "phase": "train", "step": STEPS, "ended": True}
    trainer, first, second = status["processes"]
    assert [each["name"] for each in (trainer, first, second)] == ["trainer", "collector-1", "collector-2"]
    assert [each["restarts"] for each in (trainer, first, second)] == [1, 1, 0]
    assert (trainer["step"], trainer["version"], second["ended"]) == (STEPS, version, "done")

    ps(str(run))
    table = capsys.readouterr().out
    assert f"done, step {STEPS}" in table
    assert f"newest weights: version {version}, after step {STEPS}; the run has ended" in table
    text, _ = LivePage(run).current()
    assert "<h2>Processes</h2>" in text
    assert "started again once" in text
    assert "</html>" in report(run).read_text()  # its processes draw none; see forked.py

    with pytest.raises(Refused, match="a run in this folder; continue it with the same command and --resume"):
        place(Placement.parse("local:2"), command(tmp_path))


@pytest.mark.nightly
def test_with_one_collector_and_no_staleness_a_run_repeats_bit_for_bit(tmp_path: Path) -> None:
    """Also where both processes are killed on the way."""
    models = []
    kills = {2: "collector-1", 5: "trainer"}
    for name, killed, restarts in (("undisturbed", {}, [0, 0]), ("killed", kills, [1, 1])):
        folder = tmp_path / name
        folder.mkdir()
        killer = kill_at(folder / "run", killed)
        assert place(Placement.parse("local:1"), command(folder, data__max_age=0)) == 0
        killer.join()
        models.append((folder / "run" / "model" / "model.safetensors").read_bytes())
        assert [process["restarts"] for process in processes(folder / "run").values()] == restarts
    assert models[0] == models[1]


def test_what_the_trainer_refuses_ends_all(tmp_path: Path) -> None:
    """The prompts aren't there."""
    made = command(tmp_path)
    (tmp_path / "prompts.jsonl").unlink()
    assert place(Placement.parse("local:1"), made) == 2
    assert [process["ended"] for process in processes(tmp_path / "run").values()] == ["refused", "stopped"]
    assert "prompts.jsonl" in (tmp_path / "run" / "logs" / "trainer.log").read_text()
