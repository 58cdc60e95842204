"""The rows of a store's tables, each with a checksum: reading, writing and checking them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agro.errors import Refused
from agro.store.database import KEYS, LEDGERS, PAGE_ROWS, Database, Row, Statement
from agro.store.records import Damage
from agro.store.sample_rows import (
    SELECT,
    checksum,
    from_rows,
    is_valid,
    is_valid_sample,
    run_of,
    without_version,
)


class Tables:
    """The tables of one database, and whether they are still as they were written."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._checked: frozenset[str] = frozenset()  # parts of `Damage` that were found intact

    def check(self) -> None:
        """Raise `Refused` where the file's structure, its indexes, draws, their counts or requests are
        damaged.

        Samples are checked when they are read, commits by `Ledger.commits`. About a second for a store of
        1 GB.
        """
        self._checked = frozenset()
        self.check_once("structure", "draws", "group_uses", "requests")

    def damage(self) -> Damage:
        """All that isn't as it was written. Reads all of the store."""
        tables = {table: self.damaged(table) for table in ("samples", *LEDGERS)}
        return Damage(structure=self.database.damage(), **tables)

    def damaged(self, table: str) -> list[int]:
        """The rowids, which are the ids of samples, of the rows that aren't as they were written."""
        if table == "samples":
            return [row[0] for page in self.sample_pages() for row in page if not is_valid_sample(row)]
        columns = ", ".join(LEDGERS[table])
        rows = self.database.run(f"SELECT rowid, {columns}, checksum FROM {table} ORDER BY rowid")
        return [row[0] for row in rows if not is_valid(row[1:])]

    def check_once(self, *parts: str) -> None:
        """Raise `Refused` where these parts of `Damage` are damaged; each is checked once a connection.

        In a file of damaged structure SQLite may silently return fewer rows than there are.
        """
        for part in parts:
            if part not in self._checked:
                damage: Any = self.database.damage() if part == "structure" else self.damaged(part)
                if damage:
                    raise self.refusal(Damage(**{part: damage}))
                self._checked |= {part}

    def refusal(self, damage: Damage) -> Refused:
        return Refused(f"{self.database.path}: {damage}. {self.database.way_out()}")

    def last_id(self) -> int:
        """The id of the sample that was added last; 0 where there is none."""
        [(newest,)] = self.database.run("SELECT coalesce(max(id), 0) FROM samples")
        return int(newest)

    def sample_pages(
        self, clause: str = "TRUE", args: Sequence[Any] = (), ids: Sequence[int] | None = None
    ) -> Iterator[list[Row]]:
        """The rows of samples in the order of their ids: of these rising ids, or all that are there now."""
        if ids is None:
            sql = f"{SELECT} WHERE ({clause}) AND id <= ? AND id > ? ORDER BY id"
            yield from self.database.pages(sql, [*args, self.last_id()], rows=PAGE_ROWS)
            return
        sql = f"{SELECT} WHERE ({clause}) AND id IN (SELECT value FROM json_each(?)) AND id > ? ORDER BY id"
        for start in range(0, len(ids), PAGE_ROWS):
            block = self.database.listed(ids[start : start + PAGE_ROWS])
            yield from self.database.pages(sql, [*args, block], rows=PAGE_ROWS)

    def samples_query(self, ids: Sequence[int]) -> Statement:
        """The rows of the samples of these ids, redone ones too."""
        return f"{SELECT} WHERE id IN (SELECT value FROM json_each(?))", [self.database.listed(ids)]

    def valid_samples(self, rows: Iterable[tuple[Any, ...]], run: str | None = None) -> dict[int, Any]:
        """The samples of rows, by id; damaged ones are left out.

        With `run` the staleness of those of other runs is unknown, whose versions count other steps.
        """
        valid = [row for row in rows if is_valid_sample(row)]
        if run is not None:
            valid = [row if run_of(row) == run else without_version(row) for row in valid]
        return dict(zip([row[0] for row in valid], from_rows(valid), strict=True))

    def entries(self, table: str, clause: str, args: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The rows of one of `LEDGERS`, without their checksums.

        Raises `Refused` for one that isn't as it was written.
        """
        return self.checked(table, self.database.run(*self.entries_query(table, clause, args)))

    def entries_query(self, table: str, clause: str, args: Sequence[Any]) -> Statement:
        columns = ", ".join(LEDGERS[table])
        return f"SELECT rowid, {columns}, checksum FROM {table} WHERE {clause} ORDER BY rowid", args

    def checked(self, table: str, rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """`entries`, by the rows of their query."""
        rows = list(rows)
        damaged = [row[0] for row in rows if not is_valid(row[1:])]
        if damaged:
            raise self.refusal(Damage(**{table: damaged}))
        return [row[1:-1] for row in rows]

    def put(self, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Write rows of one of `LEDGERS`, in place of those with the same key where it has one."""
        columns, key = (*LEDGERS[table], "checksum"), KEYS.get(table, ())
        self.database.insert(table, columns, [(*row, checksum(row)) for row in rows], key)

    def check_ids(self, ids: list[int]) -> None:
        missing = self.database.run(
            "SELECT value FROM json_each(?) "
            "WHERE NOT EXISTS (SELECT 1 FROM samples WHERE id = value) LIMIT 3",
            [self.database.listed(ids)],
        )
        if missing:
            raise Refused(
                f"{self.database.path}: no sample has the id {', '.join(str(i) for (i,) in missing)}"
            )

    def note_changes(self, ids: Iterable[int]) -> None:
        """Record that what groups may be drawn of these samples' changed."""
        groups = "SELECT DISTINCT prompt_id FROM samples WHERE id IN (SELECT value FROM json_each(?))"
        self.note_groups(group for (group,) in self.database.run(groups, [self.database.listed(ids)]))

    def note_groups(self, prompt_ids: Iterable[Any]) -> None:
        """The same of groups, by prompt ids as they are stored."""
        rows = [(prompt_id,) for prompt_id in prompt_ids]
        self.database.insert("changes", ("prompt_id",), rows)
