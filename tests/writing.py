"""Files that tests of commands and pages read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """A file of JSON lines, and its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
