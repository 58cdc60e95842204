"""benchmarks/gpu.py: its limits, how its parts end, and each part on the CPU with tiny shapes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
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
    command = [
        sys.executable,
        str(ROOT / "benchmarks/gpu.py"),
        "--within",
        "60",
        "--small",
        "--device",
        "cpu",
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--parts", name, "--commit", "abc"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
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
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ijson").mkdir()
    (tmp_path / "ijson/__init__.py").write_text("raise ImportError('no wheel')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / ""))
    out = tmp_path / "out"
    monkeypatch.setattr(gpu, "ROOT", ROOT)
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
