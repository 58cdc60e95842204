"""The tables of a store, whose rows have checksums, and what its two dialects have in common: a file of
SQLite, and PostgreSQL.

SQL is written once, in SQLite's dialect; `agro.store.postgres` translates the few words that differ. Texts
are given as they are; a row has them as the store does, see `decode_text`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from agro.errors import Refused, Unwritable
from agro.io.terminal import first_of
from agro.store.sample_rows import (
    SAMPLE,
    SELECT,
    checksum,
    decode_text,
    encode_text,
    from_rows,
    insert_into,
    is_valid,
    is_valid_sample,
    run_of,
    without_version,
)

P = ParamSpec("P")
T = TypeVar("T")
Part = TypeVar("Part", bound="HasDatabase")
Row = tuple[Any, ...]
Statement = tuple[str, Sequence[Any]]  # and its arguments
SCHEMA = 10
BUSY_TIMEOUT = 30.0  # seconds that a writer waits for another one
PAGE_ROWS = 256  # samples of a page
PAGE_BYTES = 1 << 24  # a page ends where its rows have more
PAGE_GROUPS = 256
PAGE_RESPONSES = 4096  # a page of groups ends where these have more
PAGE_ENTRIES = 4096  # rows of small tables, and what is known of samples

# `reward` has no declared type: REAL would store -0.0 as 0. Each piece of an episode is a row. samples_draw
# has all columns that grouping and drawing use, so neither reads the rows with their blobs. group_uses
# counts the steps in draws, requests can be read off samples and draws, reference_logp can be computed again.
# changes lists the groups whose stored samples, or uses, changed, the last ones alone, for the orders of
# groups (agro.store.candidates): `sample` and `change` of orders are the newest ones that an order has seen,
# `version` is the learner's when it last drew. imports has the files, `options` as JSON, `name` empty where
# all of the file was forgotten; identities the responses that other files may repeat, and where they come
# from.
TABLES = (Path(__file__).parent / "tables.sql").read_text(encoding="utf-8")

LEDGERS = {  # the small tables, and the columns that their checksums cover
    "pairs": ("winner", "loser", "votes_winner", "votes_loser"),
    "draws": ("run", "step", "sample"),
    "commits": ("run", "step", "digest", "cursor", "files"),
    "group_uses": ("run", "prompt_id", "uses", "last"),
    "requests": ("run", "number", "collector", "done", "step"),
    "imports": ("file", "name", "options", "license"),
    "identities": ("identity", "file", "record"),
}
KEYS = {  # of those that have one
    "group_uses": ("run", "prompt_id"),
    "requests": ("run", "number"),
    "imports": ("file",),
    "identities": ("identity",),
}
CACHED = ("sample", "key", "run", "step", "logp")  # the same of reference_logp, which isn't one of them
DERIVED = ("group_uses", "requests")  # those that can be made again from samples and draws
# What both dialects say.
NO_STORE = "no such store; make one with `agro import` or `agro sample`, or give another path"
BUSY = "another process has been writing for more than {timeout:g} s; try again when it is done"
NOT_64_BITS = "expected integers of 64 bits"
APPLICATION_ID = int.from_bytes(b"AGRO", "big")
SHORTEST = 512  # bytes of a file that isn't empty: one page
CACHE = 32 << 10  # KiB of pages in memory: with SQLite's 2 MB, rows of a large store cost a quarter more


@dataclass(frozen=True)
class Damage:
    """What of a store isn't as it was written; empty, and false, for an intact one."""

    structure: list[str] = field(default_factory=list)  # what SQLite reports of its pages and indexes
    samples: list[int] = field(default_factory=list)  # ids
    pairs: list[int] = field(default_factory=list)  # rowids, as the following ones
    draws: list[int] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    group_uses: list[int] = field(default_factory=list)  # counts of draws
    requests: list[int] = field(default_factory=list)  # of collectors
    imports: list[int] = field(default_factory=list)  # files
    identities: list[int] = field(default_factory=list)  # of responses that files repeat

    def __bool__(self) -> bool:
        return any(asdict(self).values())

    def __str__(self) -> str:
        lines = []
        names = {"group_uses": "draw count", "imports": "imported file", "identities": "repeated response"}
        for table, rows in asdict(self).items():
            if table == "structure" and rows:
                lines.append(f"the file's structure is damaged: {'; '.join(rows[:3])}")
            elif rows:
                name = names.get(table, table.removesuffix("s"))
                plural = "s" if len(rows) > 1 else ""
                lines.append(f"{len(rows)} {name}{plural} not as written: {name} {first_of(rows, 5)}")
        return "; ".join(lines) or "intact"


class HasDatabase(Protocol):
    """A part of a store."""

    _db: Database


