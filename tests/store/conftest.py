"""The store of most tests here: a file, the same behind its owner, and several stores as one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import ONE, TOKEN, served

from agro.store import Store
from agro.store.database import Database
from agro.store.location import Shards


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.db"


@pytest.fixture(params=[*ONE, "shards"])
def store(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store at `path`; its `_database` is a connection to the file, which shards don't have."""
    if request.param != "owner":
        shards = Shards((path, path.with_name("s1.db"), path.with_name("s2.db")))
        with Store.open(path if request.param == "file" else shards) as store:
            yield store
        return
    monkeypatch.setenv("AGRO_TOKEN", TOKEN)
    with (
        served(path) as url,
        Store.open(url) as store,
        Database(path, read_only=False, create=False, timeout=30.0) as database,
    ):
        store.tables.database = database
        yield store
