"""What a store knows of being one of several, its shards: which one, and what the first of them decides.

Ids of samples are given by the first shard, one after the other for all of them. So ids name samples as in
one store, and their order is the order in which samples were added.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agro.errors import Refused
from agro.store.database import Database
from agro.store.sample_rows import encode_text

TABLES = (
    # `newest`: the last id that was given, at the first shard
    "CREATE TABLE shard (number INTEGER NOT NULL, count INTEGER NOT NULL, newest INTEGER NOT NULL)",
    "CREATE TABLE plans (run TEXT, step INTEGER, plan TEXT NOT NULL, PRIMARY KEY (run, step))",
)


@dataclass(frozen=True)
class ShardRecord:
    """The place of a store among several."""

    _database: Database

    def place(self) -> tuple[int, int] | None:
        """Which of how many, from 0; None for a store that is complete alone."""
        if not self._database.run("SELECT 1 FROM sqlite_master WHERE name = 'shard'"):
            return None
        [(number, count)] = self._database.run("SELECT number, count FROM shard")
        return number, count

    def fits(self, number: int, count: int) -> bool:
        """Whether this is that one of so many; False where it may become it. Raises `Refused` for a store
        that is another one, or has samples already."""
        place = self.place()
        if place == (number, count):
            return True
        name = f"{self._database.path}: expected store {number + 1} of {count}"
        if place is not None:
            raise Refused(
                f"{name}, got store {place[0] + 1} of {place[1]}. What to do: name all stores, always in the "
                "order of the first time"
            )
        if self._database.run("SELECT 1 FROM samples LIMIT 1"):
            raise Refused(
                f"{name}, got one with samples, which belong to several by their prompts. What to do: begin "
                "with new stores"
            )
        return False

    def join(self, number: int, count: int) -> None:
        """Be one of so many. Raises `Refused` as `fits` does."""
        with self._database.transaction():
            if self.fits(number, count):
                return
            for table in TABLES:
                self._database.run(table)
            self._database.run("INSERT INTO shard VALUES (?, ?, 0)", [number, count])

    def refusal(self) -> Refused:
        """Of samples that are added to this one of several alone: they may belong to another one."""
        number, count = self.place() or (0, 0)
        return Refused(
            f"{self._database.path}: is store {number + 1} of {count}, and samples are added to all of them "
            "together. What to do: give all of them, in order"
        )

    def reserve(self, count: int) -> int:
        """The first of so many ids that nobody else is given."""
        with self._database.transaction():
            [(newest,)] = self._database.run("UPDATE shard SET newest = newest + ? RETURNING newest", [count])
        return int(newest) - count + 1

    def plan(self, run: str, step: int) -> list[list[Any]]:
        """The groups that a run draws at a step, and the samples made for it; nothing without a plan."""
        rows = self._database.run(
            "SELECT plan FROM plans WHERE run = ? AND step = ?", [encode_text(run), step]
        )
        return list(json.loads(rows[0][0])) if rows else []

    def agree(self, run: str, step: int, groups: Sequence[str], made: Sequence[int]) -> list[list[Any]]:
        """Note what a run is about to draw, unless it noted that before; returns `plan`.

        It counts once a shard has recorded a part of it."""
        row = [encode_text(run), step, json.dumps([list(groups), list(made)])]
        with self._database.transaction():
            self._database.run("INSERT OR IGNORE INTO plans VALUES (?, ?, ?)", row)
            return self.plan(run, step)

    def drop_plan(self, run: str, step: int) -> None:
        """Forget one that didn't come to count."""
        with self._database.transaction():
            self._database.run("DELETE FROM plans WHERE run = ? AND step = ?", [encode_text(run), step])
