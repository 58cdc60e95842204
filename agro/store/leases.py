"""Which processes are alive: each renews a lease under its name, and a lease that ran out counts as a death.

A stopped or unreachable process loses its lease although it lives. That is harmless: what it stores later was
stored by another one before, and is kept once (`Origin`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from agro.store.database import Database

TABLE = "CREATE TABLE IF NOT EXISTS leases (name TEXT PRIMARY KEY, ends REAL NOT NULL, seconds REAL NOT NULL)"


class Leases:
    """The leases of a store, by the clock of the host that has its file."""

    def __init__(self, database: Database, clock: Callable[[], float] | None = None) -> None:
        self._database, self._clock = database, clock or database.now

    def renew(self, name: str, seconds: float) -> None:
        """Let `name` count as alive for so many seconds."""
        with self._database.transaction():
            self._database.run(TABLE)
            row = (name, self._clock() + seconds, seconds)
            self._database.insert("leases", ("name", "ends", "seconds"), [row], key=("name",))

    def release(self, name: str) -> None:
        with self._database.transaction():
            self._database.run(TABLE)
            self._database.run("DELETE FROM leases WHERE name = ?", [name])

    def alive(self, names: Collection[str]) -> list[str]:
        """Those of the names whose lease hasn't run out. One that ends later than it may was given by a clock
        that was set back since."""
        if not self._database.has("leases"):
            return []
        now = self._clock()
        rows = self._database.run(
            "SELECT name FROM leases WHERE ends > ?1 AND ends <= ?1 + seconds "
            "AND name IN (SELECT value FROM json_each(?2)) ORDER BY name",
            [now, self._database.listed(names)],
        )
        return [name for (name,) in rows]


def trainer_of(run: str) -> str:
    """The name under which the trainer of a run has its lease."""
    return f"trainer of {run}"
