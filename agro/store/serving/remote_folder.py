"""A shared folder that is at the owner of a store. Folders travel in pieces, each with its SHA-256."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.files import digest
from agro.store.serving.http import OwnerHttp
from agro.store.shared import checked_manifest

PIECE_BYTES = 8 << 20


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
        with file.open("rb") as source:
            offset = 0
            while (piece := source.read(PIECE_BYTES)) or offset == 0:
                self._http.send(
                    "PUT",
                    f"/shared/{self._run}/pieces/{name}",
                    piece,
                    params={"file": relative, "offset": str(offset)},
                    headers={"x-sha256": hashlib.sha256(piece).hexdigest()},
                )
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
            raise Refused(
                f"{self}: {name}: arrived damaged; its SHA-256 isn't what it was when it was published"
            )

    def _removed(self, name: str) -> Refused:
        return Refused(f"{self}: {name} isn't there; it was removed, or never complete")
