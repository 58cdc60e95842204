"""The results that benchmarks write have the rows that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks/results").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_is_a_list_of_rows(file: Path) -> None:
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    assert isinstance(rows, list)
    assert rows
    for row in rows:
        assert {"name", "goal", "ratio", "ours", "peer", "commit", "machine"} <= set(row), row.get("name")
        assert all(isinstance(row[key], list) for key in ("ours", "peer")), row["name"]
