"""The groups that a run may draw, in order: a temporary table of one connection, beside the store.

It is made once, from all samples. Then each draw looks only at the groups that changed since the draw before:
those with new samples, with samples that were scored, judged or marked, those that the run drew itself, and
those that became too stale. So a draw costs the same in a store of any size. The table never differs from
what a query of all samples finds (`queries.drawable`), whatever the order of the changes: a run that is
resumed makes it anew and draws the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from agro.store import queries
from agro.store.database import Database
from agro.store.draw_rules import At, Candidate, DrawRule, place_of
from agro.store.sample_rows import decode_text, encode_text

Condition = Callable[[], tuple[str, list[Any]]]
TOUCHED = "temp.touched"
LOOKS = 128  # in one query
BY = {
    "least_used": "uses, place",
    "uniform": "place",
    "closest": "place",
    "newest": "newest DESC, uses, place",
    "age_weighted": "newest, place",
}


class PlacedGroup(NamedTuple):
    """A group, and what groups are ordered by."""

    prompt_id: str
    uses: int
    newest: int
    place: int


class Candidates:
    """The groups that one run may draw by one rule: its `agro.store.draw_rules.DrawableGroups`."""

    def __init__(
        self, database: Database, name: str, rule: DrawRule, at: At, is_held_out: Callable[[str], bool]
    ) -> None:
        """`name`: of the table. `is_held_out`: of prompt ids, see `Split`."""
        self.is_held_out = is_held_out
        self.database, self.name, self.rule, self.run, self.seed = database, name, rule, at.run, at.seed
        self.drawn: set[Any] = set()  # groups that the run drew since the last update, as SQLite has them
        self.count, self.versions = 0, Counter[int]()
        self._stale = True  # whether the table has to be made
        self._sample = self._change = self._version = self._rollbacks = 0  # at the last update
        database.define(f"{name}_place", self._place)

    def update(self, at: At, condition: Condition) -> None:
        """Bring the table up to date. `condition`: that the run may draw a row, and its arguments."""
        [(sample, change, oldest)] = self.database.run(
            "SELECT (SELECT ifnull(max(id), 0) FROM samples), (SELECT ifnull(max(number), 0) FROM changes), "
            "(SELECT ifnull(min(number), 1) FROM changes)"
        )
        if (
            self.database.rollbacks != self._rollbacks
            or oldest > self._change + 1
            or at.version < self._version
        ):
            self._stale = True  # the table is of what was undone, or changes were missed
        if self._stale:
            self._make(condition())
        else:
            self._renew(at.version, condition)
        self._sample, self._change, self._version = sample, change, at.version
        self._rollbacks, self._stale = self.database.rollbacks, False
        self.drawn.clear()

    def first(self, n: int) -> list[str]:
        """The first groups in the order of the rule."""
        return self._ids(f"ORDER BY {BY[self.rule.data.order]}, prompt_id LIMIT ?", n)

    def between(self, slots: Sequence[tuple[int, int, int]]) -> list[str | None]:
        """For each (low, high, n): group `n` (from 0) of those whose place is at least `low` and at most
        `high`, by place."""
        group = (
            f"(SELECT prompt_id FROM temp.{self.name} WHERE place BETWEEN ? AND ? "
            "ORDER BY place, prompt_id LIMIT 1 OFFSET ?)"
        )
        groups: list[str | None] = []
        for start in range(0, len(slots), LOOKS):
            part = slots[start : start + LOOKS]
            [row] = self.database.run(f"SELECT {', '.join([group] * len(part))}", list(chain(*part)))
            groups += map(decode_text, row)
        return groups

    def of_version(self, version: int) -> list[str]:
        """The groups whose newest samples have this version, by place."""
        return self._ids("WHERE newest = ? ORDER BY place, prompt_id", version)

    def placed_first(self, n: int) -> list[PlacedGroup]:
        """As `first` has them, with what they are ordered by."""
        return self._placed(f"ORDER BY {BY[self.rule.data.order]}, prompt_id LIMIT ?", n)

    def placed_between(self, slots: Sequence[tuple[int, int, int]]) -> list[list[PlacedGroup]]:
        """For each (low, high, n): the groups of `between` up to number `n`."""
        clause = "WHERE place BETWEEN ? AND ? ORDER BY place, prompt_id LIMIT ?"
        return [self._placed(clause, low, high, n + 1) for low, high, n in slots]

    def placed_of_version(self, version: int) -> list[PlacedGroup]:
        return self._placed("WHERE newest = ? ORDER BY place, prompt_id", version)

    def forget(self) -> None:
        """Make the table anew at the next update."""
        self._stale = True

    def drop(self) -> None:
        self.database.run(f"DROP TABLE IF EXISTS temp.{self.name}")
        self.forget()

    def _ids(self, clause: str, *args: int) -> list[str]:
        rows = self.database.run(f"SELECT prompt_id FROM temp.{self.name} {clause}", args)
        return [decode_text(prompt_id) for (prompt_id,) in rows]

    def _placed(self, clause: str, *args: int) -> list[PlacedGroup]:
        rows = self.database.run(
            f"SELECT prompt_id, uses, newest, place FROM temp.{self.name} {clause}", args
        )
        return [PlacedGroup(decode_text(prompt_id), *numbers) for prompt_id, *numbers in rows]

    def _make(self, condition: tuple[str, list[Any]]) -> None:
        self.drop()
        self.database.run(
            f"CREATE TABLE temp.{self.name} "
            "(prompt_id PRIMARY KEY, uses INTEGER, newest INTEGER, place INTEGER) WITHOUT ROWID"
        )
        self._insert(condition)
        self.database.run(f"CREATE INDEX temp.{self.name}_by ON {self.name} ({BY[self.rule.data.order]})")
        rows = self.database.run(f"SELECT newest, count(*) FROM temp.{self.name} GROUP BY newest")
        self.versions = Counter(dict(rows))
        self.count = self.versions.total()

    def _renew(self, version: int, condition: Condition) -> None:
        """Look again at the groups that changed."""
        self._touch(version)
        if not self.database.run(f"SELECT 1 FROM {TOUCHED} LIMIT 1"):
            return
        removed = self.database.run(
            f"DELETE FROM temp.{self.name} WHERE prompt_id IN (SELECT prompt_id FROM {TOUCHED}) "
            "RETURNING newest"
        )
        added = self._insert(condition(), TOUCHED)
        self.versions.subtract(newest for (newest,) in removed)
        self.versions.update(newest for (newest,) in added)
        self.count += len(added) - len(removed)

    def _touch(self, version: int) -> None:
        """List the groups that changed."""
        run = self.database.run
        run(f"CREATE TABLE IF NOT EXISTS {TOUCHED} (prompt_id PRIMARY KEY) WITHOUT ROWID")
        run(f"DELETE FROM {TOUCHED}")
        add = f"INSERT OR IGNORE INTO {TOUCHED}"
        run(f"{add} SELECT prompt_id FROM samples WHERE id > ?", [self._sample])
        run(f"{add} SELECT prompt_id FROM changes WHERE number > ?", [self._change])
        max_age = self.rule.data.max_age
        if max_age is not None:  # those that became too stale
            start, end = self._version - max_age, version - max_age
            sql = "SELECT prompt_id FROM samples WHERE run = ? AND version >= ? AND version < ?"
            run(f"{add} {sql}", [encode_text(self.run), start, end])
        if self.rule.data.max_uses is not None or "uses" in BY[self.rule.data.order]:
            self.database.run_many(f"{add} VALUES (?)", [(prompt_id,) for prompt_id in self.drawn])

    def _insert(self, condition: tuple[str, list[Any]], within: str = "") -> list[tuple[Any, ...]]:
        """Add the groups that may be drawn; returns the newest version of each where `within` is given."""
        sql, args = queries.drawable(self.rule, self.run, condition, within=within)
        row = f"prompt_id, used, newest, {self.name}_place(prompt_id, used) AS place"
        insert = f"INSERT INTO temp.{self.name} SELECT * FROM (SELECT {row} FROM ({sql})) WHERE place >= 0"
        return self.database.run(f"{insert} RETURNING newest" if within else insert, args)

    def _place(self, prompt_id: Any, uses: int) -> int:
        """Of a group in the table; below 0 for one that is held out."""
        name = decode_text(prompt_id)
        if self.is_held_out(name):
            return -1
        return place_of(Candidate(name, uses), self.rule, self.seed)
