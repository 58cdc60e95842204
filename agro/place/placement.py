"""Parse `--place`, plan a run's processes, and report what each does: `agro ps RUN`.

Every placement has the same processes. The trainer trains; any number of collectors sample and score for it;
servers sample if the configuration has any. They share the run's folder and its store: a file if all run on
one host, or else a PostgreSQL database.

The supervisor of a placed run records which processes it started, where, and when. The processes report what
they do in the folder that they share. A run that wasn't placed has only these reports.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agro.config import RunConfig
from agro.errors import Refused
from agro.io.files import write
from agro.store.location import located, url_of
from agro.store.shared import LocalFolder, shared_runs
from agro.train.publications import ProcessReport, Publications, PublishedWeights

Kind = Literal["local", "ray"]
Role = Literal["server", "trainer", "collector"]
FILE = "place.json"  # in a placed run's folder
LOST = 256  # exit code of a process that was lost with its host; no process can return it
SILENT_SECONDS = 60.0  # without a report, after which a process of unknown state counts as silent
TITLES = ("process", "host, pid", "began", "version", "last sign", "does")
FORMS = "local:N (N collectors), ray://HOST:PORT or ray:local"


@dataclass(frozen=True)
class Placement:
    """Where the processes of a run go: `--place KIND:TARGET`."""

    kind: Kind
    target: str = ""  # the Ray head's address; "local" for Ray on this host alone
    collectors: int | None = None  # None: place.collectors

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Parse `--place`. Raises `Refused` for an unknown form."""
        kind, colon, target = text.partition(":")
        if kind == "local" and (not colon or (target.isascii() and target.isdigit() and int(target))):
            return cls("local", "", int(target) if target else None)
        address = target.removeprefix("//")
        if kind == "ray" and (address in ("local", "auto") or re.fullmatch(r"[\w.-]+:\d+", address)):
            return cls("ray", address)
        raise Refused(f"--place {text}: expected {FORMS}. What to do: on other hosts start agro collect URL")

    def __str__(self) -> str:
        if self.kind == "local":
            return "local" if self.collectors is None else f"local:{self.collectors}"
        return f"ray://{self.target}" if ":" in self.target else f"ray:{self.target}"


@dataclass(frozen=True)
class PlacedProcess:
    """A planned process. It has no host yet: a launcher finds one."""

    name: str  # unique, such as collector-2
    role: Role
    module: str | None  # the Python module to run; None: `arguments` are a command
    arguments: tuple[str, ...]
    restart_arguments: tuple[str, ...] = ()  # additional arguments of a restart

    def argv(self, python: str, restarted: bool) -> list[str]:
        """Return the command line, with a host's Python."""
        start = [] if self.module is None else [python, "-m", self.module]
        return [*start, *self.arguments, *(self.restart_arguments if restarted else ())]


def log_file(logs: Path, process: PlacedProcess) -> Path:
    logs.mkdir(parents=True, exist_ok=True)
    return logs / f"{process.name}.log"


@dataclass(frozen=True)
class TrainCommand:
    """`agro train`, as it was called."""

    config: Path
    overrides: tuple[str, ...]
    out: Path
    resume: bool = False
    accept: tuple[str, ...] = ()

    def load(self) -> RunConfig:
        return RunConfig.load(self.config, self.overrides)


def plan(placement: Placement, command: TrainCommand) -> tuple[list[PlacedProcess], list[str]]:
    """Plan a run's processes, in starting order, with notes on what the placement changes. Raises `Refused`
    for a run that can't be placed."""
    config = command.load()
    store = located(config.data.store, command.out)
    if placement.kind == "ray" and placement.target != "local" and url_of(store) is None:
        raise Refused(
            f"--place {placement}: expected a store that several hosts can share, got the file {store}. "
            "What to do: data.store=postgresql://USER@HOST/DATABASE, or --place ray:local"
        )
    processes, notes = [], []
    for number, text in enumerate(config.place.servers, 1):
        try:
            parts = tuple(shlex.split(text))
        except ValueError as error:
            raise Refused(f"place.servers: {text!r}: {error}; expected a command line") from None
        if not parts:
            raise Refused("place.servers: expected the command line of a server, got an empty one")
        processes.append(PlacedProcess(f"server-{number}", "server", None, parts))
    count = placement.collectors or config.place.collectors
    train = ["train", str(command.config), *command.overrides]
    if config.source.kind != "elsewhere":
        if not any(config.phase(name).data.samples_fresh for name in config.phase_names):
            raise Refused(
                "--place: this run samples nothing (data.replay = 1), so collectors have nothing to do. "
                "What to do: train without --place"
            )
        train.append("source.kind=elsewhere")
        age = config.data.max_age
        allowed = "some steps" if age is None else f"{age} optimizer steps"
        sampling = "another process samples" if count == 1 else f"{count} other processes sample"
        fresh = "" if age == 0 else "; data.max_age=0 lets each step wait for fresh ones"
        notes.append(
            f"--place {placement}: {sampling} while this run trains (source.kind = elsewhere, not "
            f"inline), so that its samples may be {allowed} stale{fresh}"
        )
    train += ["--out", str(command.out)]
    resume = ["--resume", *(word for key in command.accept for word in ("--accept", key))]
    module = "agro"
    if config.place.ranks > 1:
        module = "torch.distributed.run"
        train = ["--standalone", "--nproc-per-node", str(config.place.ranks), "-m", "agro", *train]
    if command.resume:
        train, resume = train + resume, []
    processes.append(PlacedProcess("trainer", "trainer", module, tuple(train), tuple(resume)))
    for name in (f"collector-{number}" for number in range(1, count + 1)):
        arguments = ("collect", str(command.out), "--name", name)
        processes.append(PlacedProcess(name, "collector", "agro", arguments))
    return processes, notes


