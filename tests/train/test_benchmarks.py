"""The programs of benchmarks/: that of a GPU on the CPU with tiny shapes, the rule of `make bench-check`, and
the clock and page of `make leaderboard`.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiers import some

from benchmarks import gpu
from benchmarks.step import run as step

ROOT = Path(__file__).resolve().parents[2]
PARTS = ROOT / "benchmarks/on_gpu"
SMALL = ("--small", "--device", "cpu", "--within", "60")


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_parts_fit_into_the_time_that_a_command_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten minutes a command, less one for starting and for copying the results."""
    assert sum(gpu.PARTS.values()) <= 540
    assert next(iter(gpu.PARTS)) == "start"
    assert gpu.PARTS["start"] <= 40
    for name in gpu.PARTS:
        assert (PARTS / f"{name}.py").exists()
        assert f"| {name} | {gpu.PARTS[name]} |" in gpu.__doc__
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--within", "539"])
    assert ended.value.code == 2
    assert "expected --within 540 or more" in capsys.readouterr().err


@pytest.mark.parametrize("name", some(["start", "correct", "fast", "learns"], every=4))
def test_a_part_runs_with_tiny_shapes(tmp_path: Path, name: str) -> None:
    command = [sys.executable, ROOT / "benchmarks/gpu.py", *SMALL, "--out", tmp_path, "--parts", name]
    done = subprocess.run([*command, "--commit", "abc"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (tmp_path / "log.txt").read_text()[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["commit"] == "abc"
    assert [row["ended"] for row in result["parts"]] == ["well"]
    content = json.loads((tmp_path / f"{name}.json").read_text())
    assert not any("failed" in row for row in content["rows"])
    files = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert len(files) <= 4  # of all parts eight at most
    assert all(f.parent == tmp_path and f.stat().st_size < 16 << 20 for f in files)
    if name == "learns":
        from benchmarks.on_gpu.learns import ARMS

        assert sorted(run["arm"] for run in content["runs"]) == sorted(arm.name for arm in ARMS)
        assert all([p["update"] for p in run["curve"]] == [0, 2] for run in content["runs"])
        assert (tmp_path / "learns.svg").exists()


def test_a_missing_package_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the parts' own code; it is asked for one module, since others take seconds to import."""
    from benchmarks.on_gpu.start import PACKAGES

    assert "ijson" in PACKAGES["modules"]
    write(tmp_path / "ijson/__init__.py", "raise ImportError('no wheel')")
    shutil.copytree(PARTS, tmp_path / "benchmarks/on_gpu")
    write(tmp_path / "benchmarks/on_gpu/packages.toml", 'modules = ["ijson"]\nlisted = []\n')
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert gpu.main([*SMALL, "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "the other parts aren't tried"
    [row] = json.loads((tmp_path / "out/start.json").read_text())["rows"]
    assert "no wheel" in row["missing"]["ijson"]
    assert len(json.loads((tmp_path / "out/result.json").read_text())["parts"]) == 1


def test_a_part_that_runs_out_of_time_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it printed and wrote until then is there, and the next part has its own time."""
    endless = "import subprocess, time\nprint('begun')\nsubprocess.Popen(['sleep', '98.7'])\ntime.sleep(99)\n"
    write(tmp_path / "benchmarks/on_gpu/fast.py", endless)
    write(tmp_path / "benchmarks/on_gpu/learns.py", "print('ended')\n")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "PARTS", {"start": 1, "fast": 2, "learns": 5})
    began, out = time.monotonic(), tmp_path / "out"
    assert gpu.main(["--within", "20", "--parts", "fast", "learns", "--out", str(out)]) == 1
    assert time.monotonic() - began < 15
    result = json.loads((out / "result.json").read_text())
    assert [row["ended"] for row in result["parts"]] == ["out of time after 2 s", "well"]
    assert result["commit"] is None  # there is no .git
    assert (out / "log.txt").read_text() == "== fast\nbegun\n\n== learns\nended\n\n"
    commands = [f.read_bytes() for f in Path("/proc").glob("[0-9]*/cmdline") if f.exists()]
    assert not any(b"98.7" in command for command in commands)


def test_the_commit_is_read_without_git(tmp_path: Path) -> None:
    assert gpu.commit_of(tmp_path) is None
    git, tree = tmp_path / ".git", tmp_path / "tree"
    for name, text, commit in (
        ("HEAD", "ref: refs/heads/main\n", None),
        ("packed-refs", "# pack-refs\n1111 refs/heads/main\n", "1111"),
        ("refs/heads/main", "2222\n", "2222"),
        ("HEAD", "3333\n", "3333"),
    ):
        write(git / name, text)
        assert gpu.commit_of(tmp_path) == commit
    write(tree / ".git", f"gitdir: {git}/worktrees/tree\n")
    write(git / "worktrees/tree/HEAD", "ref: refs/heads/main\n")
    write(git / "worktrees/tree/commondir", "../..\n")
    assert gpu.commit_of(tree) == "2222"


def test_a_lesson_multiplies_by_hand() -> None:
    from benchmarks.on_gpu import task

    text = task.lesson("347*58=", random.Random(0), slip=0.0)
    assert text == "300*50=15000,40*50=2000,7*50=350:17350;300*8=2400,40*8=320,7*8=56:2776;20126"  # by hand
    assert task.is_right(text, task.answer("347*58="))
    assert not task.is_right(text[:-1], "20126")
    rng = random.Random(0)
    taught = task.prompts([500])[0]
    right = [task.is_right(task.lesson(prompt, rng), task.answer(prompt)) for prompt in taught]
    assert 0.3 < sum(right) / len(right) < 0.5
    assert max(len(task.lesson("999*99=", rng)) for _ in range(20)) < task.NEW
    assert 1 + len("999*99=") + task.NEW <= task.CONTEXT


def test_the_operations_of_a_step() -> None:
    """Six for each of the weights and tokens, and 3 · 2 · layers · heads · width · tokens² of attention."""
    from benchmarks.on_gpu import fast

    policy = fast.model_of("0.6B, all weights", torch.device("cpu"), small=True)
    count = sum(p.numel() for p in policy.model.parameters())
    assert fast.operations(policy, 3, 10) == 3 * (10 * 6 * count + 3 * 2 * 2 * 4 * 8 * 10**2)


def test_a_wrong_number_isnt_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of `correct` fail where log-probs are off by 2e-4 nats, or a gradient by a thousandth."""
    from benchmarks.on_gpu import common, correct

    def second(name: str, change: Any) -> None:
        """Change what the second call of this function returns."""
        exact, calls = getattr(correct, name), itertools.count()

        def called(*args: Any, **options: Any) -> Any:
            first, rest = exact(*args, **options)
            return (change(first) if next(calls) == 1 else first), rest

        monkeypatch.setattr(correct, name, called)

    asked = common.Asked(torch.device("cpu"), Path(), time.monotonic() + 60, small=True)
    assert [row.get("within", True) for row in correct.numbers(asked)] == [True] * 3
    second("logp_and_gradient", lambda logp: logp + 2e-4)
    assert correct.numbers(asked)[0]["within"] is False
    second("steps_of", lambda gradient: gradient * 1.001)
    assert correct.savers(asked)["within"] is False


CASE = "head float32"


@pytest.fixture
def _record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1.25 times the plain way's speed, by the pairs (2, 2.5)."""
    row = {"name": CASE, "machine": "CPU, 2 cores, torch 1", "commit": "abc"}
    (tmp_path / "step.json").write_text(json.dumps([{**row, "ours": [2.0] * 5, "peer": [2.5] * 5}]))
    monkeypatch.setattr(step, "RESULTS", tmp_path / "step.json")
    monkeypatch.setattr(step.recording, "machine_of_models", lambda: "CPU, 2 cores, torch 2")


def checked(monkeypatch: pytest.MonkeyPatch, *runs: list[float], more: tuple[str, ...] = ()) -> int:
    """Of runs in turn, each our seconds beside 2.5 of the plain way."""
    left = [{"ours": run, "peer": [2.5] * len(run)} for run in runs]
    monkeypatch.setattr(step, "measured", lambda *_: left.pop(0))
    monkeypatch.setattr(sys, "argv", ["run.py", "--check", "--cases", CASE, *more])
    result = step.main()
    assert not left
    return result


@pytest.mark.usefixtures("_record")
def test_six_percent_slower_fails_and_four_dont(monkeypatch, capsys) -> None:
    """2 s became 2.128 and 2.08, the plain way stayed; what fails is measured twice."""
    assert checked(monkeypatch, [2.128] * 5, [2.128] * 5) == 1
    said = "1.17 times as fast as the plain way, before 1.25, 10 turns: more than 5% slower"
    assert said in capsys.readouterr().out
    assert checked(monkeypatch, [2.08] * 5) == 0


@pytest.mark.usefixtures("_record")
def test_what_a_repetition_doesnt_show_one_slow_turn_and_a_machine_of_half_the_speed_pass(
    monkeypatch,
) -> None:
    assert checked(monkeypatch, [2.2, 2.2, 2.2, 2.0, 2.0], [2.0] * 5) == 0
    assert checked(monkeypatch, [2.0, 2.0, 9.0, 2.0, 2.0]) == 0
    now = {"ours": [4.0, 4.2, 4.0], "peer": [5.0, 5.25, 5.0]}
    assert not step.is_slower(now, {"ours": [2.0], "peer": [2.5]})


@pytest.mark.usefixtures("_record")
def test_another_checkout_is_measured_in_the_same_run(monkeypatch, tmp_path) -> None:
    """It first: ours took 1.8 s there, 2 here."""
    assert checked(monkeypatch, [1.8], [2.0], [2.0], more=("--before", str(tmp_path))) == 1


@pytest.mark.nightly
def test_the_other_checkout_is_what_is_imported(tmp_path) -> None:
    write(tmp_path / "agro/__init__.py", "raise SystemExit(7)")
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        step.measured(CASE, 1, tmp_path, ["ours"], tmp_path)
    assert stopped.value.returncode == 7


@pytest.mark.usefixtures("_record")
def test_an_unknown_kind_of_machine_is_said(monkeypatch, capsys) -> None:
    monkeypatch.setattr(step.recording, "machine_of_models", lambda: "CPU, 64 cores, torch 2")
    assert checked(monkeypatch) == 0
    assert "not compared: step.json has no row of CPU, 64 cores" in capsys.readouterr().out


def test_minutes_are_those_of_updates_until_a_measurement_reaches_it(monkeypatch) -> None:
    """An update takes 6 s, a measurement of accuracy 100 s; it rises by .25 an update from .4.

    .9 is reached by the second update, 12 s; measured every third one, 18 s; else it is unknown.
    """
    from benchmarks.leaderboard import clock

    now = SimpleNamespace(seconds=0.0)

    def measured(model: float, *_: object) -> float:
        now.seconds += 100.0
        return model

    monkeypatch.setattr(clock, "time", SimpleNamespace(process_time=lambda: now.seconds))
    monkeypatch.setattr(clock, "accuracy", measured)
    for updates, every, minutes in ((3, 1, 0.2), (4, 3, 0.3), (1, 1, None)):
        made = clock.Clock({"every": every})
        for update in range(updates + 1):
            now.seconds += 6.0 if update else 0.0
            made.after(update, 0.4 + 0.25 * update, None)
        assert made.result()["minutes"] == pytest.approx(minutes)


def test_the_quickest_that_always_arrives_is_first_on_a_page_of_the_results(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the program adds to it
    from benchmarks.leaderboard import run as board

    rest = {"job": "sums", "settings": "", "commit": "abc", "date": "2026-11-28", "machine": "CPU"}
    times = {"sometimes": [0.1, None], "slow": [2.0, 2.5], "quick": [1.0, 1.5], "not": [None, None]}
    rows = [{**rest, "final": [0.9], "method": name, "ours": ours} for name, ours in times.items()]
    lines = [line for line in board.page(rows).splitlines() if line.startswith("| sums")]
    assert [line.split(" | ")[1] for line in lines] == ["quick", "slow", "sometimes", "not"]
    assert "| 0.10, never |" in lines[2]
    recorded = json.loads(board.RESULTS.read_text())
    before, made, end = (board.HERE / "README.md").read_text(encoding="utf-8").partition(board.page(recorded))
    assert before.endswith("<!-- begin: made by run.py -->\n\n")
    assert made
    assert end.startswith("\n\n<!-- end: made by run.py -->")
