"""A store in a file of SQLite: opening it, transactions, and SQLite's errors in plain words."""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from agro.errors import Refused, Unwritable
from agro.store.database import LEDGERS, PAGE_BYTES, SCHEMA, TABLES, Database, Row
from agro.store.sample_rows import SAMPLE, encode_text, insert_into

APPLICATION_ID = int.from_bytes(b"AGRO", "big")
SHORTEST = 512  # bytes of a file that isn't empty: one page
CACHE = 32 << 10  # KiB of pages in memory: with SQLite's 2 MB, rows of a large store cost a quarter more


class SqliteDatabase(Database):
    """One connection to a store's file. With WAL readers continue while one process writes."""

    path: Path

    def __init__(self, path: str | Path, *, read_only: bool, create: bool, timeout: float) -> None:
        self.path = Path(path)
        self.timeout = timeout
        self.read_only = read_only
        try:
            _check_path(self.path, read_only, create)
        except OSError as error:
            raise Refused(f"{path}: can't be opened: {error.strerror}") from None
        mode = "rwc" if create else "rw"
        self._connection = self._connect("ro" if read_only else mode)
        try:
            self._prepare(create)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """A reader makes the files of the write-ahead log, and only a writer's connection removes them."""
        self._connection.close()
        wal = self.path.with_name(f"{self.path.name}-wal")
        with suppress(sqlite3.Error, Refused, OSError):  # another process may remove them meanwhile
            if wal.stat().st_size == 0 and _allowed(self.path, os.W_OK):
                with closing(self._connect("rw")) as connection:
                    connection.execute("PRAGMA busy_timeout = 0")
                    connection.execute("PRAGMA application_id").fetchone()

    @contextmanager
    def transaction(self, *, durable: bool = True, temporary: bool = False) -> Iterator[None]:
        if self._connection.in_transaction:
            yield
            return
        synchronous = None if durable else self.run("PRAGMA synchronous")[0][0]
        if synchronous:
            self.run("PRAGMA synchronous = NORMAL")
        try:
            self.run("BEGIN" if temporary else "BEGIN IMMEDIATE")
            yield
            self.run("COMMIT")
        except BaseException:
            self._connection.rollback()
            raise
        finally:
            if synchronous:
                self.run(f"PRAGMA synchronous = {synchronous}")

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def listed(self, values: Iterable[Any]) -> Any:
        return json.dumps(list(values))

    def has(self, table: str, schema: str = "main") -> bool:
        return bool(self.run(f"SELECT 1 FROM {schema}.sqlite_master WHERE name = ?", [table]))

    def now(self) -> float:
        return time.time()

    def damaged_structure(self) -> list[str]:
        lines = [" ".join(str(line).split()) for (line,) in self.run("PRAGMA integrity_check(10)")]
        return [] if lines == ["ok"] else lines

    @contextmanager
    def erasing(self) -> Iterator[None]:
        """Overwriting what is deleted, without a write-ahead log, which SQLite allows to the only connection.
        Raises `Refused` where another process has the store open."""
        self.run("PRAGMA secure_delete = ON")
        self._set_journal("delete")
        try:
            yield
            self.run("VACUUM")
        finally:
            self._set_journal("wal")

    def run(self, sql: str, args: Sequence[Any] = ()) -> list[Row]:
        with self._plainly():
            return self._connection.execute(sql, [*map(encode_text, args)]).fetchall()

    def first(self, sql: str, args: Sequence[Any], rows: int) -> tuple[list[Row], bool]:
        """Fewer rows where they have `PAGE_BYTES`."""
        page, size = list[Row](), 0
        with self._plainly(), closing(self._connection.execute(sql, [*map(encode_text, args)])) as query:
            for row in query:
                page.append(row)
                size += sum([len(value) for value in row if isinstance(value, (str, bytes))])
                if size >= PAGE_BYTES:
                    return page, True
        return page, len(page) == rows

    def insert(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], key: Sequence[str] = ()
    ) -> None:
        with self._plainly():
            self._connection.executemany(insert_into(table, columns, key), rows)

    def update(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        changes = ", ".join(f"{name} = ?" for name in columns)
        with self._plainly():
            self._connection.executemany(f"UPDATE {table} SET {changes} WHERE id = ?", rows)

    def way_out(self) -> str:
        name = shlex.quote(str(self.path))
        return (
            f"What to do: `agro store recover {name} NEW` writes all intact rows into a new store and "
            "reports the lost ones, or go back to a copy"
        )

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """Raises what an error of SQLite means for a user; the error itself where it is none of theirs."""
        try:
            yield
        except OverflowError as error:
            raise Refused(f"{self.path}: expected integers of 64 bits: {error}") from None
        except UnicodeError as error:  # in SQLite's own message, or in damaged text that is written again
            raise self._damaged() from error
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code not in _REASONS:
                raise
            reason = _REASONS[code].format(timeout=self.timeout, way_out=self.way_out())
            kind = Unwritable if code in _UNWRITABLE else Refused
            raise kind(f"{self.path}: {reason} ({error})") from error

    def _damaged(self) -> Refused:
        return Refused(f"{self.path}: {_DAMAGED.format(way_out=self.way_out())}")

    def _connect(self, mode: str, *options: str) -> sqlite3.Connection:
        uri = f"{self.path.absolute().as_uri()}?{'&'.join([f'mode={mode}', *options])}"
        with self._plainly():
            connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=self.timeout)
        connection.text_factory = read_text
        connection.create_function("number_of", 2, _number_of, deterministic=True)
        return connection

    def _prepare(self, create: bool) -> None:
        wal = self.path.with_name(f"{self.path.name}-wal")
        has_writer = wal.exists() and wal.stat().st_size > 0
        if self.read_only and not has_writer and not _allowed(self.path.parent, os.W_OK):
            # WAL can't make its side files in a folder that we can't write to; without a -wal there is no
            # writer.
            self._connection.close()
            self._connection = self._connect("ro", "immutable=1")
        if not self.read_only and create and self._is_empty():
            with self.transaction():
                if self._is_empty():  # no other process was faster
                    for statement in TABLES.split(";"):
                        self.run(statement)
                    self.run(f"PRAGMA application_id = {APPLICATION_ID}")
                    self.run(f"PRAGMA user_version = {SCHEMA}")
        [(application,)] = self.run("PRAGMA application_id")
        [(schema,)] = self.run("PRAGMA user_version")
        if application != APPLICATION_ID:
            raise Refused(
                f"{self.path}: not a store: an SQLite file, but not one of agro's; give another path"
            )
        if self.has("shard"):
            raise Refused(
                f"{self.path}: one of several stores that were one, which aren't read any more. "
                "What to do: agro store merge of all parts with the version of agro that wrote them"
            )
        if schema != SCHEMA:
            raise Refused(
                f"{self.path}: expected a store of schema {SCHEMA}, got {schema}: another version of agro "
                "wrote it; export it with that version, and import it with this one"
            )
        with self._plainly():
            fits = columns_fit(self._connection)
        if not fits:
            raise self._damaged()
        if not self.read_only:
            if self._set_journal("wal") != "wal":
                raise Refused(
                    f"{self.path}: SQLite can't keep a write-ahead log here; put the store on a local disk"
                )
            self.run("PRAGMA synchronous = FULL")
            self.run(f"PRAGMA cache_size = -{CACHE}")
            self.run("PRAGMA foreign_keys = ON")

    def _is_empty(self) -> bool:
        tables = self.run("SELECT 1 FROM sqlite_master LIMIT 1")
        return self.run("PRAGMA application_id") == [(0,)] and not tables

    def _set_journal(self, mode: str) -> str:
        """Set the mode of the journal, "wal" or "delete", and return the mode that it has.

        SQLite needs exclusive access for that and doesn't wait for it, so this method waits.
        """
        ends = time.monotonic() + self.timeout
        while True:
            with self._plainly():
                try:
                    [(got,)] = self._connection.execute(f"PRAGMA journal_mode = {mode}")
                    if got == mode or mode == "wal":
                        return str(got)
                except sqlite3.OperationalError as error:
                    is_busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                    if not is_busy or (mode == "wal" and time.monotonic() > ends):
                        raise
            if time.monotonic() > ends:
                raise Refused(
                    f"{self.path}: another process has the store open; end it (a run can be resumed later), "
                    "then try again. Nothing was deleted"
                )
            time.sleep(0.01)


