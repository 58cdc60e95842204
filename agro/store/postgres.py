"""A store in PostgreSQL, for processes on several hosts: the same tables and SQL as those of SQLite's file.

Writers take turns, as with SQLite, by the store's advisory lock, so that ids rise in the order in which
samples become visible. Cursors, orders and rewinding depend on this. A method reads without the lock. Its
writes are then sent in one round trip, from BEGIN to COMMIT, which takes the lock and fails if another
process has written since the first read. The method is then repeated with the lock from its beginning;
methods that read what they wrote (a rewind, `Store.transaction`) always work like this. Nobody waits for a
client that is away: a process that waits for longer than `HOLD` ends the connection of a client that has the
lock and doesn't use it.

A lost connection is made again. A statement outside of a transaction is repeated, and so is a method that
writes, unless its transaction was committed: each leaves its number in the table `writers`.
"""

from __future__ import annotations

import logging
import re
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn
from urllib.parse import unquote

from agro.errors import Lost, Refused, Unwritable

try:
    import psycopg
except ImportError:
    raise Refused(
        "postgresql://: psycopg isn't installed. What to do: pip install 'psycopg[binary]>=3.2,<4'"
    ) from None

from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from agro.store.database import BUSY, NO_STORE, NOT_64_BITS, SCHEMA, Database, Statement, T
from agro.store.postgres_dialect import (
    DELETE_UNUSED_IDS,
    IS_MADE,
    TEXT,
    Column,
    definitions,
    long_ids,
    register,
    restored,
    rows_of,
    to_postgres,
)
from agro.store.sample_rows import in_place

logging.getLogger("psycopg").setLevel(logging.ERROR)  # it warns about lost connections
PATIENCE = 120.0  # seconds that a server may be away
OPEN_SECONDS = 10.0  # the same while a store is opened
RETRY_SECONDS = 0.2
AT_ONCE = 16  # statements that write, per round trip
HOLD = 3.0  # seconds that a client may have the lock without using it
LONGEST_HOLD = 48.0  # for a client that was ended and tries again: it may compute for longer
CLIENTS_SECONDS = 7 * 86400.0  # for which a client's number is retained
NETWORK = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "connect_timeout": 5}
SESSION = {
    "random_page_cost": "1.1",  # few rows are read from any table, even a small one: by an index
    "jit": "off",
    "client_encoding": "UTF8",
    # The server also ends clients that were cut off while nobody waits.
    "idle_in_transaction_session_timeout": "60s",
    "tcp_user_timeout": "10000",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
}
# Ends clients that have the lock and should send a statement or receive an answer.
EVICT = """
SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
  AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended('agro store ' || current_schema(), 0)
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (a.state LIKE 'idle%' OR a.wait_event_type = 'Client')
  AND clock_timestamp() - a.state_change
    > make_interval(secs => coalesce(substring(a.application_name FROM '^agro ([0-9.]+)$')::float, 3))
"""
# The last one is raised for a statement that the server lacks after a failed pipeline.
_GONE = (errors.AdminShutdown, errors.CrashShutdown, errors.CannotConnectNow, errors.InvalidSqlStatementName)
# What a server reports when it will never open the connection; libpq doesn't pass on its code.
REFUSAL = re.compile(
    r"FATAL: .*(password|pg_hba\.conf|does not exist)|no password supplied|not support SSL|certificate"
)


class Conflict(Refused):
    """Another process wrote between the reads of a transaction and its lock."""


class NotMade(Refused):
    """The store doesn't exist."""


