"""The interchange record: a sample as one JSON object, in JSON Lines (gzipped or not) or Parquet, bit by bit.

Arrays are lists, NaN is null. `mask` marks the tokens to learn from; `action`, those that the policy chose, stands
beside it where the two are told apart. What isn't a field of the record is kept in `meta`.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from agro.errors import Refused
from agro.store import parquet
from agro.strictjson import dumps, loads
from agro.types import UNKNOWN_VERSION, Role, Sample

FIELDS = (
    "prompt",
    "response",
    "reward",
    "prompt_id",
    "episode",
    "answer",
    "tokens",
    "mask",
    "action",
    "tokenizer",
    "behavior_logp",
    "sampling",
    "context_tokens",
    "token_reward",
    "model",
    "version",
    "role",
    "source",
    "meta",
)
ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")


def to_record(sample: Sample) -> dict[str, Any]:
    """What `from_record` gives an equal sample for. Unknown fields are left out, `reward` excepted."""
    meta = dict(sample.meta)
    optional = {
        "episode": sample.episode,
        "answer": meta.pop("answer") if meta.get("answer") is not None else None,
        "tokens": _list(sample.tokens),
        "mask": _list(sample.mask),
        "action": None if sample.learn is None else _list(sample.action),
        "tokenizer": sample.tokenizer,
        "behavior_logp": _list(sample.behavior_logp),
        "sampling": sample.sampling,
        "context_tokens": _list(sample.context_tokens),
        "token_reward": _list(sample.token_reward),
        "version": _list(sample.version) if isinstance(sample.version, np.ndarray) else sample.version,
        "meta": meta or None,
    }
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": sample.reward,
        "prompt_id": sample.prompt_id,
        "role": sample.role,
        "source": sample.source,
        **{
            k: v
            for k, v in optional.items()
            if v is not None and not (k == "version" and v == UNKNOWN_VERSION)
        },
    }


def from_record(record: dict[str, Any], *, role: Role = "log", source: str = "") -> Sample:
    """The sample of a record; null is unknown. `role` and `source` are those of records that name none.

    Raises `Refused` naming the field.
    """
    known = {k: record[k] for k in FIELDS if record.get(k) is not None}
    for name in ("prompt", "response"):
        if name not in known:
            raise Refused(f"{name}: expected text, got {'null' if name in record else 'no such field'}")
    meta = dict(_typed(known, "meta", dict, "an object") or {})
    for name in ("answer", *(k for k in record if k not in FIELDS)):
        if name == "answer" and name not in known:
            continue
        _keep(meta, name, record[name])
    if "model" in known:
        if "source" in known:
            _keep(meta, "model", known["model"])
        else:
            known["source"] = known["model"]
    action, mask = (_array(known, name, "biu", "true and false") for name in ("action", "mask"))
    version = known.get("version", UNKNOWN_VERSION)
    if isinstance(version, list):
        version = _array(known, "version", "iu", "whole numbers")
    elif isinstance(version, bool) or not isinstance(version, int) or abs(version) >= 2**63:
        raise Refused(f"version: expected a whole number, or a list of one a token, got {version!r:.80}")
    for name, value in (("prompt", known["prompt"]), ("sampling", known.get("sampling")), ("meta", meta)):
        if isinstance(value, list | dict):  # a table can hold what JSON, and so the store, can't
            dumps(value, name)
    return Sample(
        prompt=known["prompt"],
        response=known["response"],
        reward=number(known, "reward"),
        prompt_id=_name(known, "prompt_id") or "",
        episode=_name(known, "episode"),
        tokens=_array(known, "tokens", "iu", "whole numbers"),
        action=mask if action is None else action,
        learn=None if action is None else mask,
        tokenizer=_typed(known, "tokenizer", str, "text"),
        behavior_logp=_array(known, "behavior_logp", "iuf", "numbers"),
        sampling=_typed(known, "sampling", dict, "an object"),
        context_tokens=_array(known, "context_tokens", "iu", "whole numbers"),
        token_reward=_array(known, "token_reward", "iuf", "numbers"),
        version=version,
        role=known.get("role", role),
        source=_typed(known, "source", str, "text") if "source" in known else source,
        meta=meta,
    )


def write_samples(path: str | Path, samples: Iterable[Sample]) -> int:
    """Write samples to a file of the format that its name ends with; whole or not at all. Returns how many."""
    path = Path(path)
    if not path.name.endswith(ENDINGS):
        raise Refused(f"{path}: expected a name that ends with {', '.join(ENDINGS)}")
    records = map(to_record, samples)
    with _replacing(path) as file:
        if path.suffix == ".parquet":
            return parquet.write(file, records)
        if path.suffix == ".gz":  # no name and time inside: the same samples make the same file
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                return _write_lines(packed, records)
        return _write_lines(file, records)


def read_samples(path: str | Path) -> Iterator[Sample]:
    """The samples of an exported file. Raises `Refused` with FILE:LINE at the first line that isn't one."""
    for row in read_rows(path):
        try:
            if row.error:
                raise Refused(row.error)
            yield from_record(row.value)
        except Refused as error:
            raise Refused(f"{row.where}: {error}") from None


