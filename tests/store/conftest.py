"""The store of most tests here: a file, and the same in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agro.store import Store


@pytest.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.test)])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Where a new store may be made. `of_file` (making.py) is for tests of SQLite itself."""
    return tmp_path / "s.db" if request.param == "file" else request.getfixturevalue("postgres_url")


@pytest.fixture
def store(path: Any) -> Iterator[Store]:
    with Store.open(path) as store:
        yield store


@pytest.fixture
def into(tmp_path: Path) -> Iterator[Store]:
    """A store in a file, for logs."""
    with Store.open(tmp_path / "s.db") as store:
        yield store
