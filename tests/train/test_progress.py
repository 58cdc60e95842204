"""What a run says: a line per step, on a terminal the stage that it is in, and to trackers, which get every
step's numbers and of which none stops a run."""

from __future__ import annotations

import importlib.util
import io
import math
import os
import pty
import sqlite3
import sys
import threading
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import forked
import pytest
from tiny_runs import metrics, run_tiny, tiny, weights, write_prompts, write_toml

from agro.errors import Refused
from agro.runs.progress import RunActivity, responses_text
from agro.runs.rundata import empty_metrics
from agro.runs.track import Trackers
from agro.types import Sample


def row(step: int, **known) -> dict:
    """A step of 2 s at 500 tokens/s, but for what is `known`."""
    usual = {"phase": "onpolicy", "loss": 0.25, "reward_mean": 0.5, "kl_ref": 1.5, "dropped": 0, "skipped": 0}
    return empty_metrics() | usual | {"step": step, "seconds": 2.0, "tokens_per_second": 500.0} | known


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """One that can redraw, 40 columns wide."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    return Terminal()


def test_plain_lines() -> None:
    out = io.StringIO()
    activity = RunActivity(60, stream=out)
    activity.stage("sampling", 3, 64)
    activity.step(row(12, eval_reward=0.75, eval_reward_se=0.01))
    activity.step(row(13, dropped=2, dropped_reasons={"too long": 2}, reward_mean=None))
    assert out.getvalue() == (
        # 48 · 2 s
        "onpolicy 12/60  loss 0.25  reward 0.5  KL 1.5  500 tok/s  1:36 left  held-out 0.750 ± 0.010\n"
        "onpolicy 13/60  loss 0.25  reward –  KL 1.5  500 tok/s  1:34 left  dropped 2 (too long)\n"
    )


def test_a_terminal_has_the_stage_below_what_is_said(terminal: Terminal) -> None:
    """The cursor stays behind the stage, whose line is cleared before anything else."""
    activity = RunActivity(60, stream=terminal)
    activity.stage("sampling", 37, 64)
    activity.say("update [red]skipped\x1b[31m")
    activity.stage("scoring")
    activity.stage("waiting for " + "x" * 40, 3)
    activity.close()
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines[1:4] == ["sampling 37/64", "update [red]skipped\\x1b[31m\n", "scoring"]
    assert lines[4:] == ["waiting for " + "x" * 27, ""]


def test_a_new_stage_is_drawn_at_once_and_its_counts_now_and_then(terminal: Terminal, monkeypatch) -> None:
    """Else a long stage that begins right after another would stand under the other's name."""
    now = [100.0]
    monkeypatch.setattr("agro.runs.progress.time.monotonic", lambda: now[0])
    activity = RunActivity(60, stream=terminal)
    for i in range(64):
        activity.stage("sampling", i, 64)
    activity.stage("scoring")
    now[0] += 1
    activity.stage("scoring", 1, 2)
    assert terminal.getvalue().split("\r\x1b[K")[1:] == ["sampling 0/64", "scoring", "scoring 1/2"]


