"""The folder that the processes of a run share: on this host, or at the owner of the run's store.

It has small files, each replaced as a whole, and folders of files that are complete or missing. To an owner
folders travel in pieces, each with its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from agro.errors import Refused
from agro.io.files import digest, remove, replacing, writing
from agro.store.serving.http import OwnerHttp

PIECE_BYTES = 8 << 20
LOOK_SECONDS = 0.1  # between two looks at a file that is waited for
MANIFEST = ".manifest.json"  # of a folder that travelled, its files
_PART = re.compile(r"[A-Za-z0-9][\w.-]*")


def checked_name(name: str) -> str:
    """A relative path of plain names. Raises `Refused` for others, which could lead out of a folder."""
    if not all(_PART.fullmatch(part) for part in name.split("/")):
        raise Refused(f"expected a path of plain names, got {name!r:.80}")
    return name


def checked_manifest(content: bytes, name: str) -> dict[str, dict[str, Any]]:
    """By each file of the folder `name` its `bytes` and its `sha256`. Raises `Refused` for anything else."""
    try:
        files = json.loads(content)
        kinds = {(type(file["bytes"]), type(file["sha256"]), len(file)) for file in files.values()}
    except (ValueError, TypeError, KeyError, AttributeError):
        kinds = set()
    if kinds != {(int, str, 2)}:
        raise Refused(f"{name}: expected its files with bytes and sha256, got {content[:80]!r}")
    return {checked_name(file): dict(expected) for file, expected in files.items()}


class SharedFolder(Protocol):
    """Names are relative paths, such as `weights/latest.json`."""

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None where it isn't there."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Put a small file in place, as a whole."""
        ...

    def names(self, folder: str) -> list[str]:
        """The files and the complete folders in `folder`, sorted."""
        ...

    def add(self, name: str, write: Callable[[Path], None]) -> None:
        """Let `write` make the folder `name`, unless it is there. `write` is given the path of one that
        doesn't exist yet."""
        ...

    def open(self, name: str) -> AbstractContextManager[Path]:
        """The folder `name` as files of this host. Raises `Refused` where it isn't there (any more)."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it is there."""
        ...

    def wait(self, name: str, known: bytes | None, seconds: float) -> None:
        """Return as soon as a small file isn't what is known, at the latest after so many seconds."""
        ...


class LocalFolder:
    """A folder of this host's file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        file = self.path / name
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as new:
                new.write(content)

    def names(self, folder: str) -> list[str]:
        path = self.path / folder
        if not path.is_dir():
            return []
        return sorted(f"{folder}/{entry.name}" for entry in path.iterdir() if not entry.name.startswith("."))

    def add(self, name: str, write: Callable[[Path], None]) -> None:
        if not (self.path / name).exists():
            write(self.path / name)

    @contextmanager
    def open(self, name: str) -> Iterator[Path]:
        folder = self.path / name
        if not folder.is_dir():
            raise Refused(f"{folder}: expected a folder; it was removed, or never there")
        yield folder

    def remove(self, name: str) -> None:
        remove(self.path / name)

    def wait(self, name: str, known: bytes | None, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.read(name) == known and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)


class RemoteFolder:
    """The shared folder of a run, at the owner of its store."""

    def __init__(self, http: OwnerHttp, run: str) -> None:
        """`run`: its id."""
        self._http, self._run = http, run

    def __str__(self) -> str:
        return self._http.url

    def read(self, name: str) -> bytes | None:
        return self._http.get(f"/shared/{self._run}/files/{name}")

    def write(self, name: str, content: bytes) -> None:
        self._http.send("PUT", f"/shared/{self._run}/files/{name}", content)

    def names(self, folder: str) -> list[str]:
        content = self._http.get(f"/shared/{self._run}/names/{folder}")
        return [str(name) for name in json.loads(content or b"[]")]

    def add(self, name: str, write: Callable[[Path], None]) -> None:
        if self._manifest(name) is not None:
            return
        with tempfile.TemporaryDirectory(prefix="agro-") as temporary:
            folder = Path(temporary) / "folder"
            write(folder)
            manifest = {}
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                relative = file.relative_to(folder).as_posix()
                self._upload(name, relative, file)
                manifest[relative] = {"bytes": file.stat().st_size, "sha256": digest(file)}
            self._http.send("POST", f"/shared/{self._run}/manifests/{name}", json.dumps(manifest).encode())

    @contextmanager
    def open(self, name: str) -> Iterator[Path]:
        manifest = self._manifest(name)
        if manifest is None:
            raise self._removed(name)
        with tempfile.TemporaryDirectory(prefix="agro-") as temporary:
            for file, expected in manifest.items():
                path = Path(temporary) / file
                path.parent.mkdir(parents=True, exist_ok=True)
                self._download(f"{name}/{file}", path, expected)
            yield Path(temporary)

    def remove(self, name: str) -> None:
        self._http.send("DELETE", f"/shared/{self._run}/files/{name}")

    def wait(self, name: str, known: bytes | None, seconds: float) -> None:
        unless = hashlib.sha256(known or b"").hexdigest()
        self._http.get(f"/shared/{self._run}/files/{name}", unless=unless, seconds=str(math.ceil(seconds)))

    def _manifest(self, name: str) -> dict[str, Any] | None:
        content = self._http.get(f"/shared/{self._run}/manifests/{name}")
        return None if content is None else checked_manifest(content, name)

    def _upload(self, name: str, relative: str, file: Path) -> None:
        path, offset = f"/shared/{self._run}/pieces/{name}", 0
        with file.open("rb") as source:
            while (piece := source.read(PIECE_BYTES)) or offset == 0:
                params = {"file": relative, "offset": str(offset)}
                headers = {"x-sha256": hashlib.sha256(piece).hexdigest()}
                self._http.send("PUT", path, piece, params=params, headers=headers)
                if not piece:
                    break
                offset += len(piece)

    def _download(self, name: str, file: Path, expected: dict[str, Any]) -> None:
        """Raises `Refused` where it was removed meanwhile, or isn't what its manifest says."""
        total = hashlib.sha256()
        offset = 0
        with file.open("wb") as target:
            while offset < expected["bytes"]:
                path = f"/shared/{self._run}/files/{name}"
                piece = self._http.get(path, offset=str(offset), bytes=str(PIECE_BYTES))
                if not piece:
                    raise self._removed(name)
                target.write(piece)
                total.update(piece)
                offset += len(piece)
        if offset != expected["bytes"] or total.hexdigest() != expected["sha256"]:
            raise Refused(f"{self}: {name}: arrived damaged, with another SHA-256 than it was published with")

    def _removed(self, name: str) -> Refused:
        return Refused(f"{self}: {name} isn't there; it was removed, or never complete")


def beside(store: Path) -> Path:
    """Where the owner of a store keeps the shared folders of its runs."""
    return store.with_name(f"{store.name}.shared")