@dataclass(frozen=True)
class Row:
    """One record of a file as it stands there, or why it can't be read."""

    where: str  # FILE:LINE; of Parquet, FILE:ROW; from 1
    number: int
    value: dict[str, Any]
    error: str | None = None


def read_rows(path: str | Path) -> Iterator[Row]:
    """The records of a JSON Lines (gzipped or not) or Parquet file, told apart by content. Blank lines are none."""
    path = Path(path)
    with _content(path) as (file, kind):
        if kind == "parquet":
            for number, value in enumerate(parquet.read(path), 1):
                yield Row(f"{path}:{number}", number, value)
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                value, error = _parse(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                yield Row(f"{path}:{number}", number, value, error)


def fingerprint(path: str | Path) -> str:
    """SHA-256 of the content, the same whether gzipped or not. Raises `Refused` for a file that can't be read whole."""
    digest = hashlib.sha256()
    with _content(Path(path)) as (file, _):
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _parse(line: bytes) -> tuple[dict[str, Any], str | None]:
    try:
        value = loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return {}, f"expected one JSON object a line: {error}"
    if not isinstance(value, dict):
        return {}, f"expected one JSON object a line, got {value!r:.80}"
    return value, None


def _write_lines(file: Any, records: Iterable[dict[str, Any]]) -> int:
    count = 0
    for count, record in enumerate(records, 1):
        where = f"sample {count} of the export (prompt {record['prompt_id']})"
        try:
            line = dumps(record, where).encode()
        except UnicodeEncodeError:  # lone surrogates: only escaped can they stand in a file
            line = dumps(record, where, ascii=True).encode()
        file.write(line + b"\n")
    return count


@contextmanager
def _content(path: Path) -> Iterator[tuple[BinaryIO, str]]:
    try:
        with path.open("rb") as raw:
            head = raw.read(4)
            raw.seek(0)
            if head[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=raw) as file:
                    yield file, "lines"  # type: ignore[misc]  # typeshed: a GzipFile is no BinaryIO
            else:
                yield raw, "parquet" if head == b"PAR1" else "lines"
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Refused(f"{path}: the gzip file is cut off or damaged: {error}") from None
    except OSError as error:
        raise Refused(f"{path}: can't be read: {error.strerror or error}") from None


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is complete and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise Refused(f"{path}: can't be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _list(array: NDArray[Any] | None) -> list[Any] | None:
    if array is None or array.dtype != np.float32:
        return None if array is None else array.tolist()
    return [None if x != x else x for x in array.tolist()]


def _keep(meta: dict[str, Any], name: str, value: Any) -> None:
    if name in meta and meta[name] != value:
        raise Refused(
            f"{name}: the record holds {value!r:.80}, and its meta {meta[name]!r:.80}; keep one of them"
        )
    meta[name] = value


def _typed(known: dict[str, Any], name: str, kind: type, words: str) -> Any:
    value = known.get(name)
    if value is not None and not isinstance(value, kind):
        raise Refused(f"{name}: expected {words}, got {value!r:.80}")
    return value


def _name(known: dict[str, Any], name: str) -> str | None:
    value = known.get(name)
    return (
        str(value)
        if isinstance(value, int) and not isinstance(value, bool)
        else _typed(known, name, str, "text")
    )


def number(known: dict[str, Any], name: str) -> float | None:
    """A number of a record, true and false included, and None where it is unknown."""
    value = known.get(name)
    if isinstance(value, str | list | dict):
        raise Refused(
            f"{name}: expected a number, true or false, or null where it is unknown, got {value!r:.80}"
        )
    try:
        return None if value is None else float(value)
    except OverflowError:
        raise Refused(f"{name}: expected a finite number, got one of {len(str(value))} digits") from None


def _array(known: dict[str, Any], name: str, kinds: str, words: str) -> NDArray[Any] | None:
    value = known.get(name)
    if value is None:
        return None
    if not isinstance(value, list):
        raise Refused(f"{name}: expected a list of {words}, got {value!r:.80}")
    if "f" in kinds:
        value = [np.nan if x is None else x for x in value]
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        array = np.array(None)
    if array.size and (array.dtype.kind not in kinds or array.ndim != 1):
        raise Refused(f"{name}: expected a list of {words}, got {value!r:.80}")
    return array
