"""What the placement of a run leaves in its folder: its processes, where their owner is, and its token."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agro.errors import remember_secret
from agro.io.files import write, writing

FILE = "place.json"
TOKEN_FILE = ".token"  # readable by the person who started the run alone
TOKEN = "AGRO_TOKEN"


@dataclass(frozen=True)
class PlacedRecord:
    """RUN/place.json."""

    placement: str
    url: str  # of the owner of the store
    processes: Sequence[dict[str, Any]]  # see `Supervised.to_json`
    host: str = ""  # of the supervisor
    pid: int = 0

    @classmethod
    def read(cls, folder: Path) -> PlacedRecord | None:
        """None for a run that wasn't placed."""
        try:
            return cls(**json.loads((folder / FILE).read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, folder: Path) -> None:
        content = {**asdict(self), "host": socket.gethostname(), "pid": os.getpid()}
        write(folder / FILE, json.dumps(content, indent=1) + "\n")

    @property
    def port(self) -> int:
        """Of the owner, which a resumed run has again: collectors may be waiting for it."""
        return int(self.url.rpartition(":")[2])


def owner_of(run: str) -> str:
    """The URL of the owner of a placed run's store, whose token this process then has; else `run` itself."""
    placed = PlacedRecord.read(Path(run))
    if placed is None:
        return run
    os.environ.setdefault(TOKEN, token_of(Path(run)))
    return placed.url


def token_of(folder: Path) -> str:
    """The token of the owner of a run: the one of the environment, or of before, or a new one."""
    file = folder / TOKEN_FILE
    if TOKEN in os.environ:
        return os.environ[TOKEN]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            with open(file, "w", opener=partial(os.open, mode=0o600)) as new:
                new.write(secrets.token_urlsafe(24))
    token = file.read_text(encoding="utf-8")
    remember_secret(token)
    return token
