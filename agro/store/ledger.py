"""The history of a store: commits of runs and imported files, and how to undo either.

When a run goes back to a commit, its later samples are marked `redone`. A replaced or forgotten sample is
erased: its row stays without its contents, so that its id isn't reused and draws still show which runs
trained on it. Only `drawn` returns such a row.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agro.errors import Refused
from agro.io.strictjson import dumps, loads
from agro.store.candidates import drop_orders
from agro.store.database import CACHED, PAGE_ENTRIES, PAGE_ROWS, Database, repeated
from agro.store.drawing import recount_uses
from agro.store.sample_rows import (
    SAMPLE,
    SELECT,
    Origin,
    checksum,
    decode_text,
    encode_text,
    is_valid,
    ledger_of,
    sample_checksum,
)
from agro.types import ROLES

Place = tuple[str, int]  # hash of a file, and record number


@dataclass(frozen=True)
class Commit:
    """What a run's checkpoint covers: everything up to `step`, and the store's samples up to row `cursor`."""

    step: int
    digest: str
    cursor: int
    files: dict[str, str] = field(default_factory=dict)  # name: digest


@dataclass(frozen=True)
class Rewind:
    draws: int  # rows of draws deleted
    samples: int  # samples marked as redone


class Ledger:
    """Commits of runs, and cached log-probs."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @repeated
    def commit(self, run: str, step: int, digest: str, *, files: Mapping[str, str] | None = None) -> None:
        """Declare `run`'s checkpoint of `step` valid. `digest`: its digest; `files`: that of each of its
        files."""
        with self._db.transaction():
            self._append(run, Commit(step, digest, self._db.last_id(), dict(files or {})))

    def _append(self, run: str, c: Commit) -> None:
        files = dumps(c.files, "files of a commit")
        self._db.put("commits", [(run, c.step, c.digest, c.cursor, files)])

    def commits(self, run: str) -> list[Commit]:
        """The valid commits of `run`, by ascending step; a commit of an earlier step cancels the later ones.

        Damaged rows are dropped; `Database.damaged("commits")` lists them.
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
        """Whether the store has samples, draws or commits of a run."""
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

    @repeated
    def rewind(self, run: str, step: int | None = None, *, to: Commit | None = None) -> Rewind:
        """Take `run` back to a commit: delete its later draws, and mark its later samples as redone.

        `to`: one of `commits(run)`, by default the last one; the later ones become invalid. Without a commit,
        all draws of the run are deleted and all its samples marked. `step`: take the run back only to the end
        of this later step. Raises `Refused` for a step before the commit.
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
            latest = self._db.run("SELECT step FROM commits WHERE run = ? ORDER BY rowid DESC LIMIT 1", [run])
            if target is not None and latest != [(target.step,)]:
                self._append(run, target)
            last_step = target.step if step is None and target is not None else step
            args, later = [run, last_step], "run = ?1 AND (CAST(?2 AS BIGINT) IS NULL OR step > ?2)"
            draws = self._db.run(f"DELETE FROM draws WHERE {later} RETURNING rowid", args)
            self._db.run(f"DELETE FROM reference_logp WHERE {later}", args)
            requests = self._db.entries("requests", f"{later} AND step IS NOT NULL", args)
            self._db.put("requests", [(*request, None) for *request, _ in requests])
            resampled = self._db.run(
                "SELECT id FROM samples WHERE file = ? AND record IN (SELECT value FROM json_each(?))",
                [ledger_of(run), self._db.listed([number for _, number, *_ in requests])],
            )
            recount_uses(self._db, run)
            samples = self._db.run(
                "UPDATE samples SET redone = 1, checksum = checksum + 1 "
                "WHERE run = ?1 AND id > ?2 AND redone = 0 AND step IS NOT NULL "
                "AND (CAST(?3 AS BIGINT) IS NULL OR step > ?3) RETURNING id",
                [run, target.cursor if target else 0, step],
            )
            self._db.note_changes(i for (i,) in [*samples, *resampled])
        return Rewind(len(draws), len(samples))

    def last_reference_logp(self) -> int:
        """The number of the cache's newest entry; see `reference_logp`."""
        [(number,)] = self._db.run("SELECT coalesce(max(rowid), 0) FROM reference_logp")
        return int(number)

    def reference_logp(
        self, run: str, key: str, ids: Iterable[int], *, until: int
    ) -> dict[int, NDArray[np.float32]]:
        """The cached entries of these samples under `key`: the log-probs of the tokens to learn from.

        Entries of other runs count only up to number `until`, so that a run doesn't depend on what others do
        meanwhile. The oldest entry is used; a damaged one counts as missing.
        """
        rows = self._db.run(
            f"SELECT {', '.join(CACHED)}, checksum FROM reference_logp WHERE key = ?1 AND sample IN "
            "(SELECT value FROM json_each(?2)) AND (run = ?3 OR rowid <= ?4) ORDER BY rowid DESC",
            [key, self._db.listed(ids), run, until],
        )
        return {row[0]: np.frombuffer(row[4], "<f4") for row in rows if is_valid(row)}

    @repeated
    def keep_reference_logp(
        self, run: str, step: int, key: str, logps: Mapping[int, NDArray[np.float32]]
    ) -> None:
        """Add log-probs to the cache; `rewind` deletes those that a run added after the step that it goes
        back to."""
        run = encode_text(run)
        entries = [(i, key, run, step, logp.astype("<f4").tobytes()) for i, logp in logps.items()]
        with self._db.transaction():
            rows = [(*entry, checksum(entry)) for entry in entries]
            self._db.insert("reference_logp", (*CACHED, "checksum"), rows)


