"""The location of a store, which is a file or a schema of a PostgreSQL database, and how it is opened."""

from __future__ import annotations

import re
from pathlib import Path

from agro.errors import Refused
from agro.io.record_files import has_several_tables
from agro.store.database import BUSY_TIMEOUT, Database, SqliteDatabase

Location = Path | str  # a file, or a URL such as postgresql://me@host/runs?schema=first

READ_SECONDS = 10.0  # timeout of commands that only report
_URL = re.compile(r"postgres(?:ql)?:(/+)(.+)")


def url_of(location: Location) -> str | None:
    """The URL of a store in PostgreSQL; None for a file."""
    url = _URL.fullmatch(str(location))
    if url is None:
        if re.match(r"[a-z][a-z\d+.-]+:/", str(location)):
            raise Refused(f"{location}: expected a file or postgresql://USER@HOST/DATABASE")
        return None
    # Path("postgresql://host/database") has one slash, as has Path("postgresql:///database").
    has_host = len(url[1]) == 2 or (len(url[1]) == 1 and "/" in url[2].partition("?")[0])
    return f"postgresql://{'' if has_host else '/'}{url[2]}"


def located(store: str | None, folder: Path) -> Location:
    """The store that `data.store` names; by default the one in the run's folder."""
    return location_of(store) if store else folder / "store.db"


def location_of(store: str) -> Location:
    return url_of(store) or Path(store)


def exists(location: Location) -> bool:
    """Whether a store was created; a run that ended while creating one leaves an empty file."""
    url = url_of(location)
    if url is not None:
        from agro.store.postgres import is_made  # which needs psycopg

        return is_made(url)
    path = Path(location)
    return path.exists() and path.stat().st_size > 0


def check_made(location: Location) -> None:
    """Raise `Refused` if a run that only trains from a store has none."""
    if not exists(location):
        got = "is an empty file" if Path(location).exists() else "doesn't exist"
        raise Refused(
            f"data.store: {location} {got}, but data.replay = 1 trains from a store; create it (agro import)"
        )


def is_store(path: Location) -> bool:
    """Whether it is a database of several tables; one with a single table is a file of records."""
    return url_of(path) is not None or has_several_tables(Path(path))


def opened(
    location: Location, *, read_only: bool = False, create: bool = True, timeout: float = BUSY_TIMEOUT
) -> Database:
    """Open a connection to a store. Raises `Refused` as `Store.open` does."""
    url = url_of(location)
    if url is not None:
        from agro.store.postgres import PostgresDatabase  # which needs psycopg

        return PostgresDatabase(url, read_only=read_only, create=create, timeout=timeout)
    return SqliteDatabase(location, read_only=read_only, create=create, timeout=timeout)
