"""The page of a run while it trains, on this machine alone, and all samples of its store, with a search."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, Self
from urllib.parse import parse_qs, urlencode

from agro.config import RunConfig
from agro.errors import Refused
from agro.io.terminal import plain
from agro.pages.local_server import LocalHandler, LocalServer
from agro.pages.run.experience import LONGEST
from agro.pages.run.page import page, prompt_text, summarize
from agro.pages.run.render import render, script, with_script
from agro.place.status import TITLES, RunStatus
from agro.runs.folder import STAGE
from agro.runs.rundata import load_run
from agro.store import Store
from agro.store.location import READ_SECONDS, located
from agro.types import Sample

SHOWN = 20  # samples of a page
SCANNED = 20_000  # samples that one request looks at; the next one goes on where it ended
BLOCK = 256  # samples read at once


@dataclass(frozen=True)
class SampleQuery:
    """Which samples: those with `text` in the prompt or the response, in any case, a reward from `low` to
    `high`, both included, and ids below `before`. What is None, or empty, allows any."""

    text: str = ""
    low: float | None = None
    high: float | None = None
    before: int | None = None

    @classmethod
    def parse(cls, query: str) -> Self:
        """From an address. Raises `Refused` for a value that isn't a number."""
        values = {name: found[-1] for name, found in parse_qs(query).items()}
        before = _number(values, "before")
        return cls(
            text=values.get("text", ""),
            low=_number(values, "low"),
            high=_number(values, "high"),
            before=None if before is None else int(before),
        )

    @property
    def address(self) -> str:
        """The query of this page."""
        return urlencode({name: value for name, value in asdict(self).items() if value not in (None, "")})

    def fits(self, sample: Sample) -> bool:
        """Whether a sample is asked for. An unknown reward is in no range."""
        if self.low is not None or self.high is not None:
            reward = math.nan if sample.reward is None else sample.reward
            low = -math.inf if self.low is None else self.low
            high = math.inf if self.high is None else self.high
            if not low <= reward <= high:
                return False
        wanted = self.text.casefold()
        return wanted in plain(sample.prompt).casefold() or wanted in sample.response.casefold()


def _number(values: Mapping[str, str], name: str) -> float | None:
    text = values.get(name, "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise Refused(f"{name} = {text!r:.80}: expected a finite number, or nothing for any")
    return number


def newest_first(
    store: Store,
    before: int | None = None,
    *,
    prompt_id: str | None = None,
    roles: Sequence[str] | None = None,
    sources: Sequence[str] | None = None,
) -> Iterator[Sample]:
    """Samples in falling order of their ids, those below `before`, read block by block."""
    end = store.experience.last_id() if before is None else before - 1
    while end > 0:
        start = max(0, end - BLOCK)
        page = store.experience.samples_page(start, end, prompt_id=prompt_id, roles=roles, sources=sources)
        found = list(page.items)
        while page.cursor is not None:
            page = store.experience.samples_page(
                page.cursor, end, prompt_id=prompt_id, roles=roles, sources=sources
            )
            found += page.items
        yield from reversed(found)
        end = start


def samples_page(folder: Path, query: SampleQuery) -> str:
    """One page of the samples of a run's store. Raises `Refused` where the store can't be read."""
    path = located(RunConfig.load(folder / "config.json").data.store, folder)
    with Store.open(path, read_only=True, timeout=READ_SECONDS) as store:
        found, older = _find(store, query)
        total = store.experience.last_id()
    text = render(
        "samples.html",
        name=folder.resolve().name,
        query=query,
        samples=found,
        older=None if older is None else replace(query, before=older).address,
        total=total,
        longest=LONGEST,
        summarize=summarize,
        prompt_text=prompt_text,
    )
    return text.replace("form-action 'none'", "form-action 'self'", 1)


def _find(store: Store, query: SampleQuery) -> tuple[list[Sample], int | None]:
    """What fits, and the id below which the next page begins; None where there is nothing below it."""
    found: list[Sample] = []
    for number, sample in enumerate(newest_first(store, query.before)):
        if len(found) == SHOWN or number == SCANNED:
            assert sample.id is not None
            return found, sample.id + 1
        if query.fits(sample):
            found.append(sample)
    return found, None


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
            state = self._state()
            began = time.monotonic()
            if not self.tag or (state != self._seen and began >= self._ready):
                self.text, self._seen = self._make(), state
                self.tag = f'"{hashlib.sha256(self.text.encode()).hexdigest()[:16]}"'
                self._ready = time.monotonic() + REST * (time.monotonic() - began)
            return self.text, self.tag

    def _state(self) -> tuple[Any, ...]:
        """The size and the time of the metrics, and what each process does."""
        status = self._status()
        doing = () if status is None else status.doing()
        try:
            metrics = (self.folder / "metrics.jsonl").stat()
        except OSError:
            return 0, 0, doing, self._stage()
        return metrics.st_size, metrics.st_mtime_ns, doing

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

    def _make(self) -> str:
        try:
            text = page(load_run(self.folder))
        except Refused as error:  # before the first step
            stage = self._stage()
            reason = f"The run has no step yet. Now: {stage}." if stage else str(error)
            text = render("waiting.html", name=self.folder.resolve().name, reason=reason)
        status = self._status()
        if status is not None:
            shown = {"titles": list(TITLES), "rows": status.rows(), "sentence": status.sentence()}
            text = text.replace("<main>", f"<main>\n{render('processes.html', **shown)}", 1)
        text = text.replace("<main>", '<main>\n<p><a href="/samples">All samples of the run</a></p>', 1)
        return with_script(text.replace("style-src ", "connect-src 'self'; style-src ", 1), script("live.js"))


class PageServer(LocalServer):
    """Serves a run's page, at /, and its samples, at /samples, to this machine."""

    def __init__(self, folder: Path, port: int) -> None:
        """`port` 0: a free one. Raises `Refused` where the folder or the port can't be used."""
        if not folder.is_dir():
            raise Refused(
                f"{folder}: expected a run folder; give the --out of agro train, which makes it when its "
                "model is loaded"
            )
        self.live = LivePage(folder)
        super().__init__(Handler, port)


class Handler(LocalHandler):
    """GET / answers with the page, or with 304 where it hasn't changed; GET /samples with the store's."""

    server: PageServer

    def do_GET(self) -> None:
        if not self.is_for_us():
            return
        path, _, query = self.path.partition("?")
        if self.path == "/":
            text, tag = self.server.live.current()
            if self.headers.get("If-None-Match") == tag:
                self.send_response(304)
                self.end_headers()
                return
            self.send_page(text, {"ETag": tag})
        elif path == "/samples":
            self._send_samples(query)
        else:
            self.send_error(404)

    def _send_samples(self, query: str) -> None:
        try:
            text = samples_page(self.server.live.folder, SampleQuery.parse(query))
        except Refused as error:
            text = render("waiting.html", name="samples", reason=str(error))
        self.send_page(text)


def watch(folder: Path, port: int) -> None:
    """Serve the page of a run until the program is interrupted."""
    with PageServer(folder, port) as server:
        server.serve_until_interrupted(f"{server.address} shows {folder} while it trains; Ctrl-C ends this")