def repeated(method: Callable[Concatenate[Part, P], T]) -> Callable[Concatenate[Part, P], T]:
    """A method of a part of a store that writes, repeated as of `Database.repeat`."""

    @wraps(method)
    def call(part: Part, /, *args: P.args, **kwargs: P.kwargs) -> T:
        again: Any = [list(each) if isinstance(each, Iterator) else each for each in args]
        named: Any = {name: list(x) if isinstance(x, Iterator) else x for name, x in kwargs.items()}
        return part._db.repeat(lambda: method(part, *again, **named))

    return call


class Database(ABC):
    """One connection to a store. Readers go on while one process writes."""

    path: Path | str
    read_only: bool
    locks_first = True  # whether a transaction begins with the lock, also one that reads alone
    _checked: frozenset[str] = frozenset()  # parts of `Damage` that were found intact

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def transaction(self, *, durable: bool = True) -> AbstractContextManager[None]:
        """What is written inside is stored completely, and durably, or not at all. Inner ones join the
        outer. `durable`: False for what can be made again; it is on the disk with the next other write."""

    @abstractmethod
    def run(self, sql: str, args: Sequence[Any] = ()) -> list[Row]:
        """The rows of a statement."""

    def run_all(self, *statements: Statement) -> list[list[Row]]:
        """The rows of each of several statements, which don't depend on each other."""
        return [self.run(sql, args) for sql, args in statements]

    def pages(self, sql: str, args: Sequence[Any] = (), *, rows: int) -> Iterator[list[Row]]:
        """The rows of a query of any size, so many at a time. `sql` ends with the condition and the order of
        its first column: `id > ? ORDER BY id`. Nothing stays open between two pages, so that a caller may
        write meanwhile, or never ask for the next one."""
        cursor, has_more = 0, True
        while has_more:
            page, has_more = self.first(f"{sql} LIMIT {rows}", [*args, cursor], rows)
            if page:
                cursor = page[-1][0]
                yield page

    def first(self, sql: str, args: Sequence[Any], rows: int) -> tuple[list[Row], bool]:
        """At most so many rows, and whether there may be more."""
        page = self.run(sql, args)
        return page, len(page) == rows

    @abstractmethod
    def insert(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], key: Sequence[str] = ()
    ) -> None:
        """Add rows, in place of those with the same `key` where the table has one."""

    @abstractmethod
    def update(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Set columns of the rows with an id, which is the last value of each of `rows`."""

    @abstractmethod
    def listed(self, values: Iterable[Any]) -> Any:
        """The argument of `IN (SELECT value FROM json_each(?))`."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since the epoch by the clock of the host that has the store."""

    @abstractmethod
    def erasing(self) -> AbstractContextManager[None]:
        """Overwriting what is deleted inside."""

    def analyze(self, table: str) -> None:
        """Let the planner of queries know of many new rows, where it doesn't notice by itself."""
        return

    def renumber(self, tables: Sequence[str]) -> None:
        """Let the next rows of tables come after those that were added with their numbers."""
        return

    def repeat(self, call: Callable[[], T]) -> T:
        """Call what reads and writes; again where its writes didn't count for a reason that will pass."""
        return call()

    @abstractmethod
    def way_out(self) -> str:
        """What to do about a damaged store."""

    def check(self) -> None:
        """Raise `Refused` where the file's structure, its indexes, draws, their counts or requests are
        damaged.

        Samples are checked when they are read, commits by `Ledger.commits`. About a second for a store of
        1 GB.
        """
        self._checked = frozenset()
        self.check_once("structure", "draws", "group_uses", "requests")

    def check_once(self, *parts: str) -> None:
        """Raise `Refused` where these parts of `Damage` are damaged; each is checked once a connection.

        In a file of damaged structure SQLite may silently return fewer rows than there are.
        """
        for part in parts:
            if part not in self._checked:
                if damage := self.damaged(part):
                    raise self.refusal(Damage(**{part: damage}))
                self._checked |= {part}

    def damage(self) -> Damage:
        """All that isn't as it was written. Reads all of the store."""
        return Damage(**{part.name: self.damaged(part.name) for part in fields(Damage)})

    def damaged(self, part: str) -> list[Any]:
        """What of a part of `Damage` isn't as it was written: rowids, of samples their ids."""
        if part == "structure":
            return self.damaged_structure()
        if part == "samples":
            return [row[0] for page in self.sample_pages() for row in page if not is_valid_sample(row)]
        return [row[0] for row in self.run(*self.entries_query(part)) if not is_valid(row[1:])]

    def damaged_structure(self) -> list[str]:
        """What is off in the pages and indexes."""
        return []

    def refusal(self, damage: Damage) -> Refused:
        return Refused(f"{self.path}: {damage}. {self.way_out()}")

    def last_id(self) -> int:
        """The id of the sample that was added last; 0 where there is none."""
        [(newest,)] = self.run("SELECT coalesce(max(id), 0) FROM samples")
        return int(newest)

    def sample_pages(
        self, clause: str = "TRUE", args: Sequence[Any] = (), ids: Sequence[int] | None = None
    ) -> Iterator[list[Row]]:
        """The rows of samples in the order of their ids: of these rising ids, or all that are there now."""
        if ids is None:
            blocks, within = [self.last_id()], "id <= ?"
        else:
            blocks = [self.listed(ids[start : start + PAGE_ROWS]) for start in range(0, len(ids), PAGE_ROWS)]
            within = "id IN (SELECT value FROM json_each(?))"
        for block in blocks:
            sql = f"{SELECT} WHERE ({clause}) AND {within} AND id > ? ORDER BY id"
            yield from self.pages(sql, [*args, block], rows=PAGE_ROWS)

    def samples_query(self, ids: Sequence[int]) -> Statement:
        """The rows of the samples of these ids, redone ones too."""
        return f"{SELECT} WHERE id IN (SELECT value FROM json_each(?))", [self.listed(ids)]

    def valid_samples(self, rows: Iterable[Row], run: str | None = None) -> dict[int, Any]:
        """The samples of rows, by id; damaged ones are left out.

        With `run` the staleness of those of other runs is unknown, whose versions count other steps.
        """
        valid = [row for row in rows if is_valid_sample(row)]
        if run is not None:
            valid = [row if run_of(row) == run else without_version(row) for row in valid]
        return dict(zip([row[0] for row in valid], from_rows(valid), strict=True))

    def entries(self, table: str, clause: str, args: Sequence[Any]) -> list[Row]:
        """The rows of one of `LEDGERS`, without their checksums, and with texts as they were given.

        Raises `Refused` for one that isn't as it was written.
        """
        return self.checked(table, self.run(*self.entries_query(table, clause, args)))

    def entries_query(self, table: str, clause: str = "TRUE", args: Sequence[Any] = ()) -> Statement:
        columns = ", ".join(LEDGERS[table])
        return f"SELECT rowid, {columns}, checksum FROM {table} WHERE {clause} ORDER BY rowid", args

    def checked(self, table: str, rows: Sequence[Row]) -> list[Row]:
        """`entries`, by the rows of their query."""
        damaged = [row[0] for row in rows if not is_valid(row[1:])]
        if damaged:
            raise self.refusal(Damage(**{table: damaged}))
        return [tuple(map(decode_text, row[1:-1])) for row in rows]

    def put(self, table: str, rows: Iterable[Row]) -> None:
        """Write rows of one of `LEDGERS`, in place of those with the same key where it has one."""
        values = [tuple(map(encode_text, row)) for row in rows]
        columns, key = (*LEDGERS[table], "checksum"), KEYS.get(table, ())
        self.insert(table, columns, [(*row, checksum(row)) for row in values], key)

    def check_ids(self, ids: list[int]) -> None:
        """Raise `Refused` unless there are samples of all these ids."""
        sql = "SELECT id FROM samples WHERE id IN (SELECT value FROM json_each(?))"
        stored = {i for (i,) in self.run(sql, [self.listed(ids)])}
        missing = [str(i) for i in ids if i not in stored]
        if missing:
            raise Refused(f"{self.path}: no sample has the id {', '.join(missing[:3])}")

    def note_changes(self, ids: Iterable[int]) -> None:
        """Record that what groups may be drawn of these samples' changed."""
        self.run(
            "INSERT INTO changes (prompt_id) SELECT DISTINCT prompt_id FROM samples "
            "WHERE id IN (SELECT value FROM json_each(?))",
            [self.listed(ids)],
        )

    def note_groups(self, prompt_ids: Iterable[Any]) -> None:
        """The same of groups."""
        self.insert("changes", ("prompt_id",), [(prompt_id,) for prompt_id in prompt_ids])


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
            self.close()
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
    def transaction(self, *, durable: bool = True) -> Iterator[None]:
        if self._connection.in_transaction:
            yield
            return
        if not durable:
            self.run("PRAGMA synchronous = NORMAL")
        try:
            self.run("BEGIN IMMEDIATE")
            yield
            self.run("COMMIT")
        except BaseException:
            self._connection.rollback()
            raise
        finally:
            if not durable:
                self.run("PRAGMA synchronous = FULL")

    def listed(self, values: Iterable[Any]) -> Any:
        return json.dumps(list(values), default=int)  # NumPy's integers too

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
            raise Refused(f"{self.path}: {NOT_64_BITS}: {error}") from None
        except UnicodeError as error:  # in SQLite's own message, or in damaged text that is written again
            raise self._damaged() from error
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_IOERR and shutil.disk_usage(self.path.parent).free < SHARED_MEMORY:
                code = sqlite3.SQLITE_FULL  # of the file that holds the index of the log
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


SHARED_MEMORY = 32 << 10  # bytes by which SQLite makes its index of the write-ahead log larger
_DAMAGED = "the store's file is damaged. {way_out}"
_REASONS = {
    sqlite3.SQLITE_BUSY: BUSY,
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
        raise Refused(f"{path}: {NO_STORE}")
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
