"""The rule of `make bench-check`: slower than before beside the plain way, not just on a slower machine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


def test_what_a_repetition_doesnt_show_passes(benchmark, monkeypatch) -> None:
    assert checked(benchmark, monkeypatch, [2.2, 2.2, 2.2, 2.0, 2.0], [2.0] * 5) == 0


def test_one_slow_turn_passes(benchmark, monkeypatch) -> None:
    assert checked(benchmark, monkeypatch, [2.0, 2.0, 9.0, 2.0, 2.0]) == 0


def test_a_machine_that_is_twice_as_slow_passes(benchmark) -> None:
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
