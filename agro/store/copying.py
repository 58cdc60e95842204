"""Copies of a store: its samples to a file; all of it to a new store, from a file to PostgreSQL or back, with
the same ids and checksums; or the readable part of a damaged file.

Samples are written as interchange records, JSON Lines or Parquet, which `agro.logs` reads again. Arrays are
lists, NaN is null. In Parquet, `meta` and `sampling` are JSON text; a prompt of messages is in `messages`, as
JSON, and a version per token in `versions`. Text that UTF-8 can't encode (lone surrogates) is in `exact`, as
JSON; only files with our mark in the schema have this column.
"""

from __future__ import annotations

import gzip
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from agro.errors import Refused
from agro.io.files import replacing, writing
from agro.io.record_files import JSON_COLUMNS, OURS, ROW_GROUP
from agro.io.strictjson import dumps
from agro.io.terminal import first_of
from agro.store.database import (
    CACHED,
    DERIVED,
    LEDGERS,
    PAGE_ENTRIES,
    PAGE_ROWS,
    Database,
    Row,
    columns_fit,
    read_text,
)
from agro.store.drawing import recount_uses
from agro.store.location import Location, opened, url_of
from agro.store.sample_rows import SAMPLE, decode_text, insert_into, is_valid, is_valid_sample
from agro.types import UNKNOWN_VERSION, Sample
from agro.types.conversation import without_tools

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
TEXTS = ("prompt", "response", "prompt_id", "episode", "tokenizer", "role", "source")
BLOCK = 1024  # rowids per query
SMALLEST_ROW = 32  # bytes, pages and indexes included
GAP = 1 << 16  # consecutive rowids without a readable row, after which the search ends
# Columns by table; samples, which others refer to, comes first. From a damaged store, requests and uses of
# groups are derived from other tables, and cached log-probs are dropped.
COLUMNS: dict[str, tuple[str, ...]] = {"samples": SAMPLE}
COLUMNS |= {table: ("rowid", *LEDGERS[table], "checksum") for table in LEDGERS}
COLUMNS["reference_logp"] = ("rowid", *CACHED, "checksum")
RECOVERED = {name: names for name, names in COLUMNS.items() if name not in (*DERIVED, "reference_logp")}
# Indexes that also give the last rowid.
INDEXED = {
    "samples": "samples INDEXED BY samples_state WHERE state >= 0",
    "draws": "draws INDEXED BY draws_sample WHERE sample >= 0",
}
# Columns that refer to samples.
SAMPLES_OF = dict.fromkeys(RECOVERED, ()) | {
    "samples": ("id",),
    "pairs": ("winner", "loser"),
    "draws": ("sample",),
}


def write_samples(path: str | Path, samples: Iterable[Sample]) -> int:
    """Write samples to a file in the format of its ending, completely or not at all. Returns how many."""
    path, records = Path(path), map(to_record, samples)
    if not path.name.endswith(ENDINGS):
        raise Refused(f"{path}: expected a name that ends with {', '.join(ENDINGS)}")
    try:
        with replacing(path) as file:
            if path.suffix == ".parquet":
                return _write_parquet(file, records)
            if path.suffix != ".gz":
                return _write_lines(file, records)
            # Without name and time, so that the same samples make the same file.
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                return _write_lines(packed, records)
    except OSError as error:
        raise Refused(f"{path}: can't be written: {error.strerror or error}") from None


def _write_lines(file: Any, records: Iterable[dict[str, Any]]) -> int:
    count = 0
    for count, record in enumerate(records, 1):
        prefix = f"sample {count} of the export (prompt {record['prompt_id']})"
        try:
            line = dumps(record, prefix).encode()
        except UnicodeEncodeError:  # lone surrogates must be escaped in UTF-8
            line = dumps(record, prefix, ascii=True).encode()
        file.write(line + b"\n")
    return count


def to_record(sample: Sample) -> dict[str, Any]:
    """The record from which `from_record` makes an equal sample. Unknown fields but `reward` are dropped."""
    meta = dict(sample.meta)
    is_unknown = isinstance(sample.version, int) and sample.version == UNKNOWN_VERSION
    answer = meta.pop("answer") if meta.get("answer") is not None else None
    prompt, tools = without_tools(sample.prompt)
    record = {
        "prompt": prompt,
        "response": sample.response,
        "reward": sample.reward,
        "prompt_id": sample.prompt_id,
        "role": sample.role,
        "source": sample.source,
    }
    optional = {
        "episode": sample.episode,
        "answer": answer,
        "tools": tools or None,
        "tokens": _list(sample.tokens),
        "mask": _list(sample.mask),
        "action": None if sample.learn is None else _list(sample.action),
        "tokenizer": sample.tokenizer,
        "behavior_logp": _list(sample.behavior_logp),
        "sampling": sample.sampling,
        "kept": _list(sample.kept),
        "kept_count": _list(sample.kept_count),
        "context_tokens": _list(sample.context_tokens),
        "token_reward": _list(sample.token_reward),
        "version": None if is_unknown else _list(sample.version),
        "meta": meta or None,
    }
    return record | {name: value for name, value in optional.items() if value is not None}


