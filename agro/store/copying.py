"""Stores as a whole: from a file to PostgreSQL or back, and one of several that earlier versions had as one.

Rows stay as they are, with ids and checksums. Each of several had the prompts of its share of a hash, under
ids that the first one gave out for all; what belongs to no prompt, such as requests, was in the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agro.errors import Refused
from agro.io.files import sync, writing
from agro.store.database import BUSY_TIMEOUT, KEYS, LEDGERS, Database
from agro.store.location import Location
from agro.store.paging import PAGE_ENTRIES, PAGE_ROWS, read_pages
from agro.store.sample_rows import SAMPLE, is_valid, is_valid_sample
from agro.store.split import TABLE as CLUSTERS
from agro.store.sqlite import SqliteDatabase
from agro.store.store import opened

COLUMNS = {table: (*columns, "checksum") for table, columns in LEDGERS.items()}
COLUMNS |= {"samples": SAMPLE, "reference_logp": ("sample", "key", "run", "step", "logp", "checksum")}
OF_EACH = ("samples", "pairs", "group_uses", "imports", "identities")  # of several
_part = partial(SqliteDatabase, read_only=True, create=False, timeout=BUSY_TIMEOUT)
OF_FIRST = ("requests", "reference_logp", "commits", "clusters")


def copy(source: Location, target: Location) -> None:
    """Write all of a store into a new one, completely or not at all.

    Orders of groups are made again by the next draw. Raises `Refused` where the target has something already,
    and for a row that isn't as it was written.
    """
    with (
        opened(source, read_only=True, create=False, timeout=BUSY_TIMEOUT) as old,
        opened(target, read_only=False, create=True, timeout=BUSY_TIMEOUT) as new,
        new.transaction(),
    ):
        for table in ("samples", "commits", "imports"):
            if new.run(f"SELECT 1 FROM {table} LIMIT 1"):
                raise Refused(
                    f"{target}: expected an empty store to copy into, but it has {table}. What to do: give "
                    "another file, or another ?schema=NAME"
                )
        tables = [table for table in COLUMNS if table != "samples"]
        for table in ("samples", *tables, "clusters"):  # the first, which others name
            _copy(old, new, table)
        new.renumber(tables)


def join(paths: Sequence[Path], out: Path) -> None:
    """Make the store `out` of all that is in several, which stay as they are.

    Raises `Refused` where `out` exists, where these aren't all of the stores, in order, and for a row that
    isn't as it was written.
    """
    if out.exists():
        raise Refused(f"{out}: is there already; give another path")
    for number, path in enumerate(paths):
        if path.with_name(f"{path.name}.replacing").exists():
            raise Refused(
                f"{path}: an import into it and the others was cut off. What to do: complete it by agro "
                "check of all of them, with the version of agro that began it"
            )
        with _part(path) as part:
            share = part.share()
        if share != (number, len(paths)):
            got = "one that is complete alone" if share is None else f"store {share[0] + 1} of {share[1]}"
            raise Refused(
                f"{path}: expected store {number + 1} of {len(paths)} that were one together, got {got}. "
                "What to do: give all of them, in the order of data.store. Of stores that never were one "
                "agro export writes the samples, and agro import takes these files into one store"
            )
    with writing(out), TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        file = Path(folder) / out.name
        with opened(file, read_only=False, create=True, timeout=BUSY_TIMEOUT) as new, new.transaction():
            draws: list[tuple[Any, ...]] = []
            for number, path in enumerate(paths):
                with _part(path) as part:
                    for table in OF_EACH if number else (*OF_EACH, *OF_FIRST):
                        _copy(part, new, table, joins=True)
                    draws += part.run(f"SELECT {', '.join(COLUMNS['draws'])} FROM draws ORDER BY rowid")
            new.insert("draws", COLUMNS["draws"], sorted(draws, key=lambda row: (str(row[0]), row[1])))
        sync(file)
        file.rename(out)
        sync(out.parent)


def _copy(old: Database, new: Database, table: str, *, joins: bool = False) -> None:
    """`joins`: beside the rows of other stores, which may have the same under a key."""
    if table == "clusters":
        if old.has(table):
            new.run(CLUSTERS)
            new.insert(table, ("run", table), old.run("SELECT run, clusters FROM clusters"))
        return
    columns = COLUMNS[table] if table == "samples" else ("rowid", *COLUMNS[table])
    rows, cursor = (PAGE_ROWS, "id") if table == "samples" else (PAGE_ENTRIES, "rowid")
    first = 1 if joins and table != "samples" else 0  # of the columns that are written
    sql = f"SELECT {', '.join(columns)} FROM {table} WHERE {cursor} > ? ORDER BY {cursor} LIMIT {rows}"
    block = []
    for row in read_pages(lambda cursor: old.page(sql, [cursor], rows=rows)):
        if not (is_valid_sample(row) if table == "samples" else is_valid(row[1:])):
            raise Refused(f"{old.path}: {table}: row {row[0]} isn't as it was written. {old.way_out()}")
        block.append(row[first:])
        if len(block) == PAGE_ROWS:
            new.insert(table, columns[first:], block, KEYS.get(table, ()) if joins else ())
            block = []
    new.insert(table, columns[first:], block, KEYS.get(table, ()) if joins else ())
