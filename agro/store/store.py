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

    A method writes in one transaction, which is on disk when it returns; `transaction()` joins several. A
    sample's row is never deleted. A sample that a resumed run generates again is marked `redone`, and
    returned only on request. A replaced or forgotten sample is emptied, and never returned. Reading a damaged
    one raises `Refused`, unless `skip_damaged` drops it.

    Its own methods are about samples and judgments of them (`Experience`), and about counts, groups and
    summaries (`Survey`). The others belong to its parts:

    - `split`: which prompts are held out, and which are trained on
    - `draws`: what runs drew, and what they may draw
    - `requests`: prompts that collectors sample responses to
    - `ledger`: commits of runs, and rewinding to one
    - `imports`: imported files, and undoing an import
    - `tables`: the database, and checks for damage
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
            location: a file; or postgresql://USER@HOST/DATABASE?schema=NAME, whose schema (default: "agro")
                is the store. The password comes from PGPASSWORD or ~/.pgpass.
            timeout: seconds to wait for another writer.
        """
        return cls(opened(location, read_only=read_only, create=create, timeout=timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Store what is written inside completely and durably, or not at all. An inner one joins the
        outer."""
        return self.tables.transaction()

    @property
    def experience(self) -> Experience:
        """The methods about samples and judgments."""
        return self

    @property
    def survey(self) -> Survey:
        """The methods about counts, groups and summaries."""
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

        The groups come one after the other, then the samples made, by response number. A sample of another
        run has version -1: its staleness is unknown. Damaged samples are only in `DrawnGroups.damaged`.

        A step has one draw; repeating it returns the recorded one. Raises `Refused` as `Draws.pick` does, and
        for a different draw at a step that has one.

        Args:
            made: ids of the samples generated for this step.
            joining: the rule for stored samples of their prompts to draw in addition.
        """
        picks = []
        if rule is not None:
            picks.append(Selection(rule, wait_for_groups(self.draws, rule, at, redraw=True)))
        return self.draws.draw_picked(picks, at, made, joining)

    def export(self, path: str | Path) -> int:
        """Write the samples, without judgments, to a .jsonl, .jsonl.gz or .parquet file; returns how many."""
        counts = self.counts()
        pairs = counts.pairs + counts.ties
        if pairs:
            text = f"{path}: the store's {pairs} pairs aren't part of an export"
            warnings.warn(text, AgroWarning, stacklevel=2)
        return write_samples(path, self.samples())
