"""Where a store is: a file, the URL of its owner, or several of them, its shards."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from agro.errors import Refused


@dataclass(frozen=True)
class Shards:
    """Several stores that are one together: each has the prompts of its share of a hash."""

    locations: tuple[Path | str, ...]

    def __post_init__(self) -> None:
        if not self.locations or len(set(map(str, self.locations))) < len(self.locations):
            raise Refused(f"expected different stores, each a file or the URL of an owner, got {self}")

    def __str__(self) -> str:
        return ", ".join(map(str, self.locations))


Location = Path | str | Shards  # of a file; of an owner, such as http://127.0.0.1:8700

READ_SECONDS = 10.0  # that who only reports waits for an owner, which may have ended with the run
SHORTEST = 512  # bytes of a file of SQLite that isn't empty: one page
_URL = re.compile(r"(https?):/+(.+?)/*$")  # Path("http://host") has one slash


def url_of(location: Location) -> str | None:
    """The URL of an owner, of shards that of their `home`; None for a file."""
    if isinstance(location, Shards):
        return url_of(home(location))
    url = _URL.fullmatch(str(location))
    return f"{url[1]}://{url[2]}" if url else None


def home(location: Location) -> Path | str:
    """The store that has what belongs to no prompt: leases, claims, what a run publishes."""
    return location.locations[0] if isinstance(location, Shards) else location


def located(store: str | Sequence[str] | None, folder: Path) -> Location:
    """The store that `data.store` names; the one in a run's folder where it names none."""
    return location_of(store) if store else folder / "store.db"


def location_of(store: str | Sequence[str]) -> Location:
    """The store that a file or a URL names; several name its shards."""
    if isinstance(store, str):
        return url_of(store) or Path(store)
    return Shards(tuple(url_of(shard) or Path(shard) for shard in store))


def exists(location: Location) -> bool:
    """Whether a store was made: a run that ended while it made one leaves an empty file.

    An owner makes the file that it serves."""
    if url_of(location):
        return True
    if isinstance(location, Shards):
        return any(map(exists, location.locations))
    path = Path(location)
    return path.exists() and path.stat().st_size > 0


def check_made(location: Location) -> None:
    """Raise `Refused` where a run that only trains from a store has none."""
    if not exists(location):
        got = "doesn't exist"
        if not isinstance(location, Shards) and Path(location).exists():
            got = "is an empty file"
        raise Refused(
            f"data.store: {location} {got}, but data.replay = 1 trains from a store; create it (agro import)"
        )


def is_store(path: Path) -> bool:
    """Whether a file is SQLite's.

    SQLite itself opens it: to read it and close it would release the locks of the process's connections.
    """
    if not path.is_file() or path.stat().st_size < SHORTEST:
        return False
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        return error.sqlite_errorcode != sqlite3.SQLITE_NOTADB
    return True