def _list(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype != np.float32:
        return value.tolist()
    return [None if x != x else x for x in value.tolist()]


def _write_parquet(file: BinaryIO, records: Iterable[dict[str, Any]]) -> int:
    """Write records to an open file, and return how many."""
    import pyarrow as pa  # takes a third of a second, and few users of a store need it
    from pyarrow import parquet

    integers, floats, flags = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.bool_())
    schema = pa.schema(
        [(name, pa.string()) for name in TEXTS + JSON_COLUMNS]
        + [("reward", pa.float64()), ("version", pa.int64())]
        + [(name, integers) for name in ("tokens", "context_tokens", "versions", "kept", "kept_count")]
        + [(name, flags) for name in ("mask", "action")]
        + [(name, floats) for name in ("behavior_logp", "token_reward")],
        metadata=OURS,
    )
    count = 0
    records = iter(records)
    with parquet.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        while rows := [_to_row(r, count + i) for i, r in enumerate(islice(records, ROW_GROUP), 1)]:
            writer.write_table(pa.Table.from_pylist(rows, schema))
            count += len(rows)
    return count


def _to_row(record: dict[str, Any], number: int) -> dict[str, Any]:
    prefix = f"sample {number} of the export (prompt {record['prompt_id']})"
    row = dict(record)
    if "answer" in row:
        row["meta"] = {**row.get("meta", {}), "answer": row.pop("answer")}
    if not isinstance(row["prompt"], str):
        row["messages"] = row.pop("prompt")
    if isinstance(row.get("version"), list):
        row["versions"] = row.pop("version")
    for name in ("behavior_logp", "token_reward"):
        if name in row:
            row[name] = [float("nan") if x is None else x for x in row[name]]
    texts = {name: row[name] for name in TEXTS if isinstance(row.get(name), str)}
    plain = {name: text.encode("utf-8", "replace").decode() for name, text in texts.items()}
    if plain != texts:
        row |= plain
        row["exact"] = {name: text for name, text in texts.items() if plain[name] != text}
    for name in JSON_COLUMNS:
        if name in row:
            row[name] = dumps(row[name], f"{prefix}: {name}", ascii=True)
    return row


@dataclass
class RecoveryReport:
    """What was recovered, and what is lost because it can't be read or isn't as it was written."""

    taken: Counter[str] = field(default_factory=Counter)  # rows, by table
    lost: list[int] = field(default_factory=list)  # ids of samples, from 1 to the last known one
    lost_rows: Counter[str] = field(default_factory=Counter)  # by table, with the rows of lost samples
    may_miss: list[str] = field(default_factory=list)  # tables whose last rows can't be read

    def to_json(self) -> dict[str, Any]:
        lost = {f"lost_{table}": self.lost_rows[table] for table in RECOVERED if table != "samples"}
        counts = {table: self.taken[table] for table in RECOVERED}
        return {**counts, "lost": self.lost, **lost, "may_miss": self.may_miss}

    def __str__(self) -> str:
        counts = [f"{self.taken[table]} {table}" for table in ("samples", "pairs", "draws", "commits")]
        lines = [f"taken: {', '.join(counts)}"]
        if self.lost:
            lines.append(f"lost samples: {len(self.lost)} (ids {first_of(self.lost, 10)})")
        lines += [f"lost {table}: {count}" for table, count in self.lost_rows.items() if count]
        if self.may_miss:
            lines.append(f"there may have been more: {', '.join(self.may_miss)}")
        return "\n".join(lines)


def copy(source: Location, target: Location) -> None:
    """Write all of a store into a new one, completely or not at all.

    The next draw makes orders of groups again. Raises `Refused` for a damaged row or a nonempty target.
    """
    with (
        opened(source, read_only=True, create=False) as old,
        opened(target) as new,
        new.transaction(),
    ):
        for table in ("samples", "commits", "imports"):
            if new.run(f"SELECT 1 FROM {table} LIMIT 1"):
                raise Refused(
                    f"{target}: expected an empty store to copy into, but it has {table}. What to do: give "
                    "another file, or another ?schema=NAME"
                )
        for table, columns in COLUMNS.items():
            sql = f"SELECT {', '.join(columns)} FROM {table} WHERE {columns[0]} > ? ORDER BY {columns[0]}"
            for page in old.pages(sql, rows=PAGE_ROWS if table == "samples" else PAGE_ENTRIES):
                for row in page:
                    if not _is_whole(table, row):
                        raise Refused(
                            f"{old.path}: {table}: row {row[0]} isn't as it was written. {old.way_out()}"
                        )
                new.insert(table, columns, page)
        new.renumber([table for table in COLUMNS if table != "samples"])


