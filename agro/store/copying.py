"""A store written into a new one: all of it, from a file to PostgreSQL or back, or what can be read of a file
that is damaged. Rows stay as they are, with ids and checksums."""

from __future__ import annotations

import math
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.files import writing
from agro.store.database import DERIVED, LEDGERS, PAGE_ENTRIES, PAGE_ROWS, Row, first_of
from agro.store.location import Location, url_of
from agro.store.sample_rows import SAMPLE, decode_text, insert_into, is_valid, is_valid_sample
from agro.store.split import TABLE as CLUSTERS
from agro.store.sqlite import columns_fit, read_text
from agro.store.store import Store, opened

BLOCK = 1024  # rowids per query
PAGE_SIZE = 4096  # of every store: SQLite's own choice when it makes one
SMALLEST_ROW = 32  # bytes, pages and indexes included
# Fields of a store's first page; see https://www.sqlite.org/fileformat2.html#the_database_header.
CHANGE_COUNTER = slice(24, 28)
PAGE_COUNT = slice(28, 32)
PAGE_COUNT_VALID_FOR = slice(92, 96)  # the change counter with which SQLite believes the number of pages
NOTHING = "{path}: no sample of a store can be read in it; go back to a copy"
# Columns by table; the first is samples, which others name. Of a damaged store requests and the use of groups
# are made from other tables, and cached log-probs are left out.
COLUMNS: dict[str, tuple[str, ...]] = {"samples": SAMPLE}
COLUMNS |= {table: ("rowid", *LEDGERS[table], "checksum") for table in LEDGERS}
COLUMNS["reference_logp"] = ("rowid", "sample", "key", "run", "step", "logp", "checksum")
RECOVERED = {name: names for name, names in COLUMNS.items() if name not in (*DERIVED, "reference_logp")}
SAMPLES_OF = {"pairs": ("winner", "loser"), "draws": ("sample",)}  # columns of small tables that name samples
# Ways to the last rowid of a table besides its own pages: by an index, and by other tables that name it.
LAST_ROWIDS = {
    "samples": (
        "SELECT max(id) FROM samples INDEXED BY samples_state WHERE state >= 0",
        "SELECT max(sample) FROM draws",
        "SELECT max(cursor) FROM commits",
    ),
    "draws": ("SELECT max(rowid) FROM draws INDEXED BY draws_sample WHERE sample >= 0",),
    "commits": ("SELECT max(rowid) FROM commits INDEXED BY commits_run WHERE run >= ''",),
}


@dataclass
class RecoveryReport:
    """What was taken, and what is lost because it can't be read or isn't as it was written."""

    taken: Counter[str] = field(default_factory=Counter)  # rows, by table
    lost: list[int] = field(default_factory=list)  # ids of samples, from 1 to the last
    lost_rows: Counter[str] = field(default_factory=Counter)  # by table, also with the rows of a lost sample
    may_miss: list[str] = field(default_factory=list)  # tables whose number of rows is unknown

    def to_json(self) -> dict[str, Any]:
        lost = {f"lost_{table}": self.lost_rows[table] for table in RECOVERED if table != "samples"}
        taken = {table: self.taken[table] for table in RECOVERED}
        return {**taken, "lost": self.lost, **lost, "may_miss": self.may_miss}

    def __str__(self) -> str:
        counts = [f"{self.taken[table]} {table}" for table in ("samples", "pairs", "draws", "commits")]
        lines = [f"taken: {', '.join(counts)}"]
        if self.lost:
            lines.append(f"lost samples: {len(self.lost)} (ids {first_of(self.lost, 10)})")
        lines += [f"lost {table}: {count}" for table, count in self.lost_rows.items() if count]
        if self.may_miss:
            lines.append(f"unknown how many there were: {', '.join(self.may_miss)}")
        return "\n".join(lines)


def copy(source: Location, target: Location) -> None:
    """Write all of a store into a new one, completely or not at all.

    Orders of groups are made again by the next draw. Raises `Refused` where the target has something already,
    and for a row that isn't as it was written.
    """
    with (
        opened(source, read_only=True, create=False) as old,
        opened(target, read_only=False, create=True) as new,
        new.transaction(),
    ):
        for table in ("samples", "commits", "imports"):
            if new.run(f"SELECT 1 FROM {table} LIMIT 1"):
                raise Refused(
                    f"{target}: expected an empty store to copy into, but it has {table}. What to do: give "
                    "another file, or another ?schema=NAME"
                )
        for table, columns in COLUMNS.items():
            sql = f"SELECT {', '.join(columns)} FROM {table} WHERE {columns[0]} > ? ORDER BY {columns[0]}"
            for page in old.pages(sql, rows=PAGE_ROWS if table == "samples" else PAGE_ENTRIES):
                for row in page:
                    if not _is_whole(table, row):
                        raise Refused(
                            f"{old.path}: {table}: row {row[0]} isn't as it was written. {old.way_out()}"
                        )
                new.insert(table, columns, page)
        if old.has("clusters"):
            new.run(CLUSTERS)
            new.insert("clusters", ("run", "clusters"), old.run("SELECT run, clusters FROM clusters"))
        new.renumber([table for table in COLUMNS if table != "samples"])


