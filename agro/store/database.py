"""The tables of a store, and what its two dialects have in common: a file of SQLite, and PostgreSQL.

SQL is written once, in SQLite's dialect; `agro.store.postgres` translates the few words that differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self, TypeVar

P = TypeVar("P")
Row = tuple[Any, ...]
Statement = tuple[str, Sequence[Any]]  # and its arguments
SCHEMA = 9
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
# groups (agro.store.candidates), whose tables are made when a run draws. imports has the files, `options` as
# JSON, `name` empty where all of the file was forgotten; identities the responses that other files may
# repeat, and where they come from.
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
DERIVED = ("group_uses", "requests")  # those that can be made again from samples and draws


class Database(ABC):
    """One connection to a store. Readers go on while one process writes."""

    path: Path | str
    read_only: bool

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def transaction(self, *, durable: bool = True, temporary: bool = False) -> AbstractContextManager[None]:
        """What is written inside is stored completely, and durably, or not at all. Inner ones join the
        outer. `durable`: False for what can be made again; it is on the disk with the next other write.
        `temporary`: where only tables of this connection are written."""

    def looking(self) -> AbstractContextManager[None]:
        """What is read inside before a transaction begins; part of it, where the dialect can tell in the end
        whether it still holds."""
        return nullcontext()

    @property
    @abstractmethod
    def in_transaction(self) -> bool: ...

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
    def has(self, table: str, schema: str = "main") -> bool: ...

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

    def damage(self) -> list[str]:
        """What is off in the pages and indexes."""
        return []

    def repeating(self, part: P) -> P:
        """A part of a store, whose methods are repeated where the connection was lost."""
        return part

    @abstractmethod
    def way_out(self) -> str:
        """What to do about a damaged store."""
