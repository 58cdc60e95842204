"""What runs did: commits, going back to a commit, the log-probs that they cache, requests, and leases.

A request is one prompt of a run's endless order, by its number. A collector claims it, stores its responses
under the ledger of the run, scores them and marks it done; the trainer takes requests that are done. The
claim of a dead collector goes to the next one, which samples only the missing responses.

Each process that is alive renews a lease under its name, and a lease that ran out counts as a death. A
stopped or unreachable process loses its lease although it lives. That is harmless: what it stores later was
stored by another one before, and is kept once (`Origin`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agro.errors import Refused
from agro.io.strictjson import dumps, loads
from agro.store.database import PAGE_ENTRIES, Database
from agro.store.drawing import Draws
from agro.store.sample_rows import checksum, encode_text, is_valid, ledger_of
from agro.store.samples import Experience


@dataclass(frozen=True)
class Commit:
    """What a checkpoint of a run contains: all up to `step`, and the store's samples up to row `cursor`."""

    step: int
    digest: str
    cursor: int
    files: dict[str, str] = field(default_factory=dict)  # name: digest


@dataclass(frozen=True)
class Rewind:
    draws: int  # rows of draws deleted
    samples: int  # samples marked as redone


class Ledger:
    """What runs committed, and what they cache."""

    def __init__(self, database: Database, draws: Draws) -> None:
        self._db, self._draws = database, draws

    def commit(self, run: str, step: int, digest: str, *, files: Mapping[str, str] | None = None) -> None:
        """Declare `run`'s checkpoint of `step` valid; `digest`: of the checkpoint, `files`: of each of its
        files."""
        with self._db.transaction():
            self._append(run, Commit(step, digest, self._db.last_id(), dict(files or {})))

    def _append(self, run: str, c: Commit) -> None:
        files = dumps(c.files, "files of a commit")
        self._db.put("commits", [(run, c.step, c.digest, c.cursor, files)])

    def commits(self, run: str) -> list[Commit]:
        """The commits of `run` that count, by rising step: a commit of an earlier step cancels the later
        ones.

        Damaged rows of the table are dropped; `Database.damaged("commits")` has them.
        """
        valid: list[Commit] = []
        for row in self._db.run(*self._db.entries_query("commits", "run = ?", [run])):
            if is_valid(row[1:]):
                _, _, step, digest, cursor, files, _ = row
                valid = [c for c in valid if c.step < step] + [Commit(step, digest, cursor, loads(files))]
        return valid

    def committed(self, run: str) -> Commit | None:
        """The last commit of `run`."""
        return next(reversed(self.commits(run)), None)

    def knows(self, run: str) -> bool:
        """Whether there is anything of a run: samples, draws or commits."""
        tables = ("samples", "draws", "commits")
        return any(self._db.run(f"SELECT 1 FROM {t} WHERE run = ? LIMIT 1", [run]) for t in tables)

    def fingerprint(self) -> str:
        """SHA-256 over the checksums of all samples and pairs."""
        total = hashlib.sha256()
        for table, key in (("samples", "id"), ("pairs", "rowid")):
            sql = f"SELECT {key}, checksum FROM {table} WHERE {key} > ? ORDER BY {key}"
            for row in chain.from_iterable(self._db.pages(sql, rows=PAGE_ENTRIES)):
                total.update(f"{table} {row}\n".encode())
        return total.hexdigest()

    def rewind(self, run: str, step: int | None = None, *, to: Commit | None = None) -> Rewind:
        """Take `run` back to a commit: delete its later draws, mark its later samples as redone.

        `to`: one of `commits(run)`, the last one where it isn't given; the later ones don't count any more.
        Without a commit, all draws of the run are deleted and all its samples marked. `step`: take the run
        back only to the end of this later step. Raises `Refused` for a step before the commit.
        """
        with self._db.transaction():
            commits = self.commits(run)
            target = to or next(reversed(commits), None)
            if to is not None and to not in commits:
                raise ValueError(f"{self._db.path}: run {run} has no commit {to}")
            if step is not None and target and step < target.step:
                raise Refused(
                    f"{self._db.path}: run {run}: expected to go back to step {target.step} or later, "
                    f"got {step}"
                )
            last = self._db.run("SELECT step FROM commits WHERE run = ? ORDER BY rowid DESC LIMIT 1", [run])
            if target is not None and last != [(target.step,)]:
                self._append(run, target)
            last_step = target.step if step is None and target is not None else step
            args, later = [run, last_step], "run = ?1 AND (CAST(?2 AS BIGINT) IS NULL OR step > ?2)"
            draws = self._db.run(f"DELETE FROM draws WHERE {later} RETURNING rowid", args)
            self._db.run(f"DELETE FROM reference_logp WHERE {later}", args)
            requests = self._db.entries("requests", f"{later} AND step IS NOT NULL", args)
            self._db.put("requests", [(*request, None) for *request, _ in requests])
            again = self._db.run(
                "SELECT id FROM samples WHERE file = ? AND record IN (SELECT value FROM json_each(?))",
                [ledger_of(run), self._db.listed([number for _, number, *_ in requests])],
            )
            self._draws.recount_uses(run)
            samples = self._db.run(
                "UPDATE samples SET redone = 1, checksum = checksum + 1 "
                "WHERE run = ?1 AND id > ?2 AND redone = 0 AND step IS NOT NULL "
                "AND (CAST(?3 AS BIGINT) IS NULL OR step > ?3) RETURNING id",
                [run, target.cursor if target else 0, step],
            )
            self._db.note_changes(i for (i,) in [*samples, *again])
        return Rewind(len(draws), len(samples))

    def last_reference_logp(self) -> int:
        """The number of the newest entry of the cache; see `reference_logp`."""
        [(number,)] = self._db.run("SELECT coalesce(max(rowid), 0) FROM reference_logp")
        return int(number)

    def reference_logp(
        self, run: str, key: str, ids: Iterable[int], *, until: int
    ) -> dict[int, NDArray[np.float32]]:
        """The cached entries of these samples under `key`: the log-probs of the tokens to learn from.

        Of entries of other runs only those up to number `until`, so that a run doesn't depend on what
        others do meanwhile. The oldest entry counts; a damaged one counts as missing.
        """
        rows = self._db.run(
            "SELECT sample, key, run, step, logp, checksum FROM reference_logp WHERE key = ?1 AND sample IN "
            "(SELECT value FROM json_each(?2)) AND (run = ?3 OR rowid <= ?4) ORDER BY rowid DESC",
            [key, self._db.listed(ids), run, until],
        )
        return {row[0]: np.frombuffer(row[4], "<f4") for row in rows if is_valid(row)}

    def keep_reference_logp(
        self, run: str, step: int, key: str, logps: Mapping[int, NDArray[np.float32]]
    ) -> None:
        """Add log-probs to the cache; `rewind` deletes those that a run added after the step that it goes
        back to."""
        columns, run = ("sample", "key", "run", "step", "logp", "checksum"), encode_text(run)
        entries = [(i, key, run, step, logp.astype("<f4").tobytes()) for i, logp in logps.items()]
        with self._db.transaction():
            rows = [(*entry, checksum(entry)) for entry in entries]
            self._db.insert("reference_logp", columns, rows)