def recover(path: str | Path, target: str | Path) -> RecoveryReport:
    """Write all intact rows of the store at `path` to a new store at `target`; ids stay.

    `path` isn't changed: a copy is read, which temporarily takes disk space next to `target`. To replace
    `path` by `target` afterwards, remove PATH-wal and PATH-shm first. Raises `Refused` if `target` exists, or
    no sample can be read.
    """
    if url_of(path):
        raise Refused(f"{path}: expected a file; a database goes back to a backup of the server")
    path, target = Path(path), Path(target)
    if not path.is_file():
        raise Refused(f"{path}: no such store")
    if target.exists():
        raise Refused(f"{target}: there is such a file; give another name")
    with writing(target), tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        copied, new, has_tables = Path(folder) / "copy.db", Path(folder) / "new.db", False
        for ending in ("", "-wal"):
            part = Path(f"{path}{ending}")
            if part.exists():
                shutil.copyfile(part, f"{copied}{ending}")
        with opened(new) as store, closing(sqlite3.connect(copied, isolation_level=None)) as damaged:
            damaged.text_factory = read_text
            with suppress(sqlite3.DatabaseError, UnicodeDecodeError):  # the latter in SQLite's own message
                has_tables = columns_fit(damaged)
            report = _copy_all(damaged, store, copied.stat().st_size) if has_tables else RecoveryReport()
        if not report.taken["samples"]:
            raise Refused(f"{path}: it has no readable sample of a store; go back to a copy")
        new.rename(target)
    return report


def _copy_all(damaged: sqlite3.Connection, store: Database, size: int) -> RecoveryReport:
    """`size`: that of the damaged file, in bytes."""
    report, ids, named = RecoveryReport(), set[int](), {0}
    with store.transaction():
        for table, columns in RECOVERED.items():
            last_rowid = _last_rowid(damaged, table, size // SMALLEST_ROW)
            if last_rowid is None:
                report.may_miss.append(table)
            if table == "samples":
                named.add(last_rowid or 0)
            insert = insert_into(table, columns)
            naming = [columns.index(name) for name in SAMPLES_OF[table]]
            for row in _rows(damaged, table, columns, last_rowid):
                if row is not None and _is_whole(table, row):
                    samples = {row[i] for i in naming}
                    named |= samples
                    with suppress(sqlite3.IntegrityError):  # a damaged tree may yield a row twice
                        if table == "samples" or samples <= ids:
                            store.run(insert, row)
                            report.taken[table] += 1
                            ids |= samples
                            continue
                report.lost_rows[table] += table != "samples" and last_rowid is not None
        report.lost = [i for i in range(1, max(named) + 1) if i not in ids]
        for (run,) in store.run("SELECT DISTINCT run FROM draws"):
            recount_uses(store, decode_text(run))
        store.put("requests", store.run(_REQUESTS))
    return report


def _last_rowid(damaged: sqlite3.Connection, table: str, limit: int) -> int | None:
    """The last rowid of a table; None if it can't be read, or is above `limit`, as a damaged one may be."""
    for rows in (table, INDEXED.get(table, table)):
        with suppress(sqlite3.DatabaseError):
            [(rowid,)] = damaged.execute(f"SELECT max(rowid) FROM {rows}")
            if (rowid or 0) <= limit:
                return rowid or 0
    return None


def _is_whole(table: str, row: Row) -> bool:
    """Whether a row of `COLUMNS` is as it was written."""
    return is_valid_sample(row) if table == "samples" else is_valid(row[1:])


# Collectors' claims, derived from samples and draws. Unscored ones are claimed again.
_REQUESTS = """
SELECT substr(s.file, 5), s.record, 'recovered', min(s.state) <> 0, min(d.step)
FROM samples s LEFT JOIN draws d ON d.sample = s.id AND d.run = substr(s.file, 5)
WHERE s.file LIKE 'run:%' GROUP BY s.file, s.record
"""


def _rows(
    damaged: sqlite3.Connection, table: str, columns: tuple[str, ...], end: int | None
) -> Iterator[Row | None]:
    """Yield all rows up to rowid `end`, the first column; None for each unreadable one.

    An unreadable interval of rowids is halved, down to single rows. Without a known end, reading ends after
    `GAP` rowids without a row.
    """
    sql = f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED WHERE rowid BETWEEN ? AND ? ORDER BY rowid"
    start, latest = 1, 0
    while start <= (latest + GAP if end is None else end):
        final = start + BLOCK - 1 if end is None else min(start + BLOCK - 1, end)
        intervals = [(start, final)]  # a stack, whose top is the next one
        start += BLOCK
        while intervals:
            low, high = intervals.pop()
            try:
                rows = damaged.execute(sql, [low, high]).fetchall()
            except sqlite3.DatabaseError:
                if low == high:
                    yield None
                else:
                    middle = (low + high) // 2
                    intervals += [(middle + 1, high), (low, middle)]
            else:
                latest = rows[-1][0] if rows else latest
                yield from rows
