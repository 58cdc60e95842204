"""What can be read of a damaged store, row by row, into a new one."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.files import writing
from agro.store import queries
from agro.store.database import columns_fit, read_text
from agro.store.drawing import Store
from agro.store.rows import (
    COLUMNS,
    INSERT,
    LEDGERS,
    checksum,
    insert_into,
    is_whole,
    sample_checksum,
)

Row = tuple[Any, ...]
BLOCK = 1024  # rowids asked for at once
PAGE_SIZE = 4096  # of every store: SQLite's own choice when it makes one
LEAST_ROW = 32  # bytes, pages and indexes included
NOTHING = "{path}: no sample of a store can be read in it; go back to a copy"
SHOWN = 10  # ids that a printed report spells out
# Ways to the last rowid of a table: past its own pages, then by an index and by what names it elsewhere.
_LAST = {
    "samples": (
        "SELECT max(id) FROM samples",
        "SELECT max(id) FROM samples INDEXED BY samples_state WHERE state >= 0",
        "SELECT max(sample) FROM draws",
        "SELECT max(cursor) FROM commits",
    ),
    "pairs": ("SELECT max(rowid) FROM pairs",),
    "draws": (
        "SELECT max(rowid) FROM draws",
        "SELECT max(rowid) FROM draws INDEXED BY draws_sample WHERE sample >= 0",
    ),
    "commits": (
        "SELECT max(rowid) FROM commits",
        "SELECT max(rowid) FROM commits INDEXED BY commits_run WHERE run >= ''",
    ),
}


@dataclass
class Recovered:
    """What was taken, and what wasn't because it can't be read or isn't as it was written."""

    samples: int = 0
    pairs: int = 0
    draws: int = 0
    commits: int = 0
    lost: list[int] = field(
        default_factory=list
    )  # ids of samples, from 1 to the last, that the new store doesn't have
    lost_pairs: int = 0  # these three with the rows that name a lost sample
    lost_draws: int = 0
    lost_commits: int = 0
    may_lack: list[str] = field(default_factory=list)  # tables of which nothing says how many rows they held

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        said = [
            f"taken: {self.samples} samples, {self.pairs} pairs, {self.draws} draws, {self.commits} commits"
        ]
        if self.lost:
            ids = ", ".join(map(str, self.lost[:SHOWN])) + (", …" if len(self.lost) > SHOWN else "")
            said.append(f"lost: {len(self.lost)} samples: {ids}")
        for what, count in (
            ("pairs", self.lost_pairs),
            ("draws", self.lost_draws),
            ("commits", self.lost_commits),
        ):
            if count:
                said.append(f"lost: {count} {what}")
        if self.may_lack:
            said.append(f"nothing says how many there were: {', '.join(self.may_lack)}")
        return "\n".join(said)


def recover(path: str | Path, out: str | Path) -> Recovered:
    """Write all rows of the store at `path` that are as they were written to a new store at `out`; ids stay.

    Who then puts `out` in the place of `path` has to remove what stands beside that, PATH-wal and PATH-shm, first.

    `path` isn't touched: a copy of it is read, which takes room beside `out` meanwhile. The rows of a store of schema 1
    carry no checksums and are taken as they are. Raises `Refused` where `out` is there, or no sample can be read.
    """
    path, out = Path(path), Path(out)
    if not path.is_file():
        raise Refused(f"{path}: no such store")
    if out.exists():
        raise Refused(f"{out}: there is such a file; give another --out")
    with writing(out), tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        copy, new = Path(folder) / "copy.db", Path(folder) / "new.db"
        for ending in ("", "-wal"):
            if (part := Path(f"{path}{ending}")).exists():
                shutil.copyfile(part, f"{copy}{ending}")
        with Store.open(new) as store, closing(_open(path, copy, _fresh(Path(folder)))) as damaged:
            report = _take_over(damaged, store, copy.stat().st_size)
        if not report.samples:
            raise Refused(NOTHING.format(path=path))
        new.rename(out)
    return report


