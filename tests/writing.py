"""Files that tests of commands and pages read, and what they read of exports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from agro.errors import Refused
from agro.io.record_files import read_records
from agro.logs.interchange import from_record
from agro.types import Sample


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """A file of JSON lines, and its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_samples(path: str | Path) -> Iterator[Sample]:
    """The samples of an exported file. Raises `Refused` with FILE:LINE at the first line that isn't one."""
    for line in read_records(path):
        try:
            if line.error:
                raise Refused(line.error)
            yield from_record(line.value)
        except Refused as error:
            raise Refused(f"{line.where}: {error}") from None
