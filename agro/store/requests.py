"""Requests: the prompts of a run that collectors sample, and which of them were trained on.

A request is one prompt of a run's endless order, by its number. A collector claims it, stores its responses
under the ledger of the run, scores them and marks it done; the trainer takes requests that are done. The
claim of a dead collector goes to the next one, which samples only the missing responses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

from agro.store.ledger import Ledger
from agro.store.rows import to_text


def ledger_of(run: str) -> str:
    """The name under which the responses of a run's requests are stored once."""
    return f"run:{run}"


class Requests(Ledger):
    """The part of a store that collectors and the trainer share."""

    def claim(
        self, run: str, collector: str, *, most: int, ahead: int, is_alive: Callable[[str], bool]
    ) -> list[int]:
        """Up to `most` numbers for `collector` to sample: those of dead collectors first, then new ones.

        At most `ahead` new ones.
        """
        name = to_text(run)
        with self.transaction():
            sql = "SELECT number, collector FROM requests WHERE run = ? AND NOT done ORDER BY number"
            claims = self._run(sql, [name])
            others = {owner for _, owner in claims if owner != collector}
            dead = {owner for owner in others if not is_alive(owner)}
            taken = [number for number, owner in claims if owner in dead][:most]
            sql = "UPDATE requests SET collector = ? WHERE run = ? AND number = ?"
            self._run_many(sql, [(collector, name, number) for number in taken])
            [(last,)] = self._run("SELECT ifnull(max(number), -1) FROM requests WHERE run = ?", [name])
            count = max(0, min(most - len(taken), ahead))
            new = list(range(last + 1, last + 1 + count))
            sql = "INSERT INTO requests (run, number, collector) VALUES (?, ?, ?)"
            self._run_many(sql, [(name, number, collector) for number in new])
        return taken + new

    def finish(self, run: str, numbers: Sequence[int]) -> None:
        """Mark requests as done: all their responses are stored and scored."""
        sql = "UPDATE requests SET done = 1 WHERE run = ? AND number = ?"
        with self.transaction():
            self._run_many(sql, [(to_text(run), number) for number in numbers])

    def ready(self, run: str, most: int) -> list[int]:
        """The first requests that are done and were not trained on."""
        rows = self._run(
            "SELECT number FROM requests WHERE run = ? AND step IS NULL AND done ORDER BY number LIMIT ?",
            [to_text(run), most],
        )
        return [number for (number,) in rows]

    def backlog(self, run: str, trained: int) -> int:
        """Requests that were claimed and on which no step up to `trained` has trained."""
        sql = "SELECT count(*) FROM requests WHERE run = ? AND (step IS NULL OR step > ?)"
        [(count,)] = self._run(sql, [to_text(run), trained])
        return int(count)

    def take(self, run: str, step: int, numbers: Collection[int]) -> None:
        """Record that `run` trains on these requests at `step`; `rewind` undoes it after the last commit."""
        sql = "UPDATE requests SET step = ? WHERE run = ? AND number = ?"
        with self.transaction():
            self._run_many(sql, [(step, to_text(run), number) for number in numbers])

    def by_origin(self, ledger: str, numbers: Sequence[int]) -> list[int]:
        """Ids of the samples that are stored under these numbers of a ledger."""
        rows = self._run(
            "SELECT id FROM samples WHERE file = ? AND record IN (SELECT value FROM json_each(?)) "
            "ORDER BY record, id",
            [to_text(ledger), json.dumps(list(numbers))],
        )
        return [i for (i,) in rows]
