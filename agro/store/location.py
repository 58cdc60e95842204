"""Where a store is: a file, or the URL of its owner."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

from agro.errors import Refused

Location = Path | str  # of a file; of an owner, such as http://127.0.0.1:8700

READ_SECONDS = 10.0  # that who only reports waits for an owner, which may have ended with the run
SHORTEST = 512  # bytes of a file of SQLite that isn't empty: one page
_POSTGRES = re.compile(r"postgres(?:ql)?:/+(.+)")  # Path("postgresql://host") has one slash
_URL = re.compile(r"(https?):/+(.+?)/*$")  # Path("http://host") has one slash


def url_of(location: Location) -> str | None:
    """The URL of an owner; None for a file."""
    url = _URL.fullmatch(str(location))
    return f"{url[1]}://{url[2]}" if url else None


def postgres_url(location: Location) -> str | None:
    """The URL of a store in PostgreSQL; None for a file."""
    url = _POSTGRES.fullmatch(str(location))
    return f"postgresql://{url[1]}" if url else None


def located(store: str | None, folder: Path) -> Location:
    """The store that `data.store` names; the one in a run's folder where it names none."""
    return location_of(store) if store else folder / "store.db"


def location_of(store: str) -> Location:
    return postgres_url(store) or url_of(store) or Path(store)


def exists(location: Location) -> bool:
    """Whether a store was made: a run that ended while it made one leaves an empty file.

    An owner makes the file that it serves."""
    if url_of(location) or postgres_url(location):
        return True
    path = Path(location)
    return path.exists() and path.stat().st_size > 0


def check_made(location: Location) -> None:
    """Raise `Refused` where a run that only trains from a store has none."""
    if not exists(location):
        got = "is an empty file" if Path(location).exists() else "doesn't exist"
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