def recover(path: str | Path, target: str | Path) -> RecoveryReport:
    """Write all rows of the store at `path` that are as they were written to a new store at `target`; ids
    stay.

    `path` isn't changed: a copy of it is read, which takes room beside `target` meanwhile. Who then replaces
    `path` by `target` has to remove PATH-wal and PATH-shm first. Raises `Refused` where `target` exists, or
    no sample can be read.
    """
    if url_of(path):
        raise Refused(f"{path}: expected a file; a database goes back to a backup of the server")
    path, target = Path(path), Path(target)
    if not path.is_file():
        raise Refused(f"{path}: no such store")
    if target.exists():
        raise Refused(f"{target}: there is such a file; give another name")
    with writing(target), tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        copied, new = Path(folder) / "copy.db", Path(folder) / "new.db"
        for ending in ("", "-wal"):
            part = Path(f"{path}{ending}")
            if part.exists():
                shutil.copyfile(part, f"{copied}{ending}")
        fresh = Path(folder) / "fresh.db"
        Store.open(fresh).close()
        with Store.open(new) as store, closing(_open(path, copied, fresh)) as damaged:
            report = _copy_all(damaged, store, copied.stat().st_size)
        if not report.taken["samples"]:
            raise Refused(NOTHING.format(path=path))
        new.rename(target)
    return report


def _copy_all(damaged: sqlite3.Connection, store: Store, size: int) -> RecoveryReport:
    """`size`: of the damaged file, in bytes."""
    report, ids = RecoveryReport(), set[int]()
    with store.transaction():
        for table, columns in RECOVERED.items():
            most = size // SMALLEST_ROW
            last = _last_rowid(damaged, table, most)
            if last is None:
                report.may_miss.append(table)
            insert = insert_into(table, columns)
            naming = [columns.index(name) for name in SAMPLES_OF.get(table, ())]
            for row in _rows(damaged, table, columns, most if last is None else last):
                if row is not None and _is_whole(table, row) and {row[i] for i in naming} <= ids:
                    with suppress(sqlite3.IntegrityError):  # in a damaged tree it may be read twice
                        store.tables.run(insert, row)
                        report.taken[table] += 1
                        if table == "samples":
                            ids.add(row[0])
                        continue
                report.lost_rows[table] += table != "samples" and last is not None
            if table == "samples":
                last = max(ids, default=0) if last is None else last
                report.lost = [i for i in range(1, last + 1) if i not in ids]
        for (run,) in store.tables.run("SELECT DISTINCT run FROM draws"):
            store.draws.recount_uses(decode_text(run))
        store.tables.put("requests", store.tables.run(_REQUESTS))
    return report


def _last_rowid(damaged: sqlite3.Connection, table: str, most: int) -> int | None:
    """The last one of a table that anything in the store names; None where nothing can be read."""
    rowids = []
    for sql in (f"SELECT max(rowid) FROM {table}", *LAST_ROWIDS.get(table, ())):
        with suppress(sqlite3.DatabaseError):
            [(rowid,)] = damaged.execute(sql)
            rowids.append(rowid or 0)
    fit = (rowid for rowid in rowids if isinstance(rowid, int) and rowid <= most)
    return max(fit, default=None)  # a damaged one is any number


def _is_whole(table: str, row: Row) -> bool:
    """Whether a row of `COLUMNS` is as it was written."""
    return is_valid_sample(row) if table == "samples" else is_valid(row[1:])


# What collectors claimed, as samples and draws show it. What isn't scored is claimed again.
_REQUESTS = """
SELECT substr(s.file, 5), s.record, 'recovered', min(s.state) <> 0, min(d.step)
FROM samples s LEFT JOIN draws d ON d.sample = s.id AND d.run = substr(s.file, 5)
WHERE s.file LIKE 'run:%' GROUP BY s.file, s.record
"""


def _open(path: Path, copy: Path, fresh: Path) -> sqlite3.Connection:
    """The copy of the damaged store.

    Where its first page, which has the schema alone, can't be used, it is replaced by that of a new store.
    """
    for _ in range(2):
        connection = sqlite3.connect(copy, isolation_level=None)
        connection.text_factory = read_text
        with suppress(sqlite3.DatabaseError, UnicodeDecodeError):  # the latter in SQLite's own message
            with closing(sqlite3.connect(fresh)) as new:
                same = _schema(connection) == _schema(new)
            if same and columns_fit(connection):
                return connection
        connection.close()
        page = bytearray(fresh.read_bytes()[:PAGE_SIZE])
        page[PAGE_COUNT] = math.ceil(copy.stat().st_size / PAGE_SIZE).to_bytes(4, "big")  # its own
        page[CHANGE_COUNTER] = page[PAGE_COUNT_VALID_FOR]
        with copy.open("r+b") as file:
            file.write(page)
    raise Refused(NOTHING.format(path=path))


def _schema(connection: sqlite3.Connection) -> list[Row]:
    return connection.execute("SELECT name, rootpage FROM sqlite_master ORDER BY rootpage").fetchall()


def _rows(
    damaged: sqlite3.Connection, table: str, columns: tuple[str, ...], end: int
) -> Iterator[Row | None]:
    """All rows up to rowid `end`, which is the first column; None for each that can't be read.

    An interval of rowids that can't be read as one is halved, down to the single rows.
    """
    sql = f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED WHERE rowid BETWEEN ? AND ? ORDER BY rowid"
    intervals = [(start, min(start + BLOCK - 1, end)) for start in range(1, end + 1, BLOCK)]
    intervals.reverse()  # a stack, whose top is the next one
    while intervals:
        low, high = intervals.pop()
        try:
            rows = damaged.execute(sql, [low, high]).fetchall()
        except sqlite3.DatabaseError:
            if low == high:
                yield None
            else:
                middle = (low + high) // 2
                intervals += [(middle + 1, high), (low, middle)]
        else:
            yield from rows
