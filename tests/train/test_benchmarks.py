"""The programs of benchmarks/: that of a GPU on the CPU with tiny shapes, the rule of `make bench-check`, and
the clock and page of `make leaderboard`.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiers import some

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, as a module."""
    monkeypatch.syspath_prepend(str(ROOT))
    return import_module("benchmarks.gpu")


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: the name of a part -> its module."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: import_module(f"benchmarks.on_gpu.{name}")


def test_the_parts_fit_into_the_time_that_a_command_has(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten minutes a command, less one for starting and for copying the results."""
    assert sum(gpu.PARTS.values()) <= 540
    assert next(iter(gpu.PARTS)) == "start"
    assert gpu.PARTS["start"] <= 40
    for name in gpu.PARTS:
        assert (ROOT / f"benchmarks/on_gpu/{name}.py").exists()
        assert f"| {name} | {gpu.PARTS[name]} |" in gpu.__doc__
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--within", "539"])
    assert ended.value.code == 2
    assert "expected --within 540 or more" in capsys.readouterr().err


@pytest.mark.parametrize("name", some(["start", "correct", "fast", "learns"], every=4))
def test_a_part_runs_with_tiny_shapes(tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--within", "60", "--small"]
    command += ["--device", "cpu", "--out", str(tmp_path), "--parts", name, "--commit", "abc"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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
        arms = [run["arm"] for run in content["runs"]]
        assert sorted(arms) == sorted(arm.name for arm in import_module("benchmarks.on_gpu.learns").ARMS)
        assert all([p["update"] for p in run["curve"]] == [0, 2] for run in content["runs"])
        assert (tmp_path / "learns.svg").exists()


def test_a_missing_package_ends_it_at_once(
    gpu: Any, part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the parts' own code; it is asked for one module, since others take seconds to import."""
    (tmp_path / "ijson").mkdir()
    (tmp_path / "ijson/__init__.py").write_text("raise ImportError('no wheel')")
    shutil.copytree(ROOT / "benchmarks/on_gpu", tmp_path / "benchmarks/on_gpu")
    (tmp_path / "benchmarks/on_gpu/packages.toml").write_text('modules = ["ijson"]\nlisted = []\n')
    out = tmp_path / "out"
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert "ijson" in part("start").PACKAGES["modules"]
    assert gpu.main(["--small", "--device", "cpu", "--within", "60", "--out", str(out)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "the other parts aren't tried"
    [row] = json.loads((out / "start.json").read_text())["rows"]
    assert "no wheel" in row["missing"]["ijson"]
    assert len(json.loads((out / "result.json").read_text())["parts"]) == 1


def test_a_part_that_runs_out_of_time_is_ended_with_its_children(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it printed and wrote until then is there, and the next part has its own time."""
    fake = tmp_path / "benchmarks/on_gpu"
    fake.mkdir(parents=True)
    (fake / "fast.py").write_text(
        "import subprocess, time\nprint('begun')\nsubprocess.Popen(['sleep', '98.7'])\ntime.sleep(99)\n"
    )
    (fake / "learns.py").write_text("print('ended')\n")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "PARTS", {"start": 1, "fast": 2, "learns": 5})
    began = time.monotonic()
    out = tmp_path / "out"
    assert gpu.main(["--within", "20", "--parts", "fast", "learns", "--out", str(out)]) == 1
    assert time.monotonic() - began < 15
    result = json.loads((out / "result.json").read_text())
    assert [row["ended"] for row in result["parts"]] == ["out of time after 2 s", "well"]
    assert result["commit"] is None  # there is no .git
    assert (out / "log.txt").read_text() == "== fast\nbegun\n\n== learns\nended\n\n"
    commands = [f.read_bytes() for f in Path("/proc").glob("[0-9]*/cmdline") if f.exists()]
    assert not any(b"98.7" in command for command in commands)


def test_the_commit_is_read_without_git(gpu: Any, tmp_path: Path) -> None:
    assert gpu.commit_of(tmp_path) is None
    git = tmp_path / ".git"
    git.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\n1111 refs/heads/main\n")
    assert gpu.commit_of(tmp_path) == "1111"
    (git / "refs/heads").mkdir(parents=True)
    (git / "refs/heads/main").write_text("2222\n")
    assert gpu.commit_of(tmp_path) == "2222"
    (git / "HEAD").write_text("3333\n")
    assert gpu.commit_of(tmp_path) == "3333"
    tree, of_tree = tmp_path / "tree", git / "worktrees/tree"
    tree.mkdir()
    of_tree.mkdir(parents=True)
    (tree / ".git").write_text(f"gitdir: {of_tree}\n")
    (of_tree / "HEAD").write_text("ref: refs/heads/main\n")
    (of_tree / "commondir").write_text("../..\n")
    assert gpu.commit_of(tree) == "2222"


def test_a_lesson_multiplies_by_hand(part: Any) -> None:
    task = part("task")
    text = task.lesson("347*58=", random.Random(0), slip=0.0)
    assert text == ("300*50=15000,40*50=2000,7*50=350:17350;300*8=2400,40*8=320,7*8=56:2776;20126")  # by hand
    assert task.is_right(text, task.answer("347*58="))
    assert not task.is_right(text[:-1], "20126")
    rng = random.Random(0)
    taught = task.prompts([500])[0]
    right = [task.is_right(task.lesson(prompt, rng), task.answer(prompt)) for prompt in taught]
    assert 0.3 < sum(right) / len(right) < 0.5
    longest = max(len(task.lesson("999*99=", rng)) for _ in range(20))
    assert longest < task.NEW
    assert 1 + len("999*99=") + task.NEW <= task.CONTEXT


def test_the_operations_of_a_step(part: Any) -> None:
    """Six for each of the weights and tokens, and 3 · 2 · layers · heads · width · tokens² of attention."""
    fast = part("fast")
    policy = fast.model_of("0.6B, all weights", torch.device("cpu"), small=True)
    count = sum(p.numel() for p in policy.model.parameters())
    assert fast.operations(policy, 3, 10) == 3 * (10 * 6 * count + 3 * 2 * 2 * 4 * 8 * 10**2)


def test_a_wrong_number_isnt_within(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of `correct` fail where log-probs are off by 2e-4 nats, or a gradient by a thousandth."""
    correct, common = part("correct"), part("common")
    asked = common.Asked(torch.device("cpu"), Path(), time.monotonic() + 60, small=True)
    assert [row.get("within", True) for row in correct.numbers(asked)] == [True] * 3
    calls, exact = [], correct.logp_and_gradient

    def off(policy: Any, tokens: Any, lengths: Any) -> Any:
        calls.append(policy)
        logp, gradient = exact(policy, tokens, lengths)
        return (logp + 2e-4, gradient) if len(calls) == 2 else (logp, gradient)

    monkeypatch.setattr(correct, "logp_and_gradient", off)
    assert correct.numbers(asked)[0]["within"] is False
    steps, first = correct.steps_of, []

    def scaled(*args: Any, **options: Any) -> Any:
        first.append(args)
        gradient, weights = steps(*args, **options)
        return (gradient * 1.001, weights) if len(first) == 2 else (gradient, weights)

    monkeypatch.setattr(correct, "steps_of", scaled)
    assert correct.savers(asked)["within"] is False


CASE = "head float32"


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """With a record of 1.25 times the plain way's speed, by the pairs (2, 2.5)."""
    spec = importlib.util.spec_from_file_location("step_benchmark", ROOT / "benchmarks/step/run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row = {
        "name": CASE,
        "machine": "CPU, 2 cores, torch 1",
        "commit": "abc",
        "ours": [2.0] * 5,
        "peer": [2.5] * 5,
    }
    (tmp_path / "step.json").write_text(json.dumps([row]))
    monkeypatch.setattr(module, "RESULTS", tmp_path / "step.json")
    monkeypatch.setattr(module.recording, "machine_of_models", lambda: "CPU, 2 cores, torch 2")
    return module


def checked(benchmark, monkeypatch, *runs: list[float], more: tuple[str, ...] = ()) -> int:
    """Of runs in turn, each our seconds beside 2.5 of the plain way."""
    left = iter(runs)
    measured = lambda *_: {"ours": (found := next(left)), "peer": [2.5] * len(found)}  # noqa: E731
    monkeypatch.setattr(benchmark, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["run.py", "--check", "--cases", CASE, *more])
    result = benchmark.main()
    assert next(left, None) is None
    return result


def test_six_percent_slower_fails_and_four_dont(benchmark, monkeypatch, capsys) -> None:
    """2 s became 2.128 and 2.08, the plain way stayed; what fails is measured twice."""
    assert checked(benchmark, monkeypatch, [2.128] * 5, [2.128] * 5) == 1
    assert (
        "1.17 times as fast as the plain way, before 1.25, 10 turns: more than 5% slower"
        in capsys.readouterr().out
    )
    assert checked(benchmark, monkeypatch, [2.08] * 5) == 0


def test_what_a_repetition_doesnt_show_one_slow_turn_and_a_machine_of_half_the_speed_pass(
    benchmark, monkeypatch
) -> None:
    assert checked(benchmark, monkeypatch, [2.2, 2.2, 2.2, 2.0, 2.0], [2.0] * 5) == 0
    assert checked(benchmark, monkeypatch, [2.0, 2.0, 9.0, 2.0, 2.0]) == 0
    now = {"ours": [4.0, 4.2, 4.0], "peer": [5.0, 5.25, 5.0]}
    assert not benchmark.is_slower(now, {"ours": [2.0], "peer": [2.5]})


def test_another_checkout_is_measured_in_the_same_run(benchmark, monkeypatch, tmp_path) -> None:
    """It first: ours took 1.8 s there, 2 here."""
    assert checked(benchmark, monkeypatch, [1.8], [2.0], [2.0], more=("--before", str(tmp_path))) == 1


@pytest.mark.nightly
def test_the_other_checkout_is_what_is_imported(benchmark, tmp_path) -> None:
    (tmp_path / "agro").mkdir()
    (tmp_path / "agro/__init__.py").write_text("raise SystemExit(7)")
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        benchmark.measured(CASE, 1, tmp_path, ["ours"], tmp_path)
    assert stopped.value.returncode == 7


def test_an_unknown_kind_of_machine_is_said(benchmark, monkeypatch, capsys) -> None:
    monkeypatch.setattr(benchmark.recording, "machine_of_models", lambda: "CPU, 64 cores, torch 2")
    assert checked(benchmark, monkeypatch) == 0
    assert "not compared: step.json has no row of CPU, 64 cores" in capsys.readouterr().out


FOLDER = Path(__file__).parents[2] / "benchmarks/leaderboard"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clock(monkeypatch):
    """An update takes 6 s, a measurement of accuracy 100 s; it rises by .25 an update from .4."""
    module = load("clock")
    now = [0.0]
    monkeypatch.setattr(module, "time", type("Time", (), {"process_time": staticmethod(lambda: now[0])}))

    def measured(model: float, *_: object) -> float:
        now[0] += 100.0
        return model

    monkeypatch.setattr(module, "accuracy", measured)

    def run(updates: int, every: int) -> dict:
        found = module.Clock({"every": every})
        for update in range(updates + 1):
            now[0] += 6.0 if update else 0.0
            found.after(update, 0.4 + 0.25 * update, None)
        return found.result()

    return run


def test_minutes_are_those_of_updates_until_a_measurement_reaches_it(clock) -> None:
    """.9 is reached by the second update, 12 s; measured every third one, 18 s; else it is unknown."""
    assert clock(3, 1)["minutes"] == pytest.approx(0.2)
    assert clock(4, 3)["minutes"] == pytest.approx(0.3)
    assert clock(1, 1)["minutes"] is None


def test_the_quickest_that_always_arrives_is_first(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    board = load("run")
    rest = {
        "job": "sums",
        "settings": "",
        "commit": "abc",
        "date": "2026-11-28",
        "machine": "CPU",
        "final": [0.9],
    }
    times = {"sometimes": [0.1, None], "slow": [2.0, 2.5], "quick": [1.0, 1.5], "not": [None, None]}
    text = board.page([{**rest, "method": name, "ours": ours} for name, ours in times.items()])
    lines = [line for line in text.splitlines() if line.startswith("| sums")]
    assert [line.split(" | ")[1] for line in lines] == ["quick", "slow", "sometimes", "not"]
    assert "| 0.10, never |" in lines[2]


def test_the_page_is_of_the_results() -> None:
    board = load("run")
    rows = json.loads(board.RESULTS.read_text())
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == board.page(rows)