@pytest.mark.parametrize(
    ("stream", "environment", "redraws"),
    [
        (Terminal, {"TERM": "xterm"}, True),
        (io.StringIO, {"TERM": "xterm"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (Terminal, {}, False),
        (Terminal, {"TERM": "xterm", "NO_COLOR": "1"}, False),
    ],
)
def test_a_stage_needs_a_terminal_that_can_redraw(monkeypatch, stream, environment, redraws) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out = stream()
    RunActivity(60, stream=out).stage("sampling")
    assert bool(out.getvalue()) == redraws


def test_responses_shown_are_the_best_and_the_worst_and_harmless() -> None:
    samples = [
        Sample("p", "middle", 0.5),
        Sample([{"role": "user", "content": "q"}], "best\n\x1b[31m[red]", 1.0, source="policy"),
        Sample("p", "worst", -1.0),
        Sample("p", "unscored"),
    ]
    assert responses_text(7, samples) == (
        "step 7, reward 1, policy\n  prompt    user: q\n  response  best\n            \\x1b[31m[red]\n"
        "step 7, reward -1, log\n  prompt    p\n  response  worst"
    )
    assert responses_text(7, [samples[0]]).count("step 7") == 1
    assert "reward unknown" in responses_text(7, [samples[3]])


def test_show_every_shows_and_changes_nothing(tmp_path: Path, capsys) -> None:
    plain = run_tiny(tmp_path, "plain")
    assert "response  " not in capsys.readouterr().err
    shown = run_tiny(tmp_path, "shown", train__show_every=2)
    err = capsys.readouterr().err
    assert [f"\nstep {s}, reward" in err for s in range(1, 7)] == [False, True] * 3
    assert weights(plain) == weights(shown)
    run_tiny(tmp_path, "shown", resume=True)  # it may change on the way


def test_a_run_on_a_terminal(tmp_path: Path) -> None:
    """A real pseudo-terminal: the stage is redrawn in place, and its line is cleared at the end."""
    config = tiny(tmp_path, data__eval_prompts=write_prompts(tmp_path / "held.jsonl", range(100, 110)))
    ours, theirs = pty.openpty()
    said = bytearray()

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while part := os.read(ours, 65536):
                said.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    file = write_toml(tmp_path / "c.json", config)
    process = forked.Process(
        [sys.executable, "-m", "agro", "train", str(file), "--out", str(tmp_path / "run")],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "NO_COLOR": ""},
        stdout=tmp_path / "stdout",
        stderr=Path(os.ttyname(theirs)),
    )
    code = process.wait(120)
    os.close(theirs)
    reader.join()
    os.close(ours)
    assert code == 0, said.decode()
    assert (tmp_path / "stdout").read_text() == ""
    text = said.decode()
    assert len(metrics(tmp_path / "run")) == 7
    for part in ("sampling 0/12", "scoring", "updating 1/1", "evaluating", "saving", "train 6/6  loss"):
        assert part in text, part
    assert "\x1b[31m" not in text
    assert text.splitlines()[-1].startswith("done: ")


class Stand(ModuleType):
    """Stands for the wandb and trackio modules, and their runs."""

    def __init__(self, name: str, fails_at: int | None) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # other libraries ask whether it can be imported
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


def tracked(tmp_path: Path, name: str = "run", **track) -> Path:
    return run_tiny(tmp_path, name, track=track)


def test_trackers_get_every_step_and_change_no_weights(tmp_path: Path, stand) -> None:
    trackers = [stand(name) for name in ("wandb", "trackio")]
    first = tracked(tmp_path, "first", to=["wandb", "trackio"], project="sums")
    rows = metrics(first)
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
    assert weights(first) == weights(tracked(tmp_path, "plain"))
    run_tiny(tmp_path, "first", resume=True)  # it may change on the way


@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_tracker_that_fails_is_named_once_and_dropped(tmp_path: Path, stand, capsys, fails_at: int) -> None:
    """When it begins, or at a step."""
    failing, working = stand("wandb", fails_at), stand("trackio")
    assert len(metrics(tracked(tmp_path, to=["wandb", "trackio"]))) == 6
    err = capsys.readouterr().err
    assert err.count("tracker wandb failed and is dropped; the run continues: ConnectionError: no route") == 1
    assert [step for step, _ in failing.logged] == list(range(1, fails_at))
    assert len(working.logged) == 6


def test_a_tracker_that_is_not_installed_is_refused_at_the_start(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what makes an import fail
    with pytest.raises(Refused, match=r"wandb can't be imported .*pip install wandb"):
        tracked(tmp_path, to=["wandb"])
    assert not (tmp_path / "run").exists()


def test_trackers_get_finite_numbers_alone() -> None:
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

    folder = tracked(tmp_path, to=["tensorboard"])
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    read = [(e.step, e.value) for e in events.Scalars("reward_mean")]
    assert read == [(m["step"], pytest.approx(m["reward_mean"], rel=1e-6)) for m in metrics(folder)]


def test_wandb_itself_offline(tmp_path: Path, monkeypatch, capsys) -> None:
    installed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tracked(tmp_path, to=["wandb"])
    assert "failed" not in capsys.readouterr().err
    [record] = folder.glob("wandb/offline-run-*/*.wandb")
    assert b"reward_mean" in record.read_bytes()


def test_trackio_itself(tmp_path: Path, monkeypatch, capsys) -> None:
    installed("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    tracked(tmp_path, to=["trackio"], project="sums")
    assert "failed" not in capsys.readouterr().err
    with sqlite3.connect(tmp_path / "trackio" / "sums.db") as connection:
        assert connection.execute("SELECT count(*) FROM metrics").fetchall() == [(6,)]
