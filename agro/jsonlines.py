"""JSON Lines files, compressed or not: one object a line, with its place for messages."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import zstandard

from agro.errors import Refused
from agro.strictjson import loads


class Line(NamedTuple):
    """One record of a file, or why it can't be read."""

    where: str  # FILE:LINE; FILE:ROW of Parquet, and of a list; from 1
    number: int
    value: dict[str, Any]
    error: str | None = None
    is_text: bool = False  # whether numbers and objects are written as text, as in CSV
    size: int = 0  # bytes in the file, where it is one line


@contextmanager
def content(path: Path) -> Iterator[tuple[BinaryIO, bool]]:
    """The content of a file, unpacked where it is compressed by gzip or zstd, and whether it is Parquet.

    Raises `Refused` where it can't be read, also while it is read.
    """
    try:
        with path.open("rb") as raw:
            head = raw.read(4)
            raw.seek(0)
            if head[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=raw) as file:
                    yield file, False  # type: ignore[misc]  # typeshed: a GzipFile is no BinaryIO
            elif head == b"\x28\xb5\x2f\xfd":
                yield io.BufferedReader(_Parts(_unpacked(raw)), 1 << 16), False
            else:
                yield raw, head == b"PAR1"
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise Refused(f"{path}: the compressed file is cut off or damaged: {error}") from None
    except OSError as error:
        raise Refused(f"{path}: can't be read: {error.strerror or error}") from None


def _unpacked(raw: BinaryIO) -> Iterator[bytes]:
    """The content of zstd frames. (The library's own reader takes a file that is cut off as complete.)"""
    frame = None
    while packed := raw.read(1 << 18):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("its last frame isn't complete")


class _Parts(io.RawIOBase):
    """Parts of a file, as a file."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts, self._left = parts, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._left = memoryview(part)
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def lines(path: Path, file: Iterable[bytes]) -> Iterator[Line]:
    """The records of JSON Lines; blank lines are skipped."""
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            value, error = _parse(line)
            yield Line(f"{path}:{number}", number, value, error, size=len(line))


def _parse(line: bytes) -> tuple[dict[str, Any], str | None]:
    try:
        value = loads(line)
    except (ValueError, RecursionError) as error:
        return {}, f"expected one JSON object a line: {error}"
    if not isinstance(value, dict):
        return {}, f"expected one JSON object a line, got {value!r:.80}"
    return value, None
