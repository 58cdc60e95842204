"""A store's tables, whose rows have checksums, and what its dialects, SQLite and PostgreSQL, share.

SQL is written once, in SQLite's dialect; `agro.store.postgres` translates the few words that differ.
Arguments are plain texts; rows have them as they are stored, see `decode_text`.
"""

from __future__ import annotations

import json
import operator
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
Statement = tuple[str, Sequence[Any]]  # SQL, and its arguments
SCHEMA = 10
BUSY_TIMEOUT = 30.0  # seconds that a writer waits for another one
PAGE_ROWS = 256  # samples per page
PAGE_BYTES = 1 << 24  # a page ends when its rows have more
PAGE_GROUPS = 256
PAGE_RESPONSES = 4096  # a page of groups ends when these have more
PAGE_ENTRIES = 4096  # rows of small tables and of summaries, per page

# `reward` has no declared type: REAL would store -0.0 as 0. Each piece of an episode is a row. samples_draw
# has all columns that grouping and drawing use, so neither reads the rows with their blobs. group_uses counts
# the steps in draws, requests can be derived from samples and draws, and reference_logp can be computed
# again. changes lists the latest groups whose stored samples or uses changed, for the orders of groups
# (agro.store.candidates): in orders, `sample` and `change` are the newest ones that an order has seen, and
# `version` is the learner's at its last draw. imports has the files, with `options` as JSON, and an empty
# `name` if the whole file was forgotten; identities has the responses that other files may repeat, and where
# they come from.
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
KEYS = {  # keys of the tables that have one
    "group_uses": ("run", "prompt_id"),
    "requests": ("run", "number"),
    "imports": ("file",),
    "identities": ("identity",),
}
CACHED = ("sample", "key", "run", "step", "logp")  # the same for reference_logp, which isn't a ledger
DERIVED = ("group_uses", "requests")  # tables that can be derived from samples and draws
# Messages of both dialects.
NO_STORE = "no such store; make one with `agro import` or `agro sample`, or give another path"
BUSY = "another process has been writing for more than {timeout:g} s; try again when it is done"
NOT_64_BITS = "expected integers of 64 bits"
APPLICATION_ID = int.from_bytes(b"AGRO", "big")
SHORTEST = 512  # bytes of a nonempty file: one page
CACHE = 32 << 10  # KiB of pages in memory: with SQLite's 2 MB, rows of a large store cost a quarter more


@dataclass(frozen=True)
class Damage:
    """What isn't as it was written in a store; empty, and false, for an intact one."""

    structure: list[str] = field(default_factory=list)  # what SQLite reports about its pages and indexes
    samples: list[int] = field(default_factory=list)  # ids
    pairs: list[int] = field(default_factory=list)  # rowids, like the following ones
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
    """Repeat a writing method of a part of a store, as `Database.repeat` does."""

    @wraps(method)
    def call(part: Part, /, *args: P.args, **kwargs: P.kwargs) -> T:
        repeatable: Any = [list(each) if isinstance(each, Iterator) else each for each in args]
        named: Any = {name: list(x) if isinstance(x, Iterator) else x for name, x in kwargs.items()}
        return part._db.repeat(lambda: method(part, *repeatable, **named))

    return call


