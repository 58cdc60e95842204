"""The parts of a store: of its file here, or those that ask its owner (`agro.store.serving.remote`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from agro.store.database import BUSY_TIMEOUT, Database
from agro.store.drawing import Draws
from agro.store.imports import Imports
from agro.store.leases import Leases
from agro.store.ledger import Ledger, Requests
from agro.store.location import Location
from agro.store.samples import Experience
from agro.store.shard_record import ShardRecord
from agro.store.split import RunClusters, Split
from agro.store.survey import Survey
from agro.store.tables import Tables


class Parts(NamedTuple):
    """What a `Store` consists of; what each part is for is in its docstring."""

    location: Location
    close: Callable[[], None]
    experience: Experience
    survey: Survey
    split: Split
    clusters: RunClusters
    draws: Draws
    requests: Requests
    ledger: Ledger
    imports: Imports
    tables: Tables
    leases: Leases
    shard: ShardRecord


def parts_of_file(path: Path, *, read_only: bool, create: bool, timeout: float | None) -> Parts:
    """Raises `Refused` as `Store.open` does."""
    seconds = BUSY_TIMEOUT if timeout is None else timeout
    database = Database(path, read_only=read_only, create=create, timeout=seconds)
    tables = Tables(database)
    experience = Experience(tables)
    survey = Survey(tables)
    clusters = RunClusters(database)
    split = Split(survey, clusters)
    draws = Draws(tables, experience, split)
    ledger = Ledger(tables, draws)
    return Parts(
        location=path,
        close=database.close,
        experience=experience,
        survey=survey,
        split=split,
        clusters=clusters,
        draws=draws,
        requests=Requests(tables, experience),
        ledger=ledger,
        imports=Imports(tables, draws, ledger),
        tables=tables,
        leases=Leases(database),
        shard=ShardRecord(database),
    )
