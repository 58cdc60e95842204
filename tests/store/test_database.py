"""What `Store.open` says to files that it can't use, and what lasts in those it can."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import sample

from agro.config import RunConfig
from agro.errors import Refused
from agro.store import Store
from agro.store.database import SCHEMA
from agro.store.sample_rows import checksum


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "s.db"
    with Store.open(path) as store:
        store.append([sample()])
    return path


@contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """As a user whom file permissions bind, which they don't root."""
    if os.geteuid():
        yield
        return
    for file in (folder, *folder.iterdir()):
        os.chown(file, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can get to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_settings_that_make_writes_last(path: Path) -> None:
    expected = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "user_version": SCHEMA}
    expected |= {"application_id": int.from_bytes(b"AGRO", "big")}
    with Store.open(path) as store:
        assert {name: store.tables.run(f"PRAGMA {name}")[0][0] for name in expected} == expected


NOT_A_STORE: list[tuple[bytes | str, str]] = [
    (b"x", "not a store"),
    (b'{"prompt": "", "response": ""}\n' * 40, "not a store"),
    (b"SQLite format 3\0" + b"\xff" * 4000, "not a store"),
    ("PRAGMA application_id = 0", "not a store: an SQLite file, but not one of agro's"),
    ("PRAGMA application_id = 77", "not a store: an SQLite file, but not one of agro's"),
    *((f"PRAGMA user_version = {n}", f".*schema {SCHEMA}, got {n}") for n in (1, 2, SCHEMA + 1)),
]


@pytest.mark.parametrize("journal", ["wal", "delete"])
@pytest.mark.parametrize("options", [{}, {"read_only": True}, {"create": False}], ids=str)
@pytest.mark.parametrize(("content", "message"), NOT_A_STORE, ids=range(len(NOT_A_STORE)))
def test_what_is_no_store_is_refused_and_left_as_it_is(
    path: Path, content: bytes | str, message: str, options: dict[str, Any], journal: str
) -> None:
    """Bytes, or a store after a statement of another program, with that program's journal."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with closing(sqlite3.connect(path)) as other:
            other.execute(f"PRAGMA journal_mode = {journal}")
            other.execute(content)
            other.commit()
    before = path.read_bytes()
    with pytest.raises(Refused, match=rf"s\.db: {message}"):
        Store.open(path, **options)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["s.db"]


def test_an_empty_file_becomes_a_store_only_where_one_may_be_made(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.touch()
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(Refused, match="not a store"):
            Store.open(path, **options)
    with Store.open(path) as store:
        assert store.counts().samples == 0


def test_several_stores_in_a_configuration_are_refused() -> None:
    listed = r"data\.store: input should be a valid string, got \['a\.db', 'b\.db'\]"
    with pytest.raises(Refused, match=listed):
        RunConfig.load("log", ['data.store=["a.db", "b.db"]'])
    with pytest.raises(Refused, match=r"data\.store=\[a\.db, b\.db\]: expected one store"):
        RunConfig.load("log", ["data.store=[a.db, b.db]"])  # as a shell hands it on


def test_a_store_that_is_missing(tmp_path: Path) -> None:
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(Refused, match="no such store"):
            Store.open(tmp_path / "s.db", **options)
    with pytest.raises(Refused, match=r"the folder .*no doesn't exist"):
        Store.open(tmp_path / "no" / "s.db")
    with pytest.raises(Refused, match="can't be opened: File name too long"):
        Store.open(tmp_path / ("x" * 300))
    with pytest.raises(Refused, match="expected the file of a store, got a folder"):
        Store.open(tmp_path)
    assert os.listdir(tmp_path) == []


def test_another_writer_is_waited_for_and_then_named(path: Path) -> None:
    with Store.open(path) as other, Store.open(path, timeout=0.1) as store:
        with other.transaction():
            assert store.counts().samples == 1  # reading goes on
            with pytest.raises(Refused, match=r"another process has been writing for more than 0\.1 s"):
                store.append([sample()])
        store.append([sample()])
        assert store.counts().samples == 2


def test_opening_waits_for_the_lock_that_a_write_ahead_log_takes(path: Path) -> None:
    """A process that died between making the store and its log leaves a store without one.

    Other processes may be reading it.
    """
    with closing(sqlite3.connect(path, check_same_thread=False, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM samples").fetchall()
        with pytest.raises(Refused, match=r"writing for more than 0\.05 s"):
            Store.open(path, timeout=0.05)
        timer = threading.Timer(0.2, other.rollback)
        timer.start()
        with Store.open(path) as store:
            assert store.tables.run("PRAGMA journal_mode") == [("wal",)]
        timer.join()


def test_a_folder_or_file_that_can_only_be_read(open_folder: Path) -> None:
    path = open_folder / "s.db"
    with Store.open(path) as store:
        store.append([sample()])

    def refused(name: str, message: str = "the file or its folder can only be read", **options: Any) -> None:
        with pytest.raises(Refused, match=message):
            Store.open(open_folder / name, **options)

    with unprivileged(open_folder):
        path.chmod(0o444)
        refused("s.db")
        path.chmod(0o644)
        open_folder.chmod(0o555)
        try:
            refused("s.db")
            refused("new.db")
            with Store.open(path, read_only=True) as store:
                assert len(list(store.samples())) == 1
            path.chmod(0o000)
            refused("s.db", "you may not read this file", read_only=True)
        finally:
            open_folder.chmod(0o755)


def test_a_full_disk_loses_nothing_and_is_named(path: Path) -> None:
    with Store.open(path) as store:
        [(pages,)] = store.tables.run("PRAGMA page_count")
        store.tables.run(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(Refused, match="the disk is full"):
            store.append([sample(response="x" * 100_000)])
        assert store.counts().samples == 1


def test_a_checksum_is_the_same_in_all_versions_of_python() -> None:
    """The number is of Python 3.11; another one would make every older store look damaged."""
    assert checksum((7, 1, 0.5, None, "é", b"\0a", 2**40)) == 332679212929506770


def test_names_and_integers_of_numpy_are_stored_as_text_and_integers(path: Path) -> None:
    name, one = np.str_("ré"), np.int64(1)  # marshal writes the text as bytes, SQLite the integer
    with Store.open(path) as store:
        [i] = store.append([sample(role=np.str_("log"))], run=name, step=one)
        store.draws.record(name, one, [np.int64(i)])
        store.ledger.commit(name, one, "digest")
        assert store.tables.run("SELECT typeof(step) FROM samples WHERE step = 1") == [("integer",)]
        assert not store.tables.damage()
        assert store.ledger.committed("ré") == store.ledger.committed(name)
        assert [use.run for use in store.draws.trained([i])] == ["ré"]


def test_a_reader_leaves_no_files_beside_the_store(path: Path) -> None:
    with Store.open(path, read_only=True) as store:
        assert store.counts().samples == 1
        assert path.with_name("s.db-wal").exists()  # SQLite's own, while somebody reads
    assert [file.name for file in path.parent.iterdir()] == ["s.db"]
    with Store.open(path) as writer, Store.open(path, read_only=True) as reader:
        reader.close()
        writer.append([sample()])  # the log of a writer stays
        assert path.with_name("s.db-wal").stat().st_size > 0
