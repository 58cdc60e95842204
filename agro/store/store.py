"""The store: all samples, in one SQLite file that processes share, or in PostgreSQL."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, Unpack

from agro.errors import AgroWarning
from agro.store.copying import write_samples
from agro.store.database import BUSY_TIMEOUT
from agro.store.draw_rules import At, DrawRule, Selection
from agro.store.drawing import DrawnGroups, Draws, wait_for_groups
from agro.store.ledger import Imports, Ledger
from agro.store.location import Location, opened
from agro.store.sample_rows import Origin
from agro.store.samples import Experience, Filter, Pair
from agro.store.shared import Leases, Requests
from agro.store.split import Split
from agro.store.survey import Counts, Group, Survey
from agro.types import Sample


class Store:
    """Samples in the order in which they were added. Open one connection per process and thread.

    A method writes in one transaction, which is on the disk when it returns; `transaction()` joins several. A
    row of a sample is never deleted: what a resumed run generates again is marked `redone`, and returned on
    request only; what is replaced or forgotten is emptied, and never returned. Nor is a damaged sample:
    reading it is refused, or it is left out where `skip_damaged` asks for that.

    What most programs need are methods of the store itself. The rest are those of its parts:

    - `experience`: samples, and judgments of them
    - `survey`: what there is, without the samples themselves
    - `split`: which prompts are held out, and which are trained on
    - `draws`: what runs drew, and what they may draw
    - `requests`: prompts that collectors sample
    - `ledger`: what runs committed, and going back to a commit
    - `imports`: files that were imported, and taking them back
    - `tables`: whether all of it is as it was written
    - `leases`: which processes are alive
    """

    def __init__(self, location: Location, *, read_only: bool, create: bool, timeout: float | None) -> None:
        """Use `open`."""
        seconds = BUSY_TIMEOUT if timeout is None else timeout
        self.tables = self._database = database = opened(
            location, read_only=read_only, create=create, timeout=seconds
        )
        self.path: Location = database.path
        self.close = database.close
        experience, survey = Experience(database), Survey(database)
        split = Split(survey, database)
        draws = Draws(database, experience, split)
        ledger = Ledger(database)
        self.experience = database.repeating(experience)
        self.survey = database.repeating(survey)
        self.split = database.repeating(split)
        self.draws = database.repeating(draws)
        self.requests = database.repeating(Requests(database, experience))
        self.ledger = database.repeating(ledger)
        self.imports = database.repeating(Imports(database, ledger))
        self.leases = database.repeating(Leases(database))

    @classmethod
    def open(
        cls, location: Location, *, read_only: bool = False, create: bool = True, timeout: float | None = None
    ) -> Self:
        """Open a store, or create one.

        Raises `Refused` for what isn't a store, has another schema, can't be written to, or is missing.

        Args:
            location: a file; or postgresql://USER@HOST/DATABASE, of which ?schema=NAME is the store, "agro"
                where none is named. A password is PGPASSWORD's or that of ~/.pgpass.
            timeout: seconds to wait for another writer, 30 where it isn't given.
        """
        return cls(location, read_only=read_only, create=create, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[None]:
        """What is written inside is stored completely, and durably, or not at all. Inner ones join the
        outer."""
        return self._database.transaction()

    def append(
        self,
        samples: Iterable[Sample],
        *,
        run: str | None = None,
        step: int | None = None,
        origins: Sequence[Origin] | None = None,
    ) -> list[int]:
        """See `Experience.append`."""
        return self.experience.append(samples, run=run, step=step, origins=origins)

    def samples(
        self, *, ids: Iterable[int] | None = None, skip_damaged: bool = False, **chosen: Unpack[Filter]
    ) -> Iterator[Sample]:
        """See `Experience.samples`."""
        return self.experience.samples(ids=ids, skip_damaged=skip_damaged, **chosen)

    def set_rewards(
        self, scores: Iterable[tuple[int, float | None, Mapping[str, Any]]], *, once: bool = False
    ) -> None:
        """See `Experience.set_rewards`."""
        self.experience.set_rewards(scores, once=once)

    def add_pairs(self, pairs: Iterable[Pair]) -> None:
        """See `Experience.add_pairs`."""
        self.experience.add_pairs(pairs)

    def pairs(self, ids: Iterable[int] | None = None) -> Iterator[Pair]:
        """See `Experience.pairs`."""
        return self.experience.pairs(ids)

    def groups(self, **chosen: Unpack[Filter]) -> list[Group]:
        """See `Survey.groups`."""
        return self.survey.groups(**chosen)

    def counts(self) -> Counts:
        """See `Survey.counts`."""
        return self.survey.counts()

    def draw(
        self,
        rule: DrawRule | None,
        at: At,
        *,
        picked: Sequence[str] | None = None,
        made: Sequence[int] = (),
        joining: DrawRule | None = None,
    ) -> DrawnGroups:
        """Draw and record what a run trains on at a step: groups by `rule`, and the samples `made` for it.

        Groups come one after the other, then the samples made, by number of the response. A sample of another
        run has version -1: its staleness is unknown. Damaged samples are in `DrawnGroups.damaged` only.

        A step has one draw: repeated, it returns the recorded one. Raises `Refused` as `Draws.pick` does, and
        for another draw at a step that has one.

        Args:
            picked: the groups, where `Draws.pick` chose them before.
            made: ids of the samples generated for this step.
            joining: what is drawn of each of their prompts beside them.
        """
        picks = []
        if rule is not None:
            if picked is None:
                picked = wait_for_groups(self.draws, rule, at, again=True)
            picks.append(Selection(rule, picked))
        return self.draws.draw_picked(picks, at, made, joining)

    def export(self, path: str | Path) -> int:
        """Write the samples, without judgments, to a .jsonl, .jsonl.gz or .parquet file; returns how many."""
        counts = self.counts()
        pairs = counts.pairs + counts.ties
        if pairs:
            text = f"{path}: the store's {pairs} pairs aren't part of an export"
            warnings.warn(text, AgroWarning, stacklevel=2)
        return write_samples(path, self.samples())