class Database(ABC):
    """One connection to a store. Readers continue while one process writes."""

    path: Path | str
    read_only: bool
    locks_first = True  # whether a transaction begins with the lock, even one that only reads
    _checked: frozenset[str] = frozenset()  # parts of `Damage` that are known to be intact

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def transaction(self, *, durable: bool = True) -> AbstractContextManager[None]:
        """Store what is written inside completely and durably, or not at all. Inner ones join the outer.
        `durable`: False for what can be made again, which is on disk with the next durable write."""

    @abstractmethod
    def run(self, sql: str, args: Sequence[Any] = ()) -> list[Row]:
        """Run a statement, and return its rows."""

    def run_all(self, *statements: Statement) -> list[list[Row]]:
        """Run several independent statements, and return the rows of each."""
        return [self.run(sql, args) for sql, args in statements]

    def pages(self, sql: str, args: Sequence[Any] = (), *, rows: int) -> Iterator[list[Row]]:
        """Yield the rows of a query of any size in pages of `rows`. `sql` ends with the condition and the
        order of its first column: `id > ? ORDER BY id`. Nothing stays open between two pages, so a caller may
        write meanwhile, or stop early."""
        cursor, has_more = 0, True
        while has_more:
            page, has_more = self.fetch(f"{sql} LIMIT {rows}", [*args, cursor], rows)
            if page:
                cursor = page[-1][0]
                yield page

    def fetch(self, sql: str, args: Sequence[Any], rows: int) -> tuple[list[Row], bool]:
        """At most `rows` rows, and whether there may be more."""
        page = self.run(sql, args)
        return page, len(page) == rows

    @abstractmethod
    def insert(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], key: Sequence[str] = ()
    ) -> None:
        """Add rows, in place of those with the same `key` if the table has one."""

    @abstractmethod
    def update(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Set columns of the rows with the ids that are the last values of `rows`."""

    @abstractmethod
    def listed(self, values: Iterable[Any]) -> Any:
        """The argument of `IN (SELECT value FROM json_each(?))`."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since the epoch, by the clock of the store's host."""

    @abstractmethod
    def erasing(self) -> AbstractContextManager[None]:
        """Overwrite what is deleted inside."""

    def analyze(self, table: str) -> None:
        """Tell the query planner about many new rows, if it doesn't notice them itself."""
        return

    def renumber(self, tables: Sequence[str]) -> None:
        """Number the next rows of tables after those that were added with numbers of their own."""
        return

    def repeat(self, call: Callable[[], T]) -> T:
        """Call what reads and writes, and again if its writes failed for a transient reason."""
        return call()

    @abstractmethod
    def way_out(self) -> str:
        """What to do about a damaged store."""

    def check(self) -> None:
        """Raise `Refused` if the file's structure, its indexes, draws, their counts or requests are damaged.

        Samples are checked when they are read, commits by `Ledger.commits`. Takes about a second per GB.
        """
        self._checked = frozenset()
        self.check_once("structure", "draws", "group_uses", "requests")

    def check_once(self, *parts: str) -> None:
        """Raise `Refused` if these parts of `Damage` are damaged; each is checked once per connection.

        From a file with a damaged structure, SQLite may silently return fewer rows than there are.
        """
        for part in parts:
            if part not in self._checked:
                if damage := self.damaged(part):
                    raise self.refusal(Damage(**{part: damage}))
                self._checked |= {part}

    def damage(self) -> Damage:
        """Everything that isn't as it was written. Reads the whole store."""
        return Damage(**{part.name: self.damaged(part.name) for part in fields(Damage)})

    def damaged(self, part: str) -> list[Any]:
        """What isn't as it was written in a part of `Damage`: rowids, or the ids of samples."""
        if part == "structure":
            return self.damaged_structure()
        if part == "samples":
            return [row[0] for page in self.sample_pages() for row in page if not is_valid_sample(row)]
        return [row[0] for row in self.run(*self.entries_query(part)) if not is_valid(row[1:])]

    def damaged_structure(self) -> list[str]:
        """What is wrong with the pages and indexes."""
        return []

    def refusal(self, damage: Damage) -> Refused:
        return Refused(f"{self.path}: {damage}. {self.way_out()}")

    def last_id(self) -> int:
        """The id of the sample that was added last; 0 if there is none."""
        [(newest,)] = self.run("SELECT coalesce(max(id), 0) FROM samples")
        return int(newest)

    def sample_pages(
        self, clause: str = "TRUE", args: Sequence[Any] = (), ids: Sequence[int] | None = None
    ) -> Iterator[list[Row]]:
        """The rows of samples in the order of their ids: of the ascending `ids`, or all that exist now."""
        if ids is None:
            blocks, within = [self.last_id()], "id <= ?"
        else:
            blocks = [self.listed(ids[start : start + PAGE_ROWS]) for start in range(0, len(ids), PAGE_ROWS)]
            within = "id IN (SELECT value FROM json_each(?))"
        for block in blocks:
            sql = f"{SELECT} WHERE ({clause}) AND {within} AND id > ? ORDER BY id"
            yield from self.pages(sql, [*args, block], rows=PAGE_ROWS)

    def samples_query(self, ids: Sequence[int]) -> Statement:
        """The query for the rows of the samples with these ids, redone ones too."""
        return f"{SELECT} WHERE id IN (SELECT value FROM json_each(?))", [self.listed(ids)]

    def valid_samples(self, rows: Iterable[Row], run: str | None = None) -> dict[int, Any]:
        """The samples of rows, by id; damaged ones are dropped.

        With `run`, the staleness of other runs' samples is unknown: their versions count other steps.
        """
        valid = [row for row in rows if is_valid_sample(row)]
        if run is not None:
            valid = [row if run_of(row) == run else without_version(row) for row in valid]
        return dict(zip([row[0] for row in valid], from_rows(valid), strict=True))

    def entries(self, table: str, clause: str, args: Sequence[Any]) -> list[Row]:
        """The rows of one of `LEDGERS`, without checksums and with decoded texts.

        Raises `Refused` for a damaged one.
        """
        return self.checked(table, self.run(*self.entries_query(table, clause, args)))

    def entries_query(self, table: str, clause: str = "TRUE", args: Sequence[Any] = ()) -> Statement:
        columns = ", ".join(LEDGERS[table])
        return f"SELECT rowid, {columns}, checksum FROM {table} WHERE {clause} ORDER BY rowid", args

    def checked(self, table: str, rows: Sequence[Row]) -> list[Row]:
        """`entries`, from the rows of their query."""
        damaged = [row[0] for row in rows if not is_valid(row[1:])]
        if damaged:
            raise self.refusal(Damage(**{table: damaged}))
        return [tuple(map(decode_text, row[1:-1])) for row in rows]

    def put(self, table: str, rows: Iterable[Row]) -> None:
        """Write rows of one of `LEDGERS`, in place of those with the same key if it has one."""
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
        """Record a change of the groups of these samples, which affects what may be drawn."""
        self.run(
            "INSERT INTO changes (prompt_id) SELECT DISTINCT prompt_id FROM samples "
            "WHERE id IN (SELECT value FROM json_each(?))",
            [self.listed(ids)],
        )

    def note_groups(self, prompt_ids: Iterable[Any]) -> None:
        """Record a change of these groups."""
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
        """Close, and remove the log's files: a reader creates them too, but only a writer removes them."""
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
        return json.dumps(list(values), default=operator.index)  # NumPy's integers too

    def now(self) -> float:
        return time.time()

    def damaged_structure(self) -> list[str]:
        lines = [" ".join(str(line).split()) for (line,) in self.run("PRAGMA integrity_check(10)")]
        return [] if lines == ["ok"] else lines

    @contextmanager
    def erasing(self) -> Iterator[None]:
        """Overwrite what is deleted, without a write-ahead log, which SQLite allows only to the only
        connection. Raises `Refused` if another process has the store open."""
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

    def fetch(self, sql: str, args: Sequence[Any], rows: int) -> tuple[list[Row], bool]:
        """Fewer rows if they reach `PAGE_BYTES`."""
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
        """Translate SQLite's errors for users; errors that they can't help are raised unchanged."""
        try:
            yield
        except OverflowError as error:
            raise Refused(f"{self.path}: {NOT_64_BITS}: {error}") from None
        except UnicodeError as error:  # from SQLite's own message, or damaged text that is written again
            raise self._damaged() from error
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_IOERR and shutil.disk_usage(self.path.parent).free < SHARED_MEMORY:
                code = sqlite3.SQLITE_FULL  # no room for the file with the log's index
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
            # WAL can't create its side files in a read-only folder; without a -wal file, there is no writer.
            self._connection.close()
            self._connection = self._connect("ro", "immutable=1")
        if not self.read_only and create and self._is_empty():
            with self.transaction():
                if self._is_empty():  # unless another process was faster
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

        SQLite needs exclusive access for this and doesn't wait for it, so this method does.
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
    """A number in a JSON object; None if it has none, or the text is damaged."""
    try:
        value = json.loads(text).get(key) if text != "{}" else None
    except (TypeError, ValueError, AttributeError):
        return None
    return value if type(value) is int and abs(value) < 2**63 else None


def read_text(value: bytes) -> str:
    """Decode text, even damaged text, so that its checksum can be compared."""
    return value.decode("utf-8", "surrogateescape")


SHARED_MEMORY = 32 << 10  # bytes by which SQLite grows its index of the write-ahead log
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
        "the disk is full; make room and try again. Nothing was stored; earlier writes are intact"
    ),
    sqlite3.SQLITE_IOERR: "the disk can't be read or written (is it full?); earlier writes are intact",
    sqlite3.SQLITE_CANTOPEN: "the store can't be opened; check that its folder is writable",
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
    exists = path.exists()
    if not exists and (read_only or not create):
        raise Refused(f"{path}: {NO_STORE}")
    if not exists and not path.parent.is_dir():
        raise Refused(f"{path}: the folder {path.parent} doesn't exist; make it first")
    if exists and not _allowed(path, os.R_OK):
        raise Refused(f"{path}: you may not read this file")
    writable = _allowed(path.parent, os.W_OK) and (not exists or _allowed(path, os.W_OK))
    if not read_only and not writable:
        raise Refused(f"{path}: the file or its folder can only be read; a store to write to needs both")
    # SQLite itself would take a short file for an empty one, and overwrite it. The file isn't read here:
    # closing it would release the locks of this process's other connections (POSIX), and another process that
    # closes the store would then delete their write-ahead log.
    if exists and 0 < path.stat().st_size < SHORTEST:
        raise Refused(f"{path}: {_REASONS[sqlite3.SQLITE_NOTADB]}")


def _allowed(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)
