"""Blocks of a file: consecutive records, as one process reads them and another one may convert them.

JSON Lines stay bytes, and rows of Parquet stay Arrow's, until `lines` makes records of them. All else is read
as records already.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from agro.io import parquet
from agro.io.jsonlines import Line, lines

CHUNK = 5000  # records of a block, which are taken in one transaction; fewer where they are large:
CHUNK_BYTES = 1 << 24
Item = TypeVar("Item")


@dataclass(frozen=True)
class JsonBlock:
    """Lines of a file of JSON Lines."""

    path: str
    numbers: tuple[int, int]
    data: bytes

    def lines(self) -> Iterator[Line]:
        return lines(self.path, io.BytesIO(self.data), self.numbers[0])


@dataclass(frozen=True)
class RecordBlock:
    """Records that are read already."""

    records: list[Line]

    @property
    def numbers(self) -> tuple[int, int]:
        return self.records[0].number, self.records[-1].number

    def lines(self) -> Iterator[Line]:
        return iter(self.records)


@dataclass(frozen=True)
class ArrowBlock:
    """Rows of a Parquet file. `is_ours`: whether agro wrote it."""

    path: str
    numbers: tuple[int, int]
    batch: Any  # pyarrow.RecordBatch
    is_ours: bool

    def lines(self) -> Iterator[Line]:
        records = parquet.records(self.path, self.batch, self.is_ours)
        for number, (value, error) in enumerate(records, self.numbers[0]):
            yield Line(f"{self.path}:{number}", number, value, error)

    def __reduce__(self) -> tuple[Any, ...]:
        """As a stream of Arrow: pickle would write all of a batch of which this is a slice."""
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.batch.schema) as stream:
            stream.write_batch(self.batch)
        return _arrow_block, (self.path, self.numbers, sink.getvalue().to_pybytes(), self.is_ours)


Block = JsonBlock | RecordBlock | ArrowBlock  # with the `numbers` of its first and of its last record


def _arrow_block(path: str, numbers: tuple[int, int], data: bytes, is_ours: bool) -> ArrowBlock:
    import pyarrow as pa

    with pa.ipc.open_stream(data) as stream:
        return ArrowBlock(path, numbers, stream.read_next_batch(), is_ours)


def json_blocks(path: str, lines: Iterable[bytes]) -> Iterator[JsonBlock]:
    """The lines of a file in blocks of `CHUNK`, or of `CHUNK_BYTES`, so that memory doesn't grow with it."""
    first = 1
    for block in _chunks(lines, len):
        last = first + len(block) - 1
        yield JsonBlock(path, (first, last), b"".join(block))
        first = last + 1


def record_blocks(records: Iterable[Line]) -> Iterator[RecordBlock]:
    return map(RecordBlock, _chunks(records, lambda line: line.size))


def arrow_blocks(path: str, batches: Iterable[tuple[Any, bool]]) -> Iterator[ArrowBlock]:
    first = 1
    for batch, is_ours in batches:
        last = first + len(batch) - 1
        yield ArrowBlock(path, (first, last), batch, is_ours)
        first = last + 1


def _chunks(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += size_of(item)
        if len(chunk) == CHUNK or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
