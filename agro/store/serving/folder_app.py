"""The owner's side of a shared folder: files beside the store, by run, over HTTP.

    GET     /shared                                   the runs that began here, the last one last
    GET     /shared/RUN/names/NAME                    the files and the complete folders in a folder
    GET     /shared/RUN/files/NAME?offset=0&bytes=N   a piece of a file
    GET     /shared/RUN/files/NAME?unless=S&seconds=N the same, once its SHA-256 isn't S, or after N seconds
    PUT     /shared/RUN/files/NAME                    a small file, as a whole
    PUT     /shared/RUN/pieces/NAME?file=F&offset=0   a piece of a file of a folder that isn't complete yet
    GET     /shared/RUN/manifests/NAME                a complete folder's files, their sizes and SHA-256
    POST    /shared/RUN/manifests/NAME                complete a folder, if all its files are as the body says
    DELETE  /shared/RUN/files/NAME                    remove a file or a folder

All of it may be repeated. A file's name says that it is text, JSON or safetensors: nothing that a loader
would execute is taken.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agro.errors import Refused
from agro.io.files import digest, remove, sync
from agro.store.shared import MANIFEST, LocalFolder, checked_manifest, checked_name

BODY_BYTES = 1 << 28
WAIT_SECONDS = 10  # at most, for a file to change
TAKEN = {".json", ".jsonl", ".safetensors", ".txt", ".jinja", ".model"}
Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class SharedFolders:
    """The shared folders of the runs of a store, each below `folder`."""

    def __init__(self, folder: Path, check: Callable[[Request], None]) -> None:
        """`check`: raises for a request without the token of the owner."""
        self.folder, self._check = folder, check
        self._written = asyncio.Event()  # of the next small file
        run = "/shared/{run}"
        self.routes = [
            Route("/shared", self._checked(self.runs)),
            Route(f"{run}/names/{{name:path}}", self._checked(self.names)),
            Route(f"{run}/files/{{name:path}}", self._checked(self.file), methods=["GET", "PUT", "DELETE"]),
            Route(f"{run}/pieces/{{name:path}}", self._checked(self.piece), methods=["PUT"]),
            Route(f"{run}/manifests/{{name:path}}", self._checked(self.manifest), methods=["GET", "POST"]),
        ]

    def _checked(self, endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            self._check(request)
            return await endpoint(request)

        return answer

    async def runs(self, request: Request) -> Response:
        """By the time at which they began last."""
        files = sorted(self.folder.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
        return JSONResponse([file.parent.name for file in files])

    async def names(self, request: Request) -> Response:
        shared, folder = self._of(request), checked_name(request.path_params["name"])
        return JSONResponse([name for name in shared.names(folder) if _is_complete(shared.path / name)])

    async def file(self, request: Request) -> Response:
        name = checked_name(request.path_params["name"])
        if request.method == "PUT":
            content = await body(request)
            _check_taken(name)
            await run_in_threadpool(self._of(request).write, name, content)
            self._written.set()
            self._written = asyncio.Event()
        elif request.method == "DELETE":
            await run_in_threadpool(self._of(request).remove, name)
        else:
            await self._wait(request, name)
            return await run_in_threadpool(self._read, request, name)
        return Response(status_code=204)

    async def _wait(self, request: Request, name: str) -> None:
        """Until a file isn't what the client knows of it, or the time is over."""
        known = request.query_params.get("unless")
        ends = time.monotonic() + min(_number(request, "seconds"), WAIT_SECONDS)
        while known is not None and time.monotonic() < ends:
            written = self._written
            content = self._of(request).read(name) or b""
            if hashlib.sha256(content).hexdigest() != known:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(written.wait(), ends - time.monotonic())

    async def piece(self, request: Request) -> Response:
        name = checked_name(request.path_params["name"])
        file = checked_name(request.query_params.get("file", ""))
        _check_taken(file)
        content = await body(request)
        if hashlib.sha256(content).hexdigest() != request.headers.get("x-sha256"):
            raise Refused(f"{name}/{file}: a piece arrived with another SHA-256 than it was sent with")
        path = _incomplete(self._of(request).path / name) / file
        await run_in_threadpool(_put, path, _number(request, "offset"), content)
        return Response(status_code=204)

    async def manifest(self, request: Request) -> Response:
        name = checked_name(request.path_params["name"])
        if request.method == "POST":
            files = checked_manifest(await body(request), name)
            await run_in_threadpool(self._complete, request, name, files)
            return Response(status_code=204)
        content = self._of(request).read(f"{name}/{MANIFEST}")
        if content is None:
            return Response(status_code=404)
        return Response(content, media_type="application/json")

    def _of(self, request: Request) -> LocalFolder:
        return LocalFolder(self.folder / checked_name(request.path_params["run"]))

    def _read(self, request: Request, name: str) -> Response:
        offset, length = _number(request, "offset"), _number(request, "bytes", BODY_BYTES)
        try:
            with (self._of(request).path / name).open("rb") as file:
                file.seek(offset)
                content = file.read(min(length, BODY_BYTES))
        except (FileNotFoundError, IsADirectoryError):
            return Response(status_code=404)
        return Response(content, media_type="application/octet-stream")

    def _complete(self, request: Request, name: str, files: Mapping[str, Any]) -> None:
        """Raises `Refused` unless all files are there as the manifest says."""
        folder = self._of(request).path / name
        content = json.dumps(files)
        if (folder / MANIFEST).exists() and (folder / MANIFEST).read_text() == content:
            return  # a request that was sent again
        temporary = _incomplete(folder)
        for file, expected in files.items():
            path = temporary / file
            got = {"bytes": path.stat().st_size, "sha256": digest(path)} if path.exists() else None
            if got != expected:
                raise Refused(f"{name}/{file}: expected {expected}, got {got}")
        (temporary / MANIFEST).write_text(content)
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
        remove(folder)
        temporary.rename(folder)
        sync(folder.parent)


class TooLong(Refused):
    """A request with more bytes than are taken at once."""


async def body(request: Request, most: int = BODY_BYTES) -> bytes:
    """Raises `TooLong` as soon as it has more bytes."""
    parts, length = [], 0
    async for part in request.stream():
        parts.append(part)
        length += len(part)
        if length > most:
            raise TooLong(f"expected at most {most} bytes at once. What to do: add fewer samples at once")
    return b"".join(parts)


def _incomplete(folder: Path) -> Path:
    """Where the files of a folder are until it is complete."""
    return folder.with_name(f".{folder.name}.tmp")


def _is_complete(path: Path) -> bool:
    return path.is_file() or (path / MANIFEST).exists()


def _put(path: Path, offset: int, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(offset)
        file.write(content)
        if offset == 0:
            file.truncate()  # of an earlier upload that was never completed


def _check_taken(name: str) -> None:
    if Path(name).suffix not in TAKEN:
        raise Refused(f"{name}: expected a file that is one of {', '.join(sorted(TAKEN))}")


def _number(request: Request, key: str, default: int = 0) -> int:
    value = request.query_params.get(key, str(default))
    if not (value.isascii() and value.isdigit()):
        raise Refused(f"{key}: expected a number, got {value!r:.40}")
    return int(value)
