"""JSON Lines files, compressed or not: one object per line, with its location for messages."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from agro.errors import Refused
from agro.io.strictjson import loads

BUFFER = 1 << 18  # bytes to read from a file at once


class Line(NamedTuple):
    """One record of a file, or why it can't be read."""

    where: str  # FILE:LINE, or FILE:ROW for Parquet and lists; from 1
    number: int
    value: dict[str, Any]
    error: str | None = None
    is_text: bool = False  # whether numbers and objects are written as text, as in CSV
    size: int = 0  # bytes in the file, if it is one line
    is_json: bool = False  # whether the value was read from JSON


@contextmanager
def content(path: Path) -> Iterator[tuple[BinaryIO, bool]]:
    """Open the content of a file, decompressed if it is gzip or zstd; also whether it is Parquet.

    Raises `Refused` if it can't be opened, or read in the block.
    """
    is_packed = False
    try:
        with path.open("rb", buffering=BUFFER) as raw:
            head = raw.read(4)
            raw.seek(0)
            is_packed = head[:2] == b"\x1f\x8b" or head == b"\x28\xb5\x2f\xfd"
            if not is_packed:
                yield raw, head == b"PAR1"
            elif head[:2] == b"\x1f\x8b":
                yield io.BufferedReader(gzip.GzipFile(fileobj=raw), BUFFER), False
            else:
                import pyarrow as pa  # reads several frames, and reports an incomplete last one

                yield io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), BUFFER), False
    except (OSError, EOFError, zlib.error) as error:
        if is_packed and getattr(error, "errno", None) is None:
            raise Refused(f"{path}: the compressed file is cut off or damaged: {error}") from None
        raise Refused(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None


def lines(path: str | Path, file: Iterable[bytes], start: int = 1) -> Iterator[Line]:
    """The records of JSON Lines; blank lines are skipped. `start`: the number of the first line."""
    name = str(path)
    for number, line in enumerate(file, start):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line and not line.isspace():
            error: str | None = None
            try:
                value = loads(line)
                if not isinstance(value, dict):
                    error, value = f"expected one JSON object a line, got {value!r:.80}", {}
            except ValueError as wrong:
                error, value = f"expected one JSON object a line: {wrong}", {}
            yield Line(f"{name}:{number}", number, value, error, False, len(line), True)


# What one record may raise, even for unchecked values, without ending an import. Errors that concern all
# records aren't among them: no memory, no file, a missing package.
RECORD_ERRORS = (
    *(Refused, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, StopIteration),
    *(TypeError, ValueError),
)


def reason_of(error: Exception) -> str:
    """The reason to refuse a record that raised one of `RECORD_ERRORS`."""
    if isinstance(error, Refused):
        return str(error)
    name = type(error).__name__
    return f"expected a record of its format, got one of another shape: {name}: {error!s:.200}"
