"""The short form of benchmarks/torture: a run and an import that are killed at any time finish as usual."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TORTURE = Path(__file__).parents[2] / "benchmarks" / "torture" / "run.py"


def test_a_few_kills_of_each_stage(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(TORTURE), "--kills", "8", "--seed", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert sum(by["event"] + by["time"] for by in result["stages"].values()) == 8
    assert result["finished"]["run"] >= 1
    assert result["finished"]["import"] >= 1