LEASES = (
    "CREATE TABLE IF NOT EXISTS leases (name TEXT PRIMARY KEY, ends REAL NOT NULL, seconds REAL NOT NULL)"
)
UNFINISHED = "run = ? AND done = 0"
WAITING = "count(CASE WHEN step IS NULL OR step > ? THEN 1 END)"


class SamplingRequest(NamedTuple):
    """A row of `requests`."""

    run: str
    number: int
    collector: str
    done: int = 0
    step: int | None = None  # that trained on it


class Requests:
    """What collectors and the trainer share."""

    def __init__(self, database: Database, experience: Experience) -> None:
        self._db, self._experience = database, experience

    def claim(
        self,
        run: str,
        collector: str,
        *,
        maximum: int,
        ahead: int,
        trained: int = 0,
        dead: Collection[str] = (),
    ) -> list[int]:
        """Up to `maximum` numbers for `collector` to sample: those that it hasn't finished, so that a claim
        can be repeated, those of the `dead` ones among `collectors`, then new ones.

        There are at most `ahead` requests on which no step up to `trained` has trained, whoever claimed them.
        """
        with self._db.transaction():
            self._db.check_once("structure", "requests")
            rows, [(newest, waiting)] = self._db.run_all(
                self._db.entries_query("requests", UNFINISHED, [run]),
                (f"SELECT coalesce(max(number), -1), {WAITING} FROM requests WHERE run = ?", [trained, run]),
            )
            claims = _by_number(self._db.checked("requests", rows))
            unfinished = [claim for claim in claims if claim.collector == collector]
            abandoned = [claim for claim in claims if claim.collector in dead and claim not in unfinished]
            claimed = [claim._replace(collector=collector) for claim in unfinished + abandoned][:maximum]
            count = max(0, min(maximum - len(claimed), ahead - waiting))
            claimed += [SamplingRequest(run, newest + 1 + i, collector) for i in range(count)]
            self._db.put("requests", claimed)
        return [claim.number for claim in claimed]

    def collectors(self, run: str) -> list[str]:
        """Those that have claimed requests which aren't done."""
        return sorted({claim.collector for claim in self._requests(UNFINISHED, [run])})

    def finish(self, run: str, numbers: Collection[int]) -> None:
        """Mark requests as done: all their responses are stored and scored."""
        self._update(run, numbers, done=1)

    def ready(self, run: str, maximum: int) -> list[int]:
        """The first requests that are done and were not trained on."""
        self._db.check_once("structure", "requests")
        waiting = self._requests("run = ? AND step IS NULL AND done = 1", [run])
        return [request.number for request in waiting][:maximum]

    def backlog(self, run: str, trained: int) -> int:
        """Requests that were claimed and on which no step up to `trained` has trained."""
        [(count,)] = self._db.run(f"SELECT {WAITING} FROM requests WHERE run = ?", [trained, run])
        return int(count)

    def take(self, run: str, step: int, numbers: Collection[int]) -> None:
        """Record that `run` trains on these requests at `step`; `rewind` undoes it after the last commit."""
        with self._db.transaction():
            self._update(run, numbers, step=step)
            self._db.note_changes(self._experience.find_in_ledger(ledger_of(run), list(numbers)))

    def reopen(self, run: str, numbers: Collection[int]) -> None:
        """Have these requests sampled again, by those who claimed them: their responses are redone."""
        with self._db.transaction():
            self._experience.set_aside(ledger_of(run), list(numbers))
            self._update(run, numbers, done=0)

    def _update(self, run: str, numbers: Collection[int], **changes: Any) -> None:
        clause = "run = ? AND number IN (SELECT value FROM json_each(?))"
        with self._db.transaction():
            chosen = self._requests(clause, [run, self._db.listed(numbers)])
            self._db.put("requests", [request._replace(**changes) for request in chosen])

    def _requests(self, clause: str, args: Sequence[Any]) -> list[SamplingRequest]:
        """By number. Raises `Refused` for one that isn't as it was written."""
        return _by_number(self._db.entries("requests", clause, args))