class PostgresDatabase(Database):
    """A connection to a store, postgresql://USER@HOST/DATABASE?schema=NAME (default schema: "agro")."""

    def __init__(self, url: str, *, read_only: bool, create: bool, timeout: float) -> None:
        self.path, self.read_only, self.timeout = url, read_only, timeout
        self._read_url(url)
        self.locks_first = False
        self.trips, self._hold = 0, HOLD  # round trips to the server
        self._repeating = False  # whether the caller repeats what is lost
        self._reads_first = False  # whether a transaction reads before it takes the lock
        self._in_doubt = False  # whether an error may be due to reads without the lock
        self._open, self._locked, self._durable = False, False, True
        self._client, self._number = uuid.uuid4().hex, 0  # identify this connection's transactions
        self._version: int | None = None  # the store's at a transaction's first read
        self._pending: list[Statement] = []  # writes that a transaction has yet to send
        self._late: list[Statement] = []  # a transaction to send with the next statement
        self._ids: dict[str, str] = {}  # long ids of the last rows, by digest
        self._connection = self._connected(OPEN_SECONDS)
        try:
            self._prepare(create)
        except BaseException:
            self.close()
            raise

    def _read_url(self, url: str) -> None:
        base, _, query = url.partition("?")
        items = query.split("&")
        remaining = "&".join(item for item in items if not item.startswith("schema="))
        schemas = [unquote(item[7:]) for item in items if item.startswith("schema=")]
        self.schema = schemas[-1] if schemas else "agro"
        shown = re.sub("//.*@", "//", url).partition("?")[0]  # a password may have a question mark
        try:
            self._parameters: dict[str, Any] = conninfo_to_dict(f"{base}?{remaining}" if remaining else base)
        except psycopg.ProgrammingError as error:
            reason = str(error).strip()
            if not reason.startswith("invalid URI query parameter"):
                reason = re.sub('".*"', "…", reason)  # it may quote a password
            raise Refused(
                f"{shown}: expected postgresql://USER@HOST/DATABASE?schema=NAME, where more parameters are "
                f"those of libpq: {reason}"
            ) from None
        if self._parameters.keys() & {"password", "sslpassword"}:
            raise Refused(
                f"{shown}: expected a URL without a password, which would end up in the run's folder and in "
                "lists of processes. What to do: PGPASSWORD in the environment, or a line in ~/.pgpass"
            )
        if not re.fullmatch(r"(?!pg_|information_schema)[A-Za-z_][A-Za-z0-9_]{0,62}", self.schema):
            raise Refused(f"{url}: expected a plain name as schema, got {self.schema!r}")

    def _connected(self, seconds: float) -> psycopg.Connection[Any]:
        """Connect once the server answers. Raises `Lost` if it is away for longer than `seconds`."""
        session = {**SESSION, "search_path": f'"{self.schema}"', "lock_timeout": f"{HOLD:g}s"}
        session["default_transaction_read_only"] = "on" if self.read_only else "off"
        more = " ".join(f"-c {name}={value}" for name, value in session.items())
        options = f"{self._parameters.get('options', '')} {more}"
        identity = {"options": options, "application_name": f"agro {self._hold:g}"}
        parameters: Any = {**NETWORK, **self._parameters, **identity}
        deadline = time.monotonic() + seconds
        while True:
            try:
                connection = psycopg.connect(autocommit=True, cursor_factory=psycopg.RawCursor, **parameters)
                break
            except psycopg.OperationalError as error:
                if REFUSAL.search(str(error)):
                    raise Refused(
                        f"{self.path}: {error}. What to do: check the user and the database in the URL, and "
                        "PGPASSWORD or ~/.pgpass"
                    ) from None
                if time.monotonic() > deadline:
                    raise Lost(f"{self.path}: no PostgreSQL answers: {error}") from None
            time.sleep(RETRY_SECONDS)
        self._pid = connection.info.backend_pid
        register(connection.adapters)
        return connection

    def _prepare(self, create: bool) -> None:
        [(pid,)] = self.run("SELECT pg_backend_pid()")
        is_made = self.run(IS_MADE, [self.schema])
        if pid != self._pid:
            raise Refused(
                f"{self.path}: expected PostgreSQL itself, got a pool of connections such as PgBouncer, "
                "which doesn't keep a session's settings. What to do: give the server's own address"
            )
        if not is_made and (self.read_only or not create):
            raise NotMade(f"{self.path}: {NO_STORE}")
        try:
            if not is_made:
                self._make()
            [(schema,)] = self.run("SELECT schema FROM about LIMIT 1") or [(None,)]
        except (errors.UndefinedColumn, errors.UndefinedTable):
            raise Refused(
                f"{self.path}: expected a schema of a store, got one with other tables. What to do: give "
                "another ?schema=NAME"
            ) from None
        if schema != SCHEMA:
            raise Refused(
                f"{self.path}: expected a store of schema {SCHEMA}, got {schema}: another version of agro "
                "wrote it. What to do: agro store copy it to a file with that version, and copy the file to "
                "another ?schema=NAME with this one"
            )
        if not self.read_only:
            self.run("DELETE FROM writers WHERE written < ?", [self.now() - CLIENTS_SECONDS])

    def _make(self) -> None:
        lock = f"SELECT CAST(pg_advisory_xact_lock(hashtextextended('agro store {self.schema}', 0)) AS TEXT)"
        statements = ["BEGIN", "SET LOCAL lock_timeout = 0", lock, *definitions(self.schema), "COMMIT"]
        try:
            self._trip([(statement, ()) for statement in statements])
        except (errors.DuplicateTable, errors.DuplicateFunction):  # another process was faster
            self._rollback()

    def close(self) -> None:
        with suppress(psycopg.Error):
            self._connection.close()

    def reconnect(self) -> None:
        """Wait for the server. Raises `Lost` if it is away for longer than `PATIENCE`."""
        self.close()
        self._connection = self._connected(PATIENCE)

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[None]:
        if self._open:
            yield
            return
        self._flush()
        self._open, self._locked, self._durable = True, False, durable
        self._number += 1
        self._version, self._in_doubt = None, False
        try:
            yield
            self._commit()
        except BaseException:
            self._in_doubt = self._reads_alone
            self._rollback()
            raise
        finally:
            self._open, self._pending = False, []

    @property
    def _reads_alone(self) -> bool:
        """Whether a transaction has read without taking the lock."""
        return self._version is not None and not self._locked

    def _commit(self) -> None:
        if not self._locked and not self._pending:
            return
        end: Statement = ("COMMIT", ())
        if not self._durable and not self._locked and self._reads_first:
            self._late = [*self._pending, end]  # the next reader wants to see it
            return
        try:
            self._send([end])
        except Lost:
            if not self._is_committed():
                raise
        self._hold = HOLD

    def _rollback(self) -> None:
        self._pending = []
        if not self._connection.closed:
            # A statement that psycopg hasn't seen, so that it forgets prepared statements and failed ones.
            with suppress(psycopg.Error):
                self._connection.execute(f"ROLLBACK -- {self.trips}")

    def _is_committed(self) -> bool:
        """Whether a transaction with an unanswered COMMIT was committed; one in progress is ended."""
        lost, self._open = self._pid, False
        self.reconnect()
        self.run(f"SELECT pg_terminate_backend({lost}, 10000)")
        return self.run("SELECT number FROM writers WHERE client = ?", [self._client]) == [(self._number,)]

    @contextmanager
    def erasing(self) -> Iterator[None]:
        """Remove deleted rows from the tables' files; log, backups and replicas lose them on rotation."""
        yield
        self.run(DELETE_UNUSED_IDS)
        for table in ("samples", "changes", "identities", "pairs", "reference_logp", "long_ids"):
            self.run(f"VACUUM {table}")

    def listed(self, values: Iterable[Any]) -> Any:
        listed = list(values)
        kind = {int: "BIGINT", str: "TEXT"}.get(type(listed[0])) if listed else None
        return Column.of(kind, listed) if kind else listed

    def renumber(self, tables: Sequence[str]) -> None:
        for table in tables:
            self.run(f"SELECT setval(pg_get_serial_sequence('{table}', 'rowid'), max(rowid)) FROM {table}")

    def analyze(self, table: str) -> None:
        self.run(f"ANALYZE {table}")

    def now(self) -> float:
        [(seconds,)] = self.run("SELECT CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)")
        return float(seconds)

    def repeat(self, call: Callable[[], T]) -> T:
        """Repeat if the connection was lost before a commit; and, with the lock from the beginning, if
        another process wrote between the reads and the lock."""
        if self._open or self._repeating:  # repeat all of it, or nothing
            return call()
        self._repeating = self._reads_first = True
        try:
            while True:
                try:
                    result = call()
                    self._flush()
                    return result
                except Lost:
                    self.reconnect()
                except Refused as error:
                    if not (isinstance(error, Conflict) or self._in_doubt):
                        raise
                    self._reads_first = self._in_doubt = False
        finally:
            self._repeating = self._reads_first = False

    def way_out(self) -> str:
        return "What to do: go back to a backup of the server"

    def run(self, sql: str, args: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        statement, has_rows = to_postgres(sql)
        if self._open and not has_rows:
            self._pending.append((statement, args))
            if len(self._pending) >= AT_ONCE:
                self._send([])
            return []
        return self.run_all((sql, args))[0]

    def run_all(self, *statements: Statement) -> list[list[tuple[Any, ...]]]:
        batch = [(to_postgres(sql)[0], args) for sql, args in statements]
        while True:
            is_part = self._open or self._late  # of what must be repeated as a whole
            try:
                return self._send(batch)
            except Lost:
                if is_part:
                    raise
                self.reconnect()

    def insert(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], key: Sequence[str] = ()
    ) -> None:
        if table == "samples" and (long := long_ids(columns, rows)):
            self.insert("long_ids", ("digest", "text"), long, key=("digest",))
        if rows:
            insert = f"INSERT INTO {table} ({', '.join(columns)}) SELECT * FROM {rows_of(columns)}"
            self.run(f"{insert}{in_place(columns, key)}", Column.each(columns, rows))

    def update(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            changes = ", ".join(f"{name} = new.{name}" for name in columns)
            every = (*columns, "id")
            source = f"{rows_of(every)} AS new ({', '.join(every)})"
            sql = f"UPDATE {table} SET {changes} FROM {source} WHERE {table}.id = new.id"
            self.run(sql, Column.each(every, rows))

    def _flush(self) -> None:
        """Send what waits for the next statement."""
        if self._late:
            self._send([])

    def _send(self, statements: Sequence[Statement]) -> list[list[tuple[Any, ...]]]:
        """Send statements together with the transaction's pending writes, and return the rows of each."""
        late, self._late = self._late, []
        batch, self._pending = [*self._pending, *statements], []
        if late:
            try:
                results = self._begin([*late, *statements])
            except BaseException:
                self._rollback()
                raise
            self._locked = False
        elif not self._open or self._locked:
            results = self._trip(batch)
        elif self._reads_first and len(batch) == len(statements):
            look = [] if self._version is not None else [("SELECT version FROM about", ())]
            results = self._trip([*look, *batch])
            if look:
                [(self._version,)] = results[0]
        else:
            results = self._begin(batch)
        return results[len(results) - len(statements) :]

    def _begin(self, batch: list[Statement]) -> list[list[tuple[Any, ...]]]:
        """Wait for the lock, and send the first statements of a transaction with it."""
        turn = [self._version, self._client, self._number, self._durable]
        start: list[Statement] = [("BEGIN", ()), ("SELECT CAST(begin_turn($1, $2, $3, $4) AS TEXT)", turn)]
        sooner: list[Statement] = [("SET LOCAL lock_timeout = '500ms'", ())]
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                results = self._trip([*start, *batch])
            except errors.LockNotAvailable:
                self._rollback()
                start[1:1] = sooner  # from now on, notice at once who is away
                sooner = []
                if time.monotonic() > deadline:
                    raise Refused(f"{self.path}: {BUSY.format(timeout=self.timeout)}") from None
                self._trip([(EVICT, ())])
            except errors.SerializationFailure:
                raise Conflict(f"{self.path}: another process wrote at the same time; try again") from None
            else:
                self._locked = True
                return results

    def _trip(self, batch: Sequence[Statement]) -> list[list[tuple[Any, ...]]]:
        self.trips += 1
        execute = partial(self._connection.execute, binary=True)
        try:
            if len(batch) == 1:
                cursors = [execute(*batch[0])]
            else:
                with self._connection.pipeline():
                    cursors = [execute(sql, args) for sql, args in batch]
            rows = []
            for cursor in cursors:
                result: Any = cursor.pgresult
                texts = [i for i in range(result.nfields) if result.ftype(i) == TEXT]
                rows.append(restored(cursor.fetchall(), texts, self._long_ids) if result.nfields else [])
            return rows
        except (errors.LockNotAvailable, errors.SerializationFailure):
            raise
        except (psycopg.Error, OverflowError, struct.error) as error:
            self._refuse(error)

    def _long_ids(self, digests: set[str]) -> dict[str, str]:
        if not digests <= self._ids.keys():
            sql = "SELECT digest, text FROM long_ids WHERE digest = ANY($1)"
            self._ids = dict(self._connection.execute(sql, [list(digests)], binary=True).fetchall())
        return self._ids

    def _refuse(self, error: Exception) -> NoReturn:
        """Translate an error for users; one that they can't help is raised unchanged."""
        if self._connection.closed or isinstance(error, _GONE):
            self.close()
            if self._open and isinstance(error, errors.AdminShutdown):
                self._hold = min(2 * self._hold, LONGEST_HOLD)
            raise Lost(f"{self.path}: the connection was lost: {error}") from error
        if isinstance(error, errors.NumericValueOutOfRange | OverflowError | struct.error):
            raise Refused(f"{self.path}: {NOT_64_BITS}: {error}") from None
        if isinstance(error, errors.ReadOnlySqlTransaction | errors.InsufficientPrivilege):
            raise Unwritable(f"{self.path}: the store can only be read: {error}") from error
        if isinstance(error, errors.DiskFull):
            raise Unwritable(f"{self.path}: the server's disk is full; nothing was stored") from error
        raise error


def is_made(url: str) -> bool:
    """Whether the store exists. Raises `Refused` if no server answers."""
    with suppress(NotMade):
        PostgresDatabase(url, read_only=True, create=False, timeout=OPEN_SECONDS).close()
        return True
    return False
