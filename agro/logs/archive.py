"""Zip files of logs. Members may be packed with Zstandard, which Python reads from 3.14 on."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path
from types import TracebackType

import zstandard

from agro.errors import Refused

_ZSTANDARD = 93  # zip's number of this compression


_LOCAL = 30  # bytes of a member's own header before its name and extra field


class Archive:
    """A zip file, open for reading. Raises `Refused` where it is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise Refused(f"{path}: expected a zip file, as a finished log is: {error}") from None
        except OSError as error:
            raise Refused(f"{path}: can't be read: {error.strerror or error}") from None
        self.names = frozenset(self._zip.namelist())

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()

    def read(self, name: str) -> bytes:
        """The content of a member."""
        info = self._zip.getinfo(name)
        try:
            if info.compress_type != _ZSTANDARD:
                return self._zip.read(name)
            data = self._unpacked(info)
        except (
            zipfile.BadZipFile,
            zlib.error,
            zstandard.ZstdError,
            NotImplementedError,
            struct.error,
        ) as error:
            raise Refused(f"{self._path}: {name}: can't be unpacked: {error}") from None
        if zlib.crc32(data) != info.CRC:
            raise Refused(f"{self._path}: {name}: damaged: the checksum is another one")
        return data

    def _unpacked(self, info: zipfile.ZipInfo) -> bytes:
        with self._path.open("rb") as file:
            file.seek(info.header_offset)
            name, extra = struct.unpack("<HH", file.read(_LOCAL)[26:30])
            file.seek(info.header_offset + _LOCAL + name + extra)
            packed = file.read(info.compress_size)
        frames = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed), read_across_frames=True)
        return frames.read()