def _by_number(rows: Iterable[tuple[Any, ...]]) -> list[SamplingRequest]:
    return sorted((SamplingRequest(*row) for row in rows), key=lambda request: request.number)


class Leases:
    """The leases of a store, by the clock of the host that has its file."""

    def __init__(self, database: Database, clock: Callable[[], float] | None = None) -> None:
        self._db, self._clock = database, clock or database.now

    def renew(self, name: str, seconds: float) -> None:
        """Let `name` count as alive for so many seconds."""
        with self._db.transaction():
            self._db.run(LEASES)
            row = (name, self._clock() + seconds, seconds)
            self._db.insert("leases", ("name", "ends", "seconds"), [row], key=("name",))

    def release(self, name: str) -> None:
        with self._db.transaction():
            self._db.run(LEASES)
            self._db.run("DELETE FROM leases WHERE name = ?", [name])

    def alive(self, names: Collection[str]) -> list[str]:
        """Those of the names whose lease hasn't run out. One that ends later than it may was given by a clock
        that was set back since."""
        if not self._db.has("leases"):
            return []
        now = self._clock()
        rows = self._db.run(
            "SELECT name FROM leases WHERE ends > ?1 AND ends <= ?1 + seconds "
            "AND name IN (SELECT value FROM json_each(?2)) ORDER BY name",
            [now, self._db.listed(names)],
        )
        return [name for (name,) in rows]


def trainer_of(run: str) -> str:
    """The name under which the trainer of a run has its lease."""
    return f"trainer of {run}"
