"""The page of a run while it trains, on this machine alone."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agro.errors import Refused
from agro.pages.local_server import HOST, LocalServer, is_for_us, page_response, refusal
from agro.pages.run.page import page
from agro.pages.run.render import render, script, with_script
from agro.place.status import TITLES, RunStatus
from agro.runs.folder import STAGE
from agro.runs.rundata import load_run

REST = 10.0  # a new page waits this many times as long as the last one took, so that training isn't slowed


@dataclass
class LivePage:
    """The page of a run folder, made anew where its metrics, or what its processes do, have changed."""

    folder: Path
    text: str = ""
    tag: str = ""
    _seen: tuple[Any, ...] | None = None
    _ready: float = 0.0  # when a new page may be made
    _lock: Lock = field(default_factory=Lock)

    def current(self) -> tuple[str, str]:
        """The page and its tag, which changes with it."""
        with self._lock:
            began = time.monotonic()
            # The size and the time of the metrics, what each process does, and what a run in one does.
            status = self._status()
            state: tuple[Any, ...] = () if status is None else status.doing()
            try:
                metrics = (self.folder / "metrics.jsonl").stat()
                state = (metrics.st_size, metrics.st_mtime_ns, state)
            except OSError:
                state = (self._stage(), state)
            if not self.tag or (state != self._seen and began >= self._ready):
                self.text, self._seen = self._make(status), state
                self.tag = f'"{hashlib.sha256(self.text.encode()).hexdigest()[:16]}"'
                self._ready = time.monotonic() + REST * (time.monotonic() - began)
            return self.text, self.tag

    def _stage(self) -> str:
        """What a run in one process does now; empty where that is unknown."""
        try:
            return (self.folder / STAGE).read_text(encoding="utf-8")
        except OSError:
            return ""

    def _status(self) -> RunStatus | None:
        """None for a run of one process, and where the server of its store is away."""
        try:
            status = RunStatus.read(str(self.folder))
        except Refused:
            return None
        return status if status.processes else None

    def _make(self, status: RunStatus | None) -> str:
        try:
            text = page(load_run(self.folder))
        except Refused as error:  # before the first step
            stage = self._stage()
            reason = f"The run has no step yet. Now: {stage}." if stage else str(error)
            text = render("waiting.html", name=self.folder.resolve().name, reason=reason)
        if status is not None:
            shown = {"titles": list(TITLES), "rows": status.rows(), "sentence": status.sentence()}
            text = text.replace("<main>", f"<main>\n{render('processes.html', **shown)}", 1)
        return with_script(text.replace("style-src ", "connect-src 'self'; style-src ", 1), script("live.js"))


def live_app(live: LivePage) -> Starlette:
    """GET / answers this machine with the page, or with 304 where it hasn't changed."""

    def show(request: Request) -> Response:
        if not is_for_us(request, HOST):
            return refusal(403, "only for this machine")
        text, tag = live.current()
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304)
        return page_response(text, {"ETag": tag})

    return Starlette(routes=[Route("/", show)])


def watch(folder: Path, port: int) -> None:
    """Serve the page of a run until the program is interrupted. Raises `Refused` for what isn't a folder."""
    if not folder.is_dir():
        raise Refused(
            f"{folder}: expected a run folder; give the --out of agro train, which makes it when its model "
            "is loaded"
        )
    with LocalServer(live_app(LivePage(folder)), port) as server:
        server.serve_until_interrupted(f"{server.address} shows {folder} while it trains; Ctrl-C ends this")
