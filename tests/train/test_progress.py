"""What a run says: plain lines anywhere, a display on a terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import metrics, tiny, weights, write_prompts, write_toml

from agro.api.reporting_trainer import Trainer
from agro.runs.metrics import empty_metrics
from agro.runs.progress import Display, Progress, responses_text
from agro.types import Sample


def row(step: int, **known) -> dict:
    """A step of 2 s at 500 tokens/s, but for what is `known`."""
    usual = {
        "phase": "onpolicy",
        "loss": 0.25,
        "reward_mean": 0.5,
        "kl_ref": 1.5,
        "seconds": 2.0,
        "tokens_per_second": 500.0,
    }
    return empty_metrics() | usual | {"dropped": 0, "skipped": 0, "step": step} | known


def shown(store: Path, width: int = 120) -> tuple[Display, Console]:
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, record=True, markup=False, _environ={}
    )
    return Display(60, store, console), console


def picture(display: Display, width: int = 120) -> str:
    """What stands in the display now."""
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(display.live.get_renderable())
    return console.export_text()


def test_plain_lines() -> None:
    out = io.StringIO()
    progress = Progress(60, out)
    progress.stage("sampling", 3, 64)
    progress.step(row(12, eval_reward=0.75, eval_reward_se=0.01))
    progress.step(row(13, dropped=2, dropped_reasons={"too long": 2}, reward_mean=None))
    assert out.getvalue() == (
        # 48 · 2 s
        "onpolicy 12/60  loss 0.25  reward 0.5  KL 1.5  500 tok/s  1:36 left  held-out 0.750 ± 0.010\n"
        "onpolicy 13/60  loss 0.25  reward –  KL 1.5  500 tok/s  1:34 left  dropped 2 (too long)\n"
    )


def test_the_display_shows_where_the_run_is(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_bytes(b"x" * 3_000_000)
    (tmp_path / "s.db-wal").write_bytes(b"x" * 1_000_000)
    display, _ = shown(tmp_path / "s.db")
    for step, reward in enumerate((0.0, None, 1.0, 0.5), 1):
        display.step(row(step, reward_mean=reward))
    display.stage("sampling", 37, 64)
    picture_ = picture(display)
    for part in (
        "onpolicy",
        "4/60",
        "1:52 left",
        "reward 0.5",
        "KL 1.5 nats",
        "500 tokens/s",
        "store 4 MB",
        "▁ █▅",
        "sampling 37/64",
    ):
        assert part in picture_, part
    display.stage("scoring")
    assert "sampling" not in picture(display)
    display.stage("waiting for the store", 3)
    assert "waiting for the store 3" in picture(display)
    display.close()


def test_only_what_is_worth_keeping_stands_above_the_display(tmp_path: Path) -> None:
    display, console = shown(tmp_path / "none.db")
    display.step(row(1))
    assert "1/60" not in console.export_text(clear=False).replace("onpolicy  1/60", "")
    display.step(row(2, eval_reward=0.75, eval_reward_se=0.01))
    display.step(row(3, skipped=1))
    display.say("update [red]skipped[/red]")
    said = console.export_text(clear=False)
    assert "onpolicy 2/60  reward 0.5  held-out 0.750 ± 0.010" in said
    assert "onpolicy 3/60  reward 0.5  update skipped" in said
    assert "update [red]skipped[/red]" in said
    assert "store –" in picture(display)  # there is no file yet
    display.close()


def test_a_narrow_terminal_keeps_one_line_a_row(tmp_path: Path) -> None:
    display, _ = shown(tmp_path / "s.db", 40)
    display.step(row(4))
    display.stage("waiting for the store")
    assert all(len(line) <= 40 for line in picture(display, 40).splitlines())
    assert len(picture(display, 40).splitlines()) == 3
    display.close()


def test_a_new_stage_is_drawn_at_once_and_its_counts_now_and_then(tmp_path: Path, monkeypatch) -> None:
    """Else a long stage that begins right after another would stand under the other's name."""
    now = [100.0]
    monkeypatch.setattr("agro.runs.progress.time.monotonic", lambda: now[0])
    display, _ = shown(tmp_path / "s.db")
    drawn = []
    monkeypatch.setattr(display.live, "refresh", lambda: drawn.append(display.stage_text))
    for i in range(64):
        display.stage("sampling", i, 64)
    display.stage("scoring")
    now[0] += 1
    display.stage("scoring", 1, 2)
    assert drawn == ["sampling 0/64", "scoring", "scoring 1/2"]


@pytest.mark.parametrize(
    ("terminal", "environment", "display"),
    [
        (True, {"TERM": "xterm"}, True),
        (False, {"TERM": "xterm"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
    ],
)
def test_a_display_needs_a_terminal_that_can_redraw(
    tmp_path: Path, monkeypatch, terminal: bool, environment: dict, display: bool
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert isinstance(Progress.on(60, tmp_path / "s.db"), Display) == display


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
    Trainer(tiny(tmp_path), tmp_path / "plain").run()
    assert "response  " not in capsys.readouterr().err
    Trainer(tiny(tmp_path, train__show_every=2), tmp_path / "shown").run()
    err = capsys.readouterr().err
    assert [f"\nstep {s}, reward" in err for s in range(1, 7)] == [False, True] * 3
    assert weights(tmp_path / "plain") == weights(tmp_path / "shown")
    Trainer(tiny(tmp_path), tmp_path / "shown", resume=True).run()  # it may change on the way


def test_the_curve_of_a_narrow_terminal_shows_its_newest_end(tmp_path: Path) -> None:
    """Rewards 0, 0, …, 1: the bar of the last one is there at every width."""
    for width in (60, 70, 120):
        console = Console(file=io.StringIO(), width=width, force_terminal=True)
        display = Display(40, tmp_path / "none.db", console)
        for step in range(1, 41):
            row = {"phase": "train", "step": step, "seconds": 1.0, "dropped": 0, "skipped": 0}
            display.step({**row, "reward_mean": float(step == 40), "loss": 0.1, "kl_ref": 0.1})
        line = display._numbers()
        display.close()
        assert line.cell_len <= width
        assert line.plain.endswith("▁█"), line.plain


def test_a_run_on_a_terminal(tmp_path: Path) -> None:
    """A real pseudo-terminal: the display is redrawn in place, and the terminal is left as it was."""
    config = tiny(tmp_path, data__eval_prompts=write_prompts(tmp_path / "held.jsonl", range(100, 110)))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "NO_COLOR": ""}
    command = [
        sys.executable,
        "-m",
        "agro",
        "train",
        str(write_toml(tmp_path / "c.json", config)),
        "--out",
        str(tmp_path / "run"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 65536):
                said += part
        except OSError:  # the other end is closed
            pass
        os.close(ours)
        assert process.stdout is not None
        assert process.stdout.read() == b""
    assert process.returncode == 0
    text = said.decode()
    assert len(metrics(tmp_path / "run")) == 7
    for part in ("sampling 0/12", "scoring", "updating 1/1", "evaluating", "saving", "train 6/6  reward"):
        assert part in text, part
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, and shown again