def _take_over(damaged: sqlite3.Connection, store: Store, size: int) -> Recovered:
    report, there = Recovered(), set[int]()
    has_checksums = any(row[1] == "checksum" for row in damaged.execute("PRAGMA table_info(samples)"))
    with store.transaction():
        last = _last(damaged, "samples", size, report)
        for row in _rows(damaged, "samples", (*COLUMNS, "redone"), has_checksums, last):
            if row is not None and not has_checksums and row[-1] in (0, 1):
                row = (*row, sample_checksum(row))
            if row is not None and is_whole(row) and _taken(store, INSERT, row):
                there.add(row[0])
        report.samples = len(there)
        known = max(there, default=0) if "samples" in report.may_lack else last
        report.lost = [i for i in range(1, known + 1) if i not in there]
        for table, columns in LEDGERS.items():
            insert, taken, lost = insert_into(table, ("rowid", *columns, "checksum")), 0, 0
            for row in _rows(damaged, table, columns, has_checksums, _last(damaged, table, size, report)):
                named = (
                    () if row is None or table == "commits" else row[1:3] if table == "pairs" else row[3:4]
                )
                if row is not None and not has_checksums:
                    row = (*row, checksum(row[1:]))
                whole = row is not None and checksum(row[1:-1]) == row[-1] and there.issuperset(named)
                if row is not None and whole and _taken(store, insert, row):
                    taken += 1
                else:
                    lost += 1
            setattr(report, table, taken)
            setattr(report, f"lost_{table}", lost if table not in report.may_lack else 0)
        for (run,) in store._run("SELECT DISTINCT run FROM draws"):
            store._run(queries.RECOUNT_USES, [run])
    return report


def _taken(store: Store, insert: str, row: Row) -> bool:
    """Without checksums a row may say what no store can hold; in a damaged tree one may be met twice."""
    try:
        store._run(insert, row)
    except sqlite3.IntegrityError:
        return False
    return True


def _fresh(folder: Path) -> Path:
    path = folder / "fresh.db"
    Store.open(path).close()
    return path


def _open(path: Path, copy: Path, fresh: Path) -> sqlite3.Connection:
    """The copy of the damaged store. Its first page, which holds the schema alone, is a new store's where it can't be used."""
    for _ in range(2):
        connection = sqlite3.connect(copy, isolation_level=None)
        connection.text_factory = read_text
        try:
            schema = connection.execute(
                "SELECT name, rootpage FROM sqlite_master ORDER BY rootpage"
            ).fetchall()
            with closing(sqlite3.connect(fresh)) as new:
                same = (
                    new.execute("SELECT name, rootpage FROM sqlite_master ORDER BY rootpage").fetchall()
                    == schema
                )
            if same and columns_fit(connection.execute):
                return connection
        except (sqlite3.DatabaseError, UnicodeDecodeError):  # the latter in SQLite's own message
            pass
        connection.close()
        _replace_first_page(copy, fresh)
    raise Refused(NOTHING.format(path=path))


def _replace_first_page(copy: Path, fresh: Path) -> None:
    """See "The Database Header" in https://www.sqlite.org/fileformat2.html."""
    page = bytearray(fresh.read_bytes()[:PAGE_SIZE])
    page[24:28] = page[
        92:96
    ]  # the number of pages holds where the change counter is the one that it was valid for
    page[28:32] = (-(-copy.stat().st_size // PAGE_SIZE)).to_bytes(4, "big")
    with copy.open("r+b") as file:
        file.write(page)


def _last(damaged: sqlite3.Connection, table: str, size: int, report: Recovered) -> int:
    """The last rowid that anything in the store tells of; else more than fit into `size` bytes."""
    found = []
    for sql in _LAST[table]:
        try:
            [(last,)] = damaged.execute(sql)
        except sqlite3.DatabaseError:
            continue
        if isinstance(last, int) and last <= size:  # a damaged rowid can be any number
            found.append(last)
        elif last is None:
            found.append(0)
    if not found:
        report.may_lack.append(table)
    return max(found, default=size // LEAST_ROW)


def _rows(
    damaged: sqlite3.Connection, table: str, columns: tuple[str, ...], has_checksums: bool, last: int
) -> Iterator[Row | None]:
    """(rowid, *columns, checksum where there are any) of all rows up to `last`; None for each that can't be read."""
    wanted = ("rowid", *columns, "checksum") if has_checksums else ("rowid", *columns)
    sql = f"SELECT {', '.join(wanted)} FROM {table} NOT INDEXED WHERE rowid BETWEEN ? AND ? ORDER BY rowid"

    def between(first: int, last: int) -> Iterator[Row | None]:
        try:
            rows = damaged.execute(sql, [first, last]).fetchall()
        except sqlite3.DatabaseError:
            if first == last:
                yield None
                return
            middle = (first + last) // 2
            yield from between(first, middle)
            yield from between(middle + 1, last)
        else:
            yield from rows

    for first in range(1, last + 1, BLOCK):
        yield from between(first, min(first + BLOCK - 1, last))
