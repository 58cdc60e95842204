"""JSON Lines files, compressed or not: one object a line, with its place for messages."""

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

BUFFER = 1 << 18  # bytes that are read of a file at once


class Line(NamedTuple):
    """One record of a file, or why it can't be read."""

    where: str  # FILE:LINE; FILE:ROW of Parquet, and of a list; from 1
    number: int
    value: dict[str, Any]
    error: str | None = None
    is_text: bool = False  # whether numbers and objects are written as text, as in CSV
    size: int = 0  # bytes in the file, where it is one line
    is_json: bool = False  # whether the value was read of JSON


@contextmanager
def content(path: Path) -> Iterator[tuple[BinaryIO, bool]]:
    """The content of a file, unpacked where it is compressed by gzip or zstd, and whether it is Parquet.

    Raises `Refused` where it can't be read, also while it is read.
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
                import pyarrow as pa  # also of several frames; it says where the last one isn't complete

                yield io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), BUFFER), False
    except (OSError, EOFError, zlib.error) as error:
        if is_packed and getattr(error, "errno", None) is None:
            raise Refused(f"{path}: the compressed file is cut off or damaged: {error}") from None
        raise Refused(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None


def lines(path: str | Path, file: Iterable[bytes], first: int = 1) -> Iterator[Line]:
    """The records of JSON Lines; blank lines are skipped. `first`: the number of the first line."""
    name = str(path)
    for number, line in enumerate(file, first):
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


# What one record may raise, also where a value isn't checked by name; it doesn't end an import. Not among
# them is what concerns all records: no memory, no file, a package that is missing.
RECORD_ERRORS = (
    *(Refused, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, StopIteration),
    *(TypeError, ValueError),
)


def reason_of(error: Exception) -> str:
    """Why a record is refused that raised one of `RECORD_ERRORS`."""
    if isinstance(error, Refused):
        return str(error)
    name = type(error).__name__
    return f"expected a record of its format, got one of another shape: {name}: {error!s:.200}"
