"""The store of most tests here: a file, and the same behind its owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import TOKEN, served

from agro.store import Store
from agro.store.sqlite import SqliteDatabase


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.db"


@pytest.fixture(params=["file", pytest.param("owner", marks=pytest.mark.test)])
def store(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store at `path`; its `_database` is a connection to the file."""
    if request.param == "file":
        with Store.open(path) as store:
            yield store
        return
    monkeypatch.setenv("AGRO_TOKEN", TOKEN)
    with (
        served(path) as url,
        Store.open(url) as store,
        SqliteDatabase(path, read_only=False, create=False, timeout=30.0) as database,
    ):
        store.tables.database = database
        yield store
