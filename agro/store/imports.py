"""What was imported: files with the options they were read with, licenses, repeats, and taking samples back.

A sample that is replaced or forgotten is erased: its row stays, without anything that was in it, so that ids
aren't given twice and draws still tell which runs trained on it. Nothing but `drawn` returns such a row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from agro.io.strictjson import dumps, loads
from agro.store.candidates import drop_orders
from agro.store.database import PAGE_ROWS, Database
from agro.store.drawing import Draws
from agro.store.ledger import Ledger
from agro.store.sample_rows import SAMPLE, SELECT, Origin, decode_text, sample_checksum
from agro.types import ROLES

Place = tuple[str, int]  # hash of a file, and number of a record


class ImportedFile(NamedTuple):
    """A file whose records are in the store. `name`: empty where all of it was forgotten."""

    file: str  # hash of its content
    name: str
    options: dict[str, Any]  # that it was read with
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
    """What was imported, and what is left of it."""

    def __init__(self, database: Database, draws: Draws, ledger: Ledger) -> None:
        self._db, self._draws, self._ledger = database, draws, ledger

    def count_keys(self) -> KeyCounts:
        """Begin to count the keys of a file's records. One count at a time."""
        return KeyCounts(self._db)

    def imported(self, file: str) -> ImportedFile | None:
        """What is known of a file of that hash; None where it wasn't imported."""
        return next(iter(self._imports("file = ?", [file])), None)

    def samples_of_others(self, name: str, file: str) -> int:
        """The samples of imported files of this name with another content than that of the hash `file`."""
        replaced = [i.file for i in self._imports("name = ? AND file <> ?", [name, file])]
        sql = "SELECT count(*) FROM samples WHERE file IN (SELECT value FROM json_each(?)) AND redone = 0"
        [(count,)] = self._db.run(sql, [self._db.listed(replaced)])
        return int(count)

    def _imports(self, clause: str, args: Sequence[Any]) -> list[ImportedFile]:
        rows = self._db.entries("imports", clause, args)
        return [ImportedFile(file, name, loads(options), license) for file, name, options, license in rows]

    def note_import(self, imported: ImportedFile) -> None:
        options = dumps(imported.options, "options of an import")
        with self._db.transaction():
            self._db.put("imports", [(imported.file, imported.name, options, imported.license)])

    def identities(self, identities: Iterable[str]) -> dict[str, Place]:
        """Where the responses that are known by these identities were taken from."""
        clause = "identity IN (SELECT value FROM json_each(?))"
        rows = self._db.entries("identities", clause, [self._db.listed(identities)])
        return {identity: (file, record) for identity, file, record in rows}

    def note_identities(self, places: Mapping[str, Place]) -> None:
        with self._db.transaction():
            self._db.put("identities", [(identity, *source) for identity, source in places.items()])

    def provenance(self, run: str | None = None) -> list[Provenance]:
        """By source and file the imported samples; with `run` those that it trained on."""
        clause = "" if run is None else " AND id IN (SELECT sample FROM draws WHERE run = ?)"
        rows = self._db.run(
            f"SELECT source, file, count(*) FROM samples WHERE redone = 0 AND file IS NOT NULL{clause} "
            "GROUP BY source, file ORDER BY source, min(id)",
            [] if run is None else [run],
        )
        report = []
        for source, file, count in rows:
            for known in self._imports("file = ?", [decode_text(file)]):
                report.append(Provenance(decode_text(source), count, known.name, known.file, known.license))
        return report

    def file_samples(self, file: str) -> tuple[list[int], int]:
        """The ids of a file's samples, and how many of it were forgotten."""
        rows = self._db.run("SELECT id, prompt_id = '' FROM samples WHERE file = ?", [file])
        ids = [i for i, erased in rows if not erased]
        return ids, len(rows) - len(ids)

    def origins(self, file: str, start: int, end: int) -> set[Origin]:
        """The origins of stored samples among records `start` to `end` of a file."""
        sql = "SELECT record, part FROM samples WHERE file = ? AND record BETWEEN ? AND ?"
        rows = self._db.run(sql, [file, start, end])
        return {Origin(file, record, decode_text(part)) for record, part in rows}

    def repeats(self, files: Sequence[str], last_id: int) -> tuple[int, int]:
        """Of the samples of these files with higher ids than `last_id`, how many groups there are, and how
        many of them have the response of an earlier sample of their group."""
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

    def take_back(self, file: str) -> int:
        """Erase a file's samples, so that it can be imported anew; returns how many."""
        with self._db.transaction():
            ids, _ = self.file_samples(file)
            self._db.note_changes(ids)
            self._erase(ids, forget=False)
            self._db.run("DELETE FROM identities WHERE file = ?", [file])
        return len(ids)

    def forget(self, ids: list[int]) -> None:
        """Erase samples, their judgments and cached log-probs, and whatever SQLite keeps of deleted rows.

        Raises `Refused` where another process has the store open. A collector samples again what it made of
        these for a step that isn't committed.
        """
        runs = [trained.run for trained in self._draws.trained(ids)]
        with self._db.erasing(), self._db.transaction():
            made = self._db.run(
                "SELECT DISTINCT substr(file, 5), record FROM samples "
                "WHERE id IN (SELECT value FROM json_each(?)) AND file LIKE 'run:%'",
                [self._db.listed(ids)],
            )
            for run, number in made:
                commit = self._ledger.committed(decode_text(run))
                clause = "run = ? AND number = ? AND (step IS NULL OR step > ?)"
                args = [run, number, commit.step if commit else 0]
                for request in self._db.entries("requests", clause, args):
                    self._db.put("requests", [(*request[:2], "forgotten", 0, None)])
            self._erase(ids, forget=True)
            for run in runs:
                self._draws.recount_uses(run)
            remaining = "SELECT 1 FROM samples s WHERE s.file = imports.file AND s.redone = 0"
            for file, *_ in self._db.entries("imports", f"NOT EXISTS ({remaining})", []):
                self._db.put("imports", [(file, "", "{}", None)])  # nothing is left of it
            self._db.run("DELETE FROM changes")  # which name prompts
            drop_orders(self._db)  # and so do these

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
    """How often each key of the records of a file has come, in a temporary table: it grows with the file."""

    def __init__(self, database: Database) -> None:
        self._db = database
        database.run("DROP TABLE IF EXISTS temp.repeats")
        database.run("CREATE TEMP TABLE repeats (key TEXT PRIMARY KEY, count INTEGER) WITHOUT ROWID")

    def add(self, keys: Sequence[str]) -> list[int]:
        """Count these keys; returns for each how often it has come so far."""
        sql = "SELECT key, count FROM temp.repeats WHERE key IN (SELECT value FROM json_each(?))"
        counts = Counter[str](dict(self._db.run(sql, [self._db.listed(keys)])))
        numbers = []
        for key in keys:
            counts[key] += 1
            numbers.append(counts[key])
        self._db.insert("temp.repeats", ("key", "count"), list(counts.items()), key=("key",))
        return numbers


def forgotten(origin: Origin) -> Origin:
    """What stands in place of the origin of a sample that was forgotten, so that it isn't taken again."""
    digest = blake2b(origin.part.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return origin._replace(part=f"forgotten:{digest}")


def _erased(row: Sequence[Any], forget: bool) -> tuple[Any, ...]:
    """A row of `SAMPLE` that says only that there was one, and for forgotten records of a file which."""
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
    """An object with nothing but this number, by which a sampler knows which noise it has used."""
    try:
        values = loads(decode_text(text))
    except (TypeError, ValueError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get(name), int):
        return None
    return json.dumps({name: values[name]})
