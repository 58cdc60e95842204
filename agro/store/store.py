"""The store: all samples, in one SQLite file that processes share, or in PostgreSQL."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from agro.errors import AgroWarning
from agro.store.copying import write_samples
from agro.store.database import BUSY_TIMEOUT, Database
from agro.store.draw_rules import At, DrawRule, Selection
from agro.store.drawing import DrawnGroups, Draws, wait_for_groups
from agro.store.ledger import Imports, Ledger
from agro.store.location import Location, opened
from agro.store.samples import Experience
from agro.store.shared import Leases, Requests
from agro.store.split import Split
from agro.store.survey import Survey


class Store(Experience, Survey):
    """Samples in the order in which they were added. Open one connection per process and thread.

    A method writes in one transaction, which is on the disk when it returns; `transaction()` joins several. A
    row of a sample is never deleted: what a resumed run generates again is marked `redone`, and returned on
    request only; what is replaced or forgotten is emptied, and never returned. Nor is a damaged sample:
    reading it is refused, or it is left out where `skip_damaged` asks for that.

    It has samples and judgments of them (`Experience`), and what there is without the samples themselves
    (`Survey`). The rest are methods of its parts:

    - `split`: which prompts are held out, and which are trained on
    - `draws`: what runs drew, and what they may draw
    - `requests`: prompts that collectors sample
    - `ledger`: what runs committed, and going back to a commit
    - `imports`: files that were imported, and taking them back
    - `tables`: whether all of it is as it was written
    - `leases`: which processes are alive
    """

    def __init__(self, database: Database) -> None:
        """Use `open`."""
        super().__init__(database)
        self.tables = database
        self.path: Location = database.path
        self.close = database.close
        self.split = Split(database)
        self.draws = Draws(database, self.split)
        self.requests = Requests(database)
        self.ledger = Ledger(database)
        self.imports = Imports(database)
        self.leases = Leases(database)

    @classmethod
    def open(
        cls,
        location: Location,
        *,
        read_only: bool = False,
        create: bool = True,
        timeout: float = BUSY_TIMEOUT,
    ) -> Self:
        """Open a store, or create one.

        Raises `Refused` for what isn't a store, has another schema, can't be written to, or is missing.

        Args:
            location: a file; or postgresql://USER@HOST/DATABASE, of which ?schema=NAME is the store, "agro"
                where none is named. A password is PGPASSWORD's or that of ~/.pgpass.
            timeout: seconds to wait for another writer.
        """
        return cls(opened(location, read_only=read_only, create=create, timeout=timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[None]:
        """What is written inside is stored completely, and durably, or not at all. Inner ones join the
        outer."""
        return self.tables.transaction()

    @property
    def experience(self) -> Experience:
        """The samples, and judgments of them."""
        return self

    @property
    def survey(self) -> Survey:
        """What there is, without the samples themselves."""
        return self

    def draw(
        self,
        rule: DrawRule | None,
        at: At,
        *,
        made: Sequence[int] = (),
        joining: DrawRule | None = None,
    ) -> DrawnGroups:
        """Draw and record what a run trains on at a step: groups by `rule`, and the samples `made` for it.

        Groups come one after the other, then the samples made, by number of the response. A sample of another
        run has version -1: its staleness is unknown. Damaged samples are in `DrawnGroups.damaged` only.

        A step has one draw: repeated, it returns the recorded one. Raises `Refused` as `Draws.pick` does, and
        for another draw at a step that has one.

        Args:
            made: ids of the samples generated for this step.
            joining: what is drawn of each of their prompts beside them.
        """
        picks = []
        if rule is not None:
            picks.append(Selection(rule, wait_for_groups(self.draws, rule, at, again=True)))
        return self.draws.draw_picked(picks, at, made, joining)

    def export(self, path: str | Path) -> int:
        """Write the samples, without judgments, to a .jsonl, .jsonl.gz or .parquet file; returns how many."""
        counts = self.counts()
        pairs = counts.pairs + counts.ties
        if pairs:
            text = f"{path}: the store's {pairs} pairs aren't part of an export"
            warnings.warn(text, AgroWarning, stacklevel=2)
        return write_samples(path, self.samples())
