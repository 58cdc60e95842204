"""The benchmark of sampling in a short form: equal work on both sides, and rows in the contract's form."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIELDS = {"name", "goal", "ratio", "ours", "peer", "commit", "machine"}  # spec/contract.md


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("sampling_benchmark", ROOT / "benchmarks/sampling/run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_short_run_writes_rows(benchmark, tmp_path, monkeypatch, capsys):
    results = tmp_path / "sampling.json"
    sizes = ["--sizes", "1M", "--batches", "4", "--dtypes", "float32", "--new", "3", "--pairs", "1"]
    monkeypatch.setattr(sys, "argv", ["run.py", *sizes, "--results", str(results)])
    benchmark.main()
    rows = json.loads(results.read_text())
    assert [row["name"] for row in rows] == ["1M, float32, batch 4, equal", "1M, float32, batch 4, mixed"]
    for row in rows:
        assert row.keys() >= FIELDS
        assert row["ratio"] == pytest.approx(row["peer"][0] / row["ours"][0])
    assert rows[0]["tokens"] == 4 * 3
    assert capsys.readouterr().out.count("generate") == 2
