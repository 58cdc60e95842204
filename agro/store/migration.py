"""Stores of schema 1, whose rows carry no checksums: renewed when opened for writing, looked through otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agro.store.rows import CACHE, COLUMNS, LEDGERS, SCHEMA, checksum, sample_checksum

if TYPE_CHECKING:
    from agro.store.database import Database

# They hide the tables of their names from this connection alone.
VIEWS = [
    f"CREATE TEMP VIEW {t} AS SELECT rowid, *, NULL AS checksum FROM main.{t}" for t in ("samples", *LEDGERS)
]
BLOCK = 256  # rows renewed at once


def renew(store: Database) -> None:
    """Give every row the checksum of what it says now, all in one transaction."""
    tables: dict[str, tuple[str, ...]] = {"samples": ("id", *COLUMNS, "redone"), **LEDGERS}
    with store.transaction():
        if store._run("PRAGMA user_version") == [(SCHEMA,)]:  # another process was faster
            return
        for table, columns in tables.items():
            of = sample_checksum if table == "samples" else checksum
            store._run(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0")
            select = f"SELECT rowid, {', '.join(columns)} FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT {BLOCK}"
            last = 0
            while rows := store._run(select, [last]):
                store._run_many(
                    f"UPDATE {table} SET checksum = ? WHERE rowid = ?",
                    [(of(row[1:]), row[0]) for row in rows],
                )
                last = rows[-1][0]
        for statement in CACHE.split(";"):
            store._run(statement)
        store._run(f"PRAGMA user_version = {SCHEMA}")
