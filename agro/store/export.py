"""Samples written to files: the interchange record as JSON Lines or Parquet, read again by `agro.logs`.

Arrays are lists, NaN is null. In Parquet, `meta` and `sampling` are JSON text; a prompt of messages is in
`messages`, as JSON, a version per token in `versions`. Text that UTF-8 can't encode (lone surrogates) is in
`exact`, as JSON; only a file with our mark in its schema has this column.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from agro.errors import Refused
from agro.io.files import replacing
from agro.io.record_files import JSON, MARK, ROWS
from agro.io.strictjson import dumps
from agro.types import UNKNOWN_VERSION, Sample
from agro.types.conversation import without_tools

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
TEXTS = ("prompt", "response", "prompt_id", "episode", "tokenizer", "role", "source")


def write_samples(path: str | Path, samples: Iterable[Sample]) -> int:
    """Write samples to a file of the format of its ending, completely or not at all. Returns how many."""
    path, records = Path(path), map(to_record, samples)
    if not path.name.endswith(ENDINGS):
        raise Refused(f"{path}: expected a name that ends with {', '.join(ENDINGS)}")
    try:
        with replacing(path) as file:
            if path.suffix == ".parquet":
                return _write_parquet(file, records)
            if path.suffix != ".gz":
                return _write_lines(file, records)
            # Without name and time inside: the same samples make the same file.
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
        except UnicodeEncodeError:  # UTF-8 has lone surrogates only escaped
            line = dumps(record, prefix, ascii=True).encode()
        file.write(line + b"\n")
    return count


def to_record(sample: Sample) -> dict[str, Any]:
    """What `from_record` gives an equal sample for. Unknown fields are dropped, `reward` excepted."""
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
    import pyarrow as pa  # takes a third of a second, and few who open a store need it
    from pyarrow import parquet

    integers, floats, flags = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.bool_())
    schema = pa.schema(
        [(name, pa.string()) for name in TEXTS + JSON]
        + [("reward", pa.float64()), ("version", pa.int64())]
        + [(name, integers) for name in ("tokens", "context_tokens", "versions", "kept", "kept_count")]
        + [(name, flags) for name in ("mask", "action")]
        + [(name, floats) for name in ("behavior_logp", "token_reward")],
        metadata=MARK,
    )
    count = 0
    records = iter(records)
    with parquet.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        while rows := [_to_row(r, count + i) for i, r in enumerate(islice(records, ROWS), 1)]:
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
    for name in JSON:
        if name in row:
            row[name] = dumps(row[name], f"{prefix}: {name}", ascii=True)
    return row