class ImportedFile(NamedTuple):
    """A file whose records are in the store. `name`: empty if the whole file was forgotten."""

    file: str  # hash of its content
    name: str
    options: dict[str, Any]  # used to read it
    license: str | None = None


@dataclass(frozen=True)
class Provenance:
    """Where samples of one source come from."""

    source: str
    samples: int
    file: str  # its name
    sha256: str  # of its content
    license: str | None  # None: unknown

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Imports:
    """Imported files, and what the store still has of them."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def imported(self, file: str) -> ImportedFile | None:
        """The record of the import of a file with this hash; None if it wasn't imported."""
        return next(iter(self._imports("file = ?", [file])), None)

    def samples_of_others(self, name: str, file: str) -> int:
        """The number of samples from imported files with this name and another hash than `file`."""
        replaced = [i.file for i in self._imports("name = ? AND file <> ?", [name, file])]
        sql = "SELECT count(*) FROM samples WHERE file IN (SELECT value FROM json_each(?)) AND redone = 0"
        [(count,)] = self._db.run(sql, [self._db.listed(replaced)])
        return int(count)

    def _imports(self, clause: str, args: Sequence[Any]) -> list[ImportedFile]:
        rows = self._db.entries("imports", clause, args)
        return [ImportedFile(file, name, loads(options), license) for file, name, options, license in rows]

    @repeated
    def note_import(self, imported: ImportedFile) -> None:
        options = dumps(imported.options, "options of an import")
        with self._db.transaction():
            self._db.put("imports", [(imported.file, imported.name, options, imported.license)])

    def identities(self, identities: Iterable[str]) -> dict[str, Place]:
        """The places from which the responses with these identities were imported."""
        clause = "identity IN (SELECT value FROM json_each(?))"
        rows = self._db.entries("identities", clause, [self._db.listed(identities)])
        return {identity: (file, record) for identity, file, record in rows}

    @repeated
    def note_identities(self, places: Mapping[str, Place]) -> None:
        with self._db.transaction():
            self._db.put("identities", [(identity, *source) for identity, source in places.items()])

    def provenance(self, run: str | None = None) -> list[Provenance]:
        """The imported samples by source and file; with `run`, only those that it trained on."""
        clause = "" if run is None else " AND id IN (SELECT sample FROM draws WHERE run = ?)"
        rows = self._db.run(
            f"SELECT source, file, count(*) FROM samples WHERE redone = 0 AND file IS NOT NULL{clause} "
            "GROUP BY source, file ORDER BY source, min(id)",
            [] if run is None else [run],
        )
        report = []
        for source, file, count in rows:
            for entry in self._imports("file = ?", [decode_text(file)]):
                report.append(Provenance(decode_text(source), count, entry.name, entry.file, entry.license))
        return report

    def file_samples(self, file: str) -> tuple[list[int], int]:
        """The ids of a file's samples, and the number of forgotten ones."""
        rows = self._db.run("SELECT id, prompt_id = '' FROM samples WHERE file = ?", [file])
        ids = [i for i, erased in rows if not erased]
        return ids, len(rows) - len(ids)

    def origins(self, file: str, start: int, end: int) -> set[Origin]:
        """The origins of stored samples among records `start` to `end` of a file."""
        sql = "SELECT record, part FROM samples WHERE file = ? AND record BETWEEN ? AND ?"
        rows = self._db.run(sql, [file, start, end])
        return {Origin(file, record, decode_text(part)) for record, part in rows}

    def repeats(self, files: Sequence[str], last_id: int) -> tuple[int, int]:
        """Among the samples of these files with ids above `last_id`: the number of groups, and of samples
        that repeat an earlier response of their group."""
        files_are = "file IN (SELECT value FROM json_each(?2))"
        [counts] = self._db.run(  # in the order of samples_draw, so that only groups are sorted
            f"""
            SELECT count(DISTINCT prompt_id), count(CASE WHEN place > 1 THEN 1 END) FROM (
              SELECT prompt_id, id > ?1 AND coalesce({files_are}, FALSE) AS is_new,
                row_number() OVER (PARTITION BY prompt_id, response ORDER BY id) AS place
              FROM samples INDEXED BY samples_draw
              WHERE prompt_id IN (
                SELECT prompt_id FROM samples
                WHERE id > ?1 AND {files_are} AND prompt_id <> '' AND redone = 0
              ) AND redone = 0
            ) AS responses WHERE is_new
            """,
            [last_id, self._db.listed(files)],
        )
        groups, repeats = counts
        return int(groups), int(repeats)

    @repeated
    def take_back(self, file: str) -> int:
        """Erase a file's samples, so that it can be imported again; returns how many."""
        with self._db.transaction():
            ids, _ = self.file_samples(file)
            self._db.note_changes(ids)
            self._erase(ids, forget=False)
            self._db.run("DELETE FROM identities WHERE file = ?", [file])
        return len(ids)

    @repeated
    def forget(self, ids: list[int]) -> None:
        """Erase samples, their judgments and cached log-probs, and whatever SQLite keeps of deleted rows.

        Raises `Refused` if another process has the store open. A collector samples again those that it made
        for a step that isn't committed.
        """
        runs_query = "SELECT DISTINCT run FROM draws WHERE sample IN (SELECT value FROM json_each(?))"
        runs = [decode_text(run) for (run,) in self._db.run(runs_query, [self._db.listed(ids)])]
        with self._db.erasing(), self._db.transaction():
            requested = self._db.run(
                "SELECT DISTINCT substr(file, 5), record FROM samples "
                "WHERE id IN (SELECT value FROM json_each(?)) AND file LIKE 'run:%'",
                [self._db.listed(ids)],
            )
            for run, number in requested:
                commit = Ledger(self._db).committed(decode_text(run))
                clause = "run = ? AND number = ? AND (step IS NULL OR step > ?)"
                args = [run, number, commit.step if commit else 0]
                for request in self._db.entries("requests", clause, args):
                    self._db.put("requests", [(*request[:2], "forgotten", 0, None)])
            self._erase(ids, forget=True)
            for run in runs:
                recount_uses(self._db, run)
            remaining = "SELECT 1 FROM samples s WHERE s.file = imports.file AND s.redone = 0"
            for file, *_ in self._db.entries("imports", f"NOT EXISTS ({remaining})", []):
                self._db.put("imports", [(file, "", "{}", None)])  # nothing is left of it
            self._db.run("DELETE FROM changes")  # they name prompts
            drop_orders(self._db)  # so do these

    def _erase(self, ids: Sequence[int], *, forget: bool) -> None:
        """Empty the rows of samples, and delete their judgments and cached log-probs."""
        chosen = "(SELECT value FROM json_each(?1))"
        for start in range(0, len(ids), PAGE_ROWS):
            args = [self._db.listed(ids[start : start + PAGE_ROWS])]
            self._db.run(f"DELETE FROM pairs WHERE winner IN {chosen} OR loser IN {chosen}", args)
            self._db.run(f"DELETE FROM reference_logp WHERE sample IN {chosen}", args)
            stored = self._db.run(f"{SELECT} WHERE id IN {chosen}", args)
            erased = [(*row[1:], row[0]) for row in (_erased(row, forget) for row in stored)]
            self._db.update("samples", SAMPLE[1:], erased)


