"""A store from a file to PostgreSQL, or back: rows, ids and checksums stay as they are."""

from __future__ import annotations

from agro.errors import Refused
from agro.store.database import BUSY_TIMEOUT, Database
from agro.store.join import COLUMNS
from agro.store.location import Location
from agro.store.paging import PAGE_ENTRIES, PAGE_ROWS, read_pages
from agro.store.sample_rows import is_valid, is_valid_sample
from agro.store.split import TABLE as CLUSTERS
from agro.store.store import opened


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
        for table in ("samples", *tables):  # which others name
            _copy(old, new, table)
        if old.has("clusters"):
            new.run(CLUSTERS)
            new.insert("clusters", ("run", "clusters"), old.run("SELECT run, clusters FROM clusters"))
        new.renumber(tables)


def _copy(old: Database, new: Database, table: str) -> None:
    columns = COLUMNS[table] if table == "samples" else ("rowid", *COLUMNS[table])
    rows, key = (PAGE_ROWS, "id") if table == "samples" else (PAGE_ENTRIES, "rowid")
    sql = f"SELECT {', '.join(columns)} FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT {rows}"
    block = []
    for row in read_pages(lambda cursor: old.page(sql, [cursor], rows=rows)):
        if not (is_valid_sample(row) if table == "samples" else is_valid(row[1:])):
            raise Refused(f"{old.path}: {table}: row {row[0]} isn't as it was written. {old.way_out()}")
        block.append(row)
        if len(block) == PAGE_ROWS:
            new.insert(table, columns, block)
            block = []
    new.insert(table, columns, block)
