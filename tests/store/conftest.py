"""The store of most tests here: a file, and the same in PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from making import write_lines
from pyarrow import parquet

from agro.logs.importing import import_files
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
def other(store: Store, path: Any) -> Iterator[Store]:
    """The same store, in another connection."""
    with Store.open(path) as other:
        yield other


@pytest.fixture
def into(tmp_path: Path) -> Iterator[Store]:
    """A store in a file, for logs."""
    with Store.open(tmp_path / "s.db") as store:
        yield store


@pytest.fixture
def load(into: Store, tmp_path: Path) -> Callable[..., Any]:
    """A function: records or lines of a log, its name, options of the import -> the report of it."""

    def load(*rows: Any, name: str = "log.jsonl", **options: Any) -> Any:
        path = tmp_path / name
        if path.suffix == ".parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path)
        else:
            write_lines(path, *rows)
        return import_files(into, [path], **options)

    return load
