"""Rows of benchmarks/results/*.json: what a benchmark measured, on which machine, of which commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("name", "goal", "ratio", "ours", "peer", "commit", "machine")
Row = dict[str, Any]


def row(
    name: str,
    ours: Sequence[float],
    *,
    goal: float | None = None,
    ratio: float | None = None,
    peer: Sequence[float] = (),
    **more: Any,
) -> Row:
    """One case. `ours`, `peer`: a figure for each repeat; `ratio`: None where there is no peer."""
    measured = {"name": name, "goal": goal, "ratio": ratio, "ours": list(ours), "peer": list(peer)}
    return {**measured, "commit": commit(), "machine": machine(), **more}


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    rows = list(rows)
    for made in rows:
        missing = [key for key in KEYS if key not in made]
        assert not missing, f"a row of {path.name} has no {', '.join(missing)}: {made.get('name')}"
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
    version = ".".join(map(str, sys.version_info[:3]))
    return f"{model}, {os.cpu_count()} cores, Python {version}, load {os.getloadavg()[0]:.0f}"


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
