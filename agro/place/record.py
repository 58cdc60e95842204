"""What the placement of a run leaves in its folder: its processes."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agro.io.files import write

FILE = "place.json"


@dataclass(frozen=True)
class PlacedRecord:
    """RUN/place.json."""

    placement: str
    processes: Sequence[dict[str, Any]]  # see `Supervised.to_json`
    host: str = ""  # of the supervisor
    pid: int = 0

    @classmethod
    def read(cls, folder: Path) -> PlacedRecord | None:
        """None for a run that wasn't placed."""
        try:
            content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        content.pop("url", None)  # of an owner, of earlier versions
        return cls(**content)

    def write(self, folder: Path) -> None:
        content = {**asdict(self), "host": socket.gethostname(), "pid": os.getpid()}
        write(folder / FILE, json.dumps(content, indent=1) + "\n")
