"""A store as a whole, from a file to PostgreSQL or back: rows stay as they are, with ids and checksums."""

from __future__ import annotations

from agro.errors import Refused
from agro.store.database import BUSY_TIMEOUT, LEDGERS, PAGE_ENTRIES, PAGE_ROWS
from agro.store.location import Location
from agro.store.sample_rows import SAMPLE, is_valid, is_valid_sample
from agro.store.split import TABLE as CLUSTERS
from agro.store.store import opened

COLUMNS = {table: ("rowid", *columns, "checksum") for table, columns in LEDGERS.items()}
COLUMNS["reference_logp"] = ("rowid", "sample", "key", "run", "step", "logp", "checksum")


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
        for table, columns in {"samples": SAMPLE, **COLUMNS}.items():  # the first, which others name
            is_sample = table == "samples"
            sql = f"SELECT {', '.join(columns)} FROM {table} WHERE {columns[0]} > ? ORDER BY {columns[0]}"
            for page in old.pages(sql, rows=PAGE_ROWS if is_sample else PAGE_ENTRIES):
                for row in page:
                    if not (is_valid_sample(row) if is_sample else is_valid(row[1:])):
                        raise Refused(
                            f"{source}: {table}: row {row[0]} isn't as it was written. {old.way_out()}"
                        )
                new.insert(table, columns, page)
        if old.has("clusters"):
            new.run(CLUSTERS)
            new.insert("clusters", ("run", "clusters"), old.run("SELECT run, clusters FROM clusters"))
        new.renumber(list(COLUMNS))