def _number_of(text: Any, key: str) -> int | None:
    """A number of a JSON object; None where it has none, or the text is damaged."""
    try:
        value = json.loads(text).get(key) if text != "{}" else None
    except (TypeError, ValueError, AttributeError):
        return None
    return value if type(value) is int and abs(value) < 2**63 else None


def read_text(value: bytes) -> str:
    """Also damaged text that can't be decoded, for its checksum to be compared."""
    return value.decode("utf-8", "surrogateescape")


_DAMAGED = "the store's file is damaged. {way_out}"
_REASONS = {
    sqlite3.SQLITE_BUSY: (
        "another process has been writing for more than {timeout:g} s; try again when it is done"
    ),
    sqlite3.SQLITE_LOCKED: "another connection is writing; try again when it is done",
    sqlite3.SQLITE_READONLY: (
        "the store can only be read: it was opened read-only, or its file or folder is read-only; "
        "change that, or write to a copy"
    ),
    sqlite3.SQLITE_NOTADB: (
        "not a store (not an SQLite file); give another path, or import it if it is a log"
    ),
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_FULL: (
        "the disk is full; make room and try again. Nothing of it was stored; earlier writes are intact"
    ),
    sqlite3.SQLITE_IOERR: "the disk can't be read or written (is it full?); earlier writes are intact",
    sqlite3.SQLITE_CANTOPEN: "the store can't be opened; see whether its folder can be written to",
}
_UNWRITABLE = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}


def columns_fit(connection: sqlite3.Connection) -> bool:
    """Whether the tables have the columns of a store."""
    for table, columns in {"samples": SAMPLE, **LEDGERS}.items():
        names = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", [table])}
        if names != {*columns, "checksum"}:
            return False
    return True


def _check_path(path: Path, read_only: bool, create: bool) -> None:
    if path.is_dir():
        raise Refused(f"{path}: expected the file of a store, got a folder")
    there = path.exists()
    if not there and (read_only or not create):
        raise Refused(
            f"{path}: no such store; make one with `agro import` or `agro sample`, or give another path"
        )
    if not there and not path.parent.is_dir():
        raise Refused(f"{path}: the folder {path.parent} doesn't exist; make it first")
    if there and not _allowed(path, os.R_OK):
        raise Refused(f"{path}: you may not read this file")
    writable = _allowed(path.parent, os.W_OK) and (not there or _allowed(path, os.W_OK))
    if not read_only and not writable:
        raise Refused(f"{path}: the file or its folder can only be read; a store to write to needs both")
    # SQLite itself would take a short file for an empty one, and overwrite it. The file isn't read here: to
    # close it would release the locks of all other connections of this process (POSIX), and another process
    # that closes the store would then delete the write-ahead log under them.
    if there and 0 < path.stat().st_size < SHORTEST:
        raise Refused(f"{path}: {_REASONS[sqlite3.SQLITE_NOTADB]}")


def _allowed(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)
