"""The live page of a run while it trains, for this machine only."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
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
from agro.pages.run.render import render, template_text, with_script
from agro.place.placement import TITLES, RunStatus
from agro.runs.folder import STAGE
from agro.runs.rundata import load_run

REST = 10.0  # pause between renderings, in multiples of the last one's duration, to spare the training


class LivePage:
    """The page of a run folder, rendered again when its metrics or its processes have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._text = self._tag = ""  # the tag changes with the page
        self._seen: tuple[Any, ...] = ()
        self._ready = 0.0  # earliest time of the next rendering
        self._lock = Lock()

    def show(self, request: Request) -> Response:
        """Send the page to this machine, or 304 if it hasn't changed."""
        if not is_for_us(request, HOST):
            return refusal(403, "only for this machine")
        text, tag = self.current()
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304)
        return page_response(text, {"ETag": tag})

    def current(self) -> tuple[str, str]:
        """Return the current page and its tag."""
        with self._lock:
            self._renew()
            return self._text, self._tag

    def _renew(self) -> None:
        began = time.monotonic()
        status, stage = None, ""  # of several processes, or of one; empty if unknown
        with suppress(Refused):  # the store's server is unreachable
            status = RunStatus.read(str(self.folder))
        with suppress(OSError):
            stage = (self.folder / STAGE).read_text(encoding="utf-8")
        state: tuple[Any, ...] = (stage, None if status is None else status.doing())
        with suppress(OSError):
            metrics = (self.folder / "metrics.jsonl").stat()
            state = (metrics.st_size, metrics.st_mtime_ns, *state[1:])
        if self._tag and (state == self._seen or began < self._ready):
            return
        try:
            text = page(load_run(self.folder))
        except Refused as error:  # before the first step
            reason = f"The run has no step yet. Now: {stage}." if stage else str(error)
            text = render("waiting.html", name=self.folder.resolve().name, reason=reason)
        if status is not None and status.processes:
            shown = {"titles": list(TITLES), "rows": status.rows(), "sentence": status.sentence()}
            text = text.replace("<main>", f"<main>\n{render('processes.html', **shown)}", 1)
        text = text.replace("style-src ", "connect-src 'self'; style-src ", 1)
        self._text, self._seen = with_script(text, template_text("live.js")), state
        self._tag = f'"{hashlib.sha256(self._text.encode()).hexdigest()[:16]}"'
        self._ready = time.monotonic() + REST * (time.monotonic() - began)


def live_app(live: LivePage) -> Starlette:
    return Starlette(routes=[Route("/", live.show)])


def watch(folder: Path, port: int) -> None:
    """Serve a run's page until interrupted. Raises `Refused` for a missing folder."""
    if not folder.is_dir():
        raise Refused(
            f"{folder}: expected a run folder; use the --out of agro train, which creates it when its "
            "model is loaded"
        )
    with LocalServer(live_app(LivePage(folder)), port) as server:
        server.serve_until_interrupted(f"{server.address} shows {folder} while it trains; Ctrl-C ends this")
