"""JSON Lines files, gzipped or not: one object a line, with its place for messages."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agro.errors import Refused
from agro.strictjson import loads


@dataclass(frozen=True)
class Line:
    """One record of a file, or why it can't be read."""

    where: str  # FILE:LINE; of Parquet, FILE:ROW; from 1
    number: int
    value: dict[str, Any]
    error: str | None = None


@contextmanager
def content(path: Path) -> Iterator[tuple[BinaryIO, bool]]:
    """The content of a file, unpacked where it is gzipped, and whether it is Parquet.

    Raises `Refused` where it can't be read, also while it is read.
    """
    try:
        with path.open("rb") as raw:
            head = raw.read(4)
            raw.seek(0)
            if head[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=raw) as file:
                    yield file, False  # type: ignore[misc]  # typeshed: a GzipFile is no BinaryIO
            else:
                yield raw, head == b"PAR1"
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Refused(f"{path}: the gzip file is cut off or damaged: {error}") from None
    except OSError as error:
        raise Refused(f"{path}: can't be read: {error.strerror or error}") from None


def lines(path: Path, file: Iterable[bytes]) -> Iterator[Line]:
    """The records of JSON Lines; blank lines are skipped."""
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            value, error = _parse(line)
            yield Line(f"{path}:{number}", number, value, error)


def _parse(line: bytes) -> tuple[dict[str, Any], str | None]:
    try:
        value = loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return {}, f"expected one JSON object a line: {error}"
    if not isinstance(value, dict):
        return {}, f"expected one JSON object a line, got {value!r:.80}"
    return value, None
