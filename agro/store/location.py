"""Where a store is: a file, or the URL of its owner."""

from __future__ import annotations

import re
from pathlib import Path

Location = Path | str  # of a file; of an owner, such as http://127.0.0.1:8700

READ_SECONDS = 10.0  # that who only reports waits for an owner, which may have ended with the run
_URL = re.compile(r"(https?):/+(.+?)/*$")  # Path("http://host") has one slash


def url_of(location: Location) -> str | None:
    """The URL of an owner; None for a file."""
    url = _URL.fullmatch(str(location))
    return f"{url[1]}://{url[2]}" if url else None


def located(store: str | None, folder: Path) -> Location:
    """The store that `data.store` names; the one in a run's folder where it names none."""
    if store is None or not store:
        return folder / "store.db"
    return url_of(store) or Path(store)


def exists(location: Location) -> bool:
    """Whether a store was made: a run that ended while it made one leaves an empty file.

    An owner makes the file that it serves."""
    if url_of(location):
        return True
    path = Path(location)
    return path.exists() and path.stat().st_size > 0