class KeyCounts:
    """Counts the keys of a file's records in a temporary table, which grows with the file. One at a time."""

    def __init__(self, database: Database) -> None:
        self._db = database
        database.run("DROP TABLE IF EXISTS temp.repeats")
        database.run("CREATE TEMP TABLE repeats (key TEXT PRIMARY KEY, count INTEGER) WITHOUT ROWID")

    def add(self, keys: Sequence[str]) -> list[int]:
        """Count these keys, and return how often each has come so far."""
        sql = "SELECT key, count FROM temp.repeats WHERE key IN (SELECT value FROM json_each(?))"
        counts = Counter[str](dict(self._db.run(sql, [self._db.listed(keys)])))
        numbers = []
        for key in keys:
            counts[key] += 1
            numbers.append(counts[key])
        self._db.insert("temp.repeats", ("key", "count"), list(counts.items()), key=("key",))
        return numbers


def forgotten(origin: Origin) -> Origin:
    """The origin that replaces a forgotten sample's, so that it isn't imported again."""
    digest = blake2b(origin.part.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return origin._replace(part=f"forgotten:{digest}")


def _erased(row: Sequence[Any], forget: bool) -> tuple[Any, ...]:
    """The erased form of a row of `SAMPLE`, which for a forgotten record of a file still identifies it."""
    original = dict(zip(SAMPLE, row, strict=True))
    erased: dict[str, Any] = dict.fromkeys(SAMPLE) | {
        **{name: original[name] for name in ("id", "version", "run", "step")},
        **dict.fromkeys(("state", "knows_behavior", "knows_tokens", "knows_kept"), 0),
        **dict.fromkeys(("prompt_id", "prompt", "response"), ""),
        "role": original["role"] if original["role"] in ROLES else ROLES[0],
        "source": "(forgotten)" if forget else "(replaced)",
        "redone": 1,
        "meta": _number(original["meta"], "index") or "{}",
        "sampling": _number(original["sampling"], "seed"),
    }
    file = original["file"]
    if forget and isinstance(file, str) and not file.startswith("run:"):
        origin = forgotten(Origin(file, original["record"], decode_text(original["part"])))
        erased |= origin._asdict()
    values = [erased[name] for name in SAMPLE[:-1]]
    return (*values, sample_checksum(values))


def _number(text: Any, name: str) -> str | None:
    """An object with only this number, from which a sampler knows which noise it has used."""
    try:
        values = loads(decode_text(text))
    except (TypeError, ValueError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get(name), int):
        return None
    return json.dumps({name: values[name]})
