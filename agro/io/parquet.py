"""Parquet files: ours, which `agro.store.export` writes, and those of other programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.strictjson import loads

JSON = ("meta", "sampling", "messages", "exact")  # columns of JSON, in files that agro wrote
MARK = {b"agro": b"interchange"}  # in the metadata of their schema
ROWS = 1024  # a row group


def batches(path: Path) -> Iterator[tuple[Any, bool]]:
    """The rows of a Parquet file as batches of Arrow, and whether it is ours; see `records`.

    Raises `Refused` for a file that can't be read.
    """
    from pyarrow import parquet

    with _readable(path), parquet.ParquetFile(path, page_checksum_verification=True) as file:
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise Refused(f"{path}: expected different columns, got {', '.join(names)}")
        metadata = file.schema_arrow.metadata or {}
        is_ours = metadata.items() >= MARK.items()
        for batch in file.iter_batches(ROWS):
            yield batch, is_ours


def records(path: str | Path, batch: Any, is_ours: bool) -> Iterator[tuple[dict[str, Any], str | None]]:
    """The rows of a batch as records, or why one can't be read. Raises `Refused` as `batches` does."""
    with _readable(path):
        for row, error in rows(batch):
            yield _read_row(row, is_ours), error


@contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise Refused(f"{path}: can't be read as Parquet: {error}") from None


def rows(batch: Any) -> Iterator[tuple[dict[str, Any], str | None]]:
    """The rows of a batch, or why Python can't hold one, such as a date after the year 9999."""
    try:
        values = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            yield {}, f"can't be read: {error}"
            return
        middle = len(batch) // 2
        yield from rows(batch.slice(0, middle))
        yield from rows(batch.slice(middle))
    else:
        yield from ((row, None) for row in values)


def _read_row(row: dict[str, Any], is_ours: bool) -> dict[str, Any]:
    if is_ours:
        record = {name: value for name, value in row.items() if value is not None}
    else:
        record = {name: _known(value) for name, value in row.items()}
    for name in JSON:
        if isinstance(record.get(name), str):
            try:
                record[name] = loads(record[name])
            except ValueError:
                continue  # text of another program; the record's own checks name what is wrong with it
    if is_ours and isinstance(record.get("exact"), dict):
        record |= record.pop("exact")
    if "response" not in record:
        return record
    if "messages" in record and record.get("prompt") is None:
        record["prompt"] = record.pop("messages")
    if "versions" in record and record.get("version") is None:
        record["version"] = record.pop("versions")
    return record


def _known(value: Any) -> Any:
    """The value without the nulls of its objects: in Parquet all objects of a column have the same keys."""
    if isinstance(value, list):
        return [_known(item) for item in value] if value and isinstance(value[0], dict | list) else value
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items() if item is not None}
    return value