@dataclass(frozen=True)
class PlacedRecord:
    """RUN/place.json."""

    placement: str
    processes: Sequence[dict[str, Any]]  # see `Supervised.to_json`
    host: str = ""  # of the supervisor
    pid: int = 0

    @classmethod
    def read(cls, folder: Path) -> PlacedRecord | None:
        """Read the record; None for a run that wasn't placed."""
        try:
            content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(**content)

    def write(self, folder: Path) -> None:
        content = {**asdict(self), "host": socket.gethostname(), "pid": os.getpid()}
        write(folder / FILE, json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True)
class RunStatus:
    """What each process of a run does, and the newest weights."""

    processes: tuple[ProcessReport, ...]
    published: PublishedWeights | None
    placement: str | None  # None: not placed
    now: float

    @classmethod
    def read(cls, run: str) -> RunStatus:
        """`run`: a run's folder, or the URL of its store. Raises `Refused` for anything else."""
        if url_of(run) is not None:
            runs = shared_runs(run)
            if not runs:
                raise Refused(f"{run}: no run with source.kind = elsewhere has begun there")
            return cls.of(None, Publications.of(run, runs[-1], Path()))
        folder = Path(run)
        placed, publications = PlacedRecord.read(folder), Publications(LocalFolder(folder))
        record = publications.begun() if placed is None else publications.record()
        if record is not None:
            store = located(record["data"].get("store"), folder)
            publications = Publications.of(store, str(record["run"]), folder)
        return cls.of(placed, publications)

    @classmethod
    def of(cls, placed: PlacedRecord | None, publications: Publications) -> RunStatus:
        reports = {report.name: report for report in publications.reports()}
        recorded = {process["name"]: process for process in placed.processes} if placed else {}
        processes = []
        for name in dict.fromkeys((*recorded, *reports)):
            placed_process, report = recorded.get(name, {}), reports.get(name)
            if report is None:  # it doesn't report, such as a server
                role = placed_process["role"]
                report = ProcessReport(name, role, since=None, host=None, pid=None, dropped=None)
            overrides = {key: value for key, value in placed_process.items() if value is not None}
            processes.append(replace(report, **overrides))
        placement = placed.placement if placed else None
        return cls(tuple(processes), publications.newest(), placement, time.time())

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """Return one row per process, with the columns `TITLES`."""
        return [_row(process, self.now) for process in self.processes]

    def doing(self) -> tuple[tuple[Any, ...], ...]:
        """Return state that changes when a process begins, ends or progresses, not with time alone."""
        return tuple(
            (p.name, p.pid, p.version, p.step, p.dropped, p.restarts, p.ended) for p in self.processes
        )

    def sentence(self) -> str:
        """State the newest weights, and whether the run has ended."""
        if self.published is None:
            return "nothing was published yet"
        state = "the run has ended" if self.published.ended else "the run continues"
        return f"newest weights: version {self.published.version}, after step {self.published.step}; {state}"

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {key: values[key] for key in ("placement", "published", "now", "processes")}


def _row(p: ProcessReport, now: float) -> tuple[str, str, str, str, str, str]:
    """Format a row with the columns `TITLES`."""
    host = " ".join(str(part) for part in (p.host, p.pid) if part is not None) or "unknown"
    does = [p.ended] if p.ended else []
    if not p.ended and p.seen is not None and now - p.seen > SILENT_SECONDS:
        does.append("silent")
    if p.step is not None:
        does.append(f"step {p.step}")
    if p.responses is not None:
        does.append(f"{p.responses} responses")
    if p.push_error is not None:
        does.append(f"last probe {p.push_error:.1g} nats off")
    does += [f"without {url}" for url in p.dropped or ()]
    if p.restarts:
        does.append(f"started again {'once' if p.restarts == 1 else f'{p.restarts} times'}")
    version = "" if p.version is None else str(p.version)
    return p.name, host, _ago(p.since, now), version, _ago(p.seen, now), ", ".join(does)


def _ago(moment: float | None, now: float) -> str:
    """Format a time span in the largest unit of which at least two have passed."""
    if moment is None:
        return ""
    seconds = max(0.0, now - moment)
    for name, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
