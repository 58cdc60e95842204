"""All samples of a run's store, newest first, with a search: a page of the live server."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, urlencode

from agro.config import RunConfig
from agro.errors import Refused
from agro.io.terminal import plain
from agro.pages.run.held_out_samples import LONGEST
from agro.pages.run.page import prompt_text, summarize
from agro.pages.run.render import render
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
