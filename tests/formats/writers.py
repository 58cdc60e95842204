"""Files as the programs that have a format write them, from records that are written by hand."""

from __future__ import annotations

import csv
import json
import pickle
import sqlite3
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import zstandard
from pyarrow import parquet
from safetensors.torch import save

Rows = Sequence[Mapping[str, Any]]


def json_lines(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def json_list(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps(list(rows)), encoding="utf-8")


def document(path: Path, rows: Rows) -> None:
    """One JSON document, indented over lines, as agents write it."""
    path.write_text(json.dumps(rows[0], indent=2), encoding="utf-8")


def comma_separated(path: Path, rows: Rows) -> None:
    """A CSV file; objects and lists are written as JSON."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        for row in rows:
            table.writerow({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()})


def parquet_table(path: Path, rows: Rows) -> None:
    """A Parquet file, whose columns have the types of the values."""
    parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)


def slime_dump(path: Path, rows: Rows) -> None:
    """The samples of one rollout, as slime saves them for debugging."""
    torch.save({"rollout_id": 4, "samples": [dict(row) for row in rows]}, path)


def evalplus(path: Path, rows: Rows) -> None:
    """A document of results, which lists those of each task."""
    by_task: dict[str, list[Any]] = {}
    for row in rows:
        by_task.setdefault(row["task_id"], []).append(row)
    path.write_text(json.dumps({"date": "2026-08-01", "hash": "h", "eval": by_task}))


def harbor(path: Path, rows: Rows) -> None:
    """A job's folder. Of each trial the result, and its trajectories by file."""
    path.mkdir(parents=True)
    (path / "result.json").write_text('{"stats": {}}')
    for row in rows:
        trial = path / row["trial_name"]
        (trial / "agent").mkdir(parents=True)
        for name, content in row["files"].items():
            (trial / "agent" / name).write_text(json.dumps(content))
        result = {name: value for name, value in row.items() if name != "files"}
        (trial / "result.json").write_text(json.dumps(result))


def helm(path: Path, rows: Rows) -> None:
    """A run's folder: its states, and statistics of the instances."""
    path.mkdir()
    states = [row for row in rows if "stats" not in row]
    content = {"adapter_spec": {"method": "generation"}, "request_states": states}
    (path / "scenario_state.json").write_text(json.dumps(content))
    (path / "per_instance_stats.json").write_text(json.dumps([row for row in rows if "stats" in row]))


INSPECT_TASK = {
    "task": "addition",
    "task_id": "t",
    "model": "openai/gpt-x",
    "model_generate_config": {"temperature": 0.5},
}
INSPECT = {"version": 2, "status": "success", "eval": INSPECT_TASK, "plan": {}, "results": {}, "stats": {}}


def inspect_document(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps({**INSPECT, "samples": list(rows)}))


def inspect_members(rows: Rows) -> dict[str, Any]:
    """What is in the zip file, by name."""
    members: dict[str, Any] = {
        "_journal/start.json": {"version": 2, "eval": INSPECT_TASK},
        "summaries.json": [],
    }
    for at, row in enumerate(rows):
        members[f"samples/{at}_epoch_{row.get('epoch')}.json"] = row
    return members | {"header.json": INSPECT}


def inspect_deflated(path: Path, rows: Rows) -> None:
    """As older versions wrote it; it isn't finished, and has no header yet."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in inspect_members(rows).items():
            if name != "header.json":
                archive.writestr(name, json.dumps(value))


def inspect_zstd(path: Path, rows: Rows) -> None:
    zstd_archive(path, inspect_members(rows))


def inspect_in_parts(path: Path, rows: Rows) -> None:
    """The messages in parts of two, and the attachments, of the first sample; the others in one member."""
    members = inspect_members(rows)
    shell = dict(members.pop(f"samples/0_epoch_{rows[0].get('epoch')}.json"))
    messages = shell.pop("messages")
    for start in range(0, len(messages), 2):
        members[f"samples/0_epoch_1/messages/{start}.json"] = messages[start : start + 2]
    members["samples/0_epoch_1/attachments/0.json"] = ["unused", "What is 2+2?"]
    members["samples/0_epoch_1/events/stats.json"] = {}
    zstd_archive(path, members | {"samples/0_epoch_1/sample.json": shell})


def zstd_archive(path: Path, members: Mapping[str, Any]) -> None:
    """A zip file whose members are packed with Zstandard, which Python writes from 3.14 on."""
    body, directory = b"", b""
    for name, value in members.items():
        data = json.dumps(value).encode()
        small = zstandard.compress(data)
        sizes = (zlib.crc32(data), len(small), len(data), len(name), 0)
        central = struct.pack("<4s6H3L5H2L", b"PK\1\2", 63, 63, 0, 93, 0, 33, *sizes, 0, 0, 0, 0, len(body))
        directory += central + name.encode()
        body += struct.pack("<4s5H3L2H", b"PK\3\4", 63, 0, 93, 0, 33, *sizes) + name.encode() + small
    count = len(members)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), len(body), 0)
    path.write_bytes(body + directory + end)


def trinity_blob(content: Any, tensors: Mapping[str, Sequence[Any]]) -> bytes:
    """Experiences as Trinity's Experience.serialize_many writes them."""
    types = {"tokens": torch.int32}
    arrays = {f"0:{name}": torch.tensor(x, dtype=types.get(name)) for name, x in tensors.items()}
    packed, values = pickle.dumps(content), save(arrays)
    return b"TRXP" + struct.pack("<BQQ", 1, len(packed), len(values)) + packed + values


def trinity(path: Path, rows: Rows) -> None:
    """A row has the fields and tensors of an experience, or its bytes, and the reward of the table."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE TABLE exp (id INTEGER PRIMARY KEY, task_id TEXT, reward REAL, consumed INTEGER)"
        )
        database.execute("CREATE TABLE exp_blob (id INTEGER PRIMARY KEY, experience_bytes BLOB)")
        for i, row in enumerate(rows, 1):
            if "blob" in row:
                blob = row["blob"]
            else:
                items = {"version": 1, "num_items": 1, "items": [row["fields"]]}
                blob = trinity_blob(items, row["tensors"])
            database.execute("INSERT INTO exp VALUES (?, '0', ?, 1)", (i, row["reward"]))
            database.execute("INSERT INTO exp_blob VALUES (?, ?)", (i, blob))


def tinker_capture(path: Path, rows: Rows) -> None:
    """A capture's table, with the columns of the first row; lists and objects are JSON."""
    names, as_json = list(rows[0]), ("prompt_tokens", "sampled_tokens", "logprobs", "metadata")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"CREATE TABLE wire_rows (cursor, {', '.join(names)})")
        for i, row in enumerate(rows, 1):
            values = [json.dumps(row.get(name)) if name in as_json else row.get(name) for name in names]
            places = ", ".join("?" * (1 + len(names)))
            database.execute(f"INSERT INTO wire_rows VALUES ({places})", (i, *values))


WRITERS = {
    "csv": comma_separated,
    "document": document,
    "evalplus": evalplus,
    "harbor": harbor,
    "helm": helm,
    "inspect document": inspect_document,
    "inspect in parts": inspect_in_parts,
    "inspect unfinished": inspect_deflated,
    "inspect": inspect_zstd,
    "list": json_list,
    "parquet": parquet_table,
    "slime": slime_dump,
    "tinker capture": tinker_capture,
    "trinity": trinity,
}
