"""The clock of `make leaderboard`, and the order of its table."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


def test_measuring_isnt_counted(clock) -> None:
    """.9 is reached by the second update: 12 s."""
    assert clock(3, 1)["minutes"] == pytest.approx(0.2)


def test_only_measurements_count(clock) -> None:
    """Of every third update: 18 s."""
    assert clock(4, 3)["minutes"] == pytest.approx(0.3)


def test_what_isnt_reached_is_unknown(clock) -> None:
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
