"""Who does what in a run: `agro ps RUN`.

The supervisor of a placed run records which processes it started, where, and when. The processes say what
they do themselves, in the folder that they share. Of a run that wasn't placed there is the latter alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.place.placement import PlacedRecord
from agro.store.location import located, url_of
from agro.store.shared import LocalFolder, shared_runs
from agro.train.publications import ProcessReport, Publications, PublishedWeights

SILENT_SECONDS = 60.0  # without a sign of life after which a process of unknown fate is said to be silent
TITLES = ("process", "host, pid", "began", "version", "last sign", "does")


@dataclass(frozen=True)
class ProcessStatus:
    """A process of a run. What is unknown is None."""

    name: str
    role: str
    host: str | None
    pid: int | None
    since: float | None  # seconds since the epoch, as all times here
    version: int | None  # of the weights that it has
    step: int | None  # of the run, that a trainer has come to
    responses: int | None  # that a collector has made since it was started
    push_error: float | None  # of the last probe of its servers, nats a token
    dropped: Sequence[str] | None  # servers that it doesn't use
    seen: float | None  # its last sign of life
    restarts: int | None  # None: nobody starts it again
    ended: str  # why it doesn't run any more; "": it runs, as far as is known

    @classmethod
    def of(cls, placed: Mapping[str, Any] | None, report: ProcessReport | None) -> ProcessStatus:
        """From what the supervisor recorded, and what the process says of itself; one of them is there."""
        values: dict[str, Any] = dict.fromkeys(cls.__dataclass_fields__) | {"ended": ""}
        if report is not None:
            values |= asdict(report)
        if placed is not None:
            values |= {key: value for key, value in placed.items() if value is not None}
        return cls(**values)

    def row(self, now: float) -> tuple[str, str, str, str, str, str]:
        """By `TITLES`."""
        where = " ".join(str(part) for part in (self.host, self.pid) if part is not None) or "unknown"
        does = [self.ended] if self.ended else []
        if not self.ended and self.seen is not None and now - self.seen > SILENT_SECONDS:
            does.append("silent")
        if self.step is not None:
            does.append(f"step {self.step}")
        if self.responses is not None:
            does.append(f"{self.responses} responses")
        if self.push_error is not None:
            does.append(f"last probe {self.push_error:.1g} nats off")
        does += [f"without {url}" for url in self.dropped or ()]
        if self.restarts:
            does.append(f"started again {'once' if self.restarts == 1 else f'{self.restarts} times'}")
        version = "" if self.version is None else str(self.version)
        return self.name, where, _ago(self.since, now), version, _ago(self.seen, now), ", ".join(does)


@dataclass(frozen=True)
class RunStatus:
    """Who does what in a run, and which weights are the newest."""

    processes: tuple[ProcessStatus, ...]
    published: PublishedWeights | None
    placement: str | None  # None: it wasn't placed
    now: float

    @classmethod
    def read(cls, run: str) -> RunStatus:
        """`run`: a run's folder, or the URL of its store. Raises `Refused` for other texts."""
        if url_of(run) is not None:
            runs = shared_runs(run)
            if not runs:
                raise Refused(f"{run}: no run with source.kind = elsewhere has begun there")
            return cls.of(None, Publications.of(run, runs[-1], Path()))
        folder = Path(run)
        placed, publications = PlacedRecord.read(folder), Publications(LocalFolder(folder))
        record = publications.record()
        if record is not None:
            store = located(record["data"].get("store"), folder)
            publications = Publications.of(store, str(record["run"]), folder)
        elif placed is None:
            raise Refused(
                f"{folder}: expected the folder of a run (with config.json); start it with agro train"
            )
        return cls.of(placed, publications)

    @classmethod
    def of(cls, placed: PlacedRecord | None, publications: Publications) -> RunStatus:
        reports = {report.name: report for report in publications.reports()}
        recorded = {process["name"]: process for process in placed.processes} if placed else {}
        names = dict.fromkeys((*recorded, *reports))
        processes = tuple(ProcessStatus.of(recorded.get(name), reports.get(name)) for name in names)
        placement = placed.placement if placed else None
        return cls(processes, publications.newest(), placement, time.time())

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """Of each process, by `TITLES`."""
        return [process.row(self.now) for process in self.processes]

    def doing(self) -> tuple[tuple[Any, ...], ...]:
        """What changes when a process begins, ends or goes on; not with time alone."""
        return tuple(
            (p.name, p.pid, p.version, p.step, p.dropped, p.restarts, p.ended) for p in self.processes
        )

    def sentence(self) -> str:
        """What is newest in the run."""
        if self.published is None:
            return "nothing was published yet"
        state = "the run has ended" if self.published.ended else "the run goes on"
        return f"newest weights: version {self.published.version}, after step {self.published.step}; {state}"

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {key: values[key] for key in ("placement", "published", "now", "processes")}


def _ago(moment: float | None, now: float) -> str:
    """In the largest unit of which two or more have passed."""
    if moment is None:
        return ""
    seconds = max(0.0, now - moment)
    for name, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
