"""What a trainer publishes for its collectors: the run's configuration, its prompts, versions of its weights.

The files, in a folder that both share (`agro.store.shared`):

    config.json           the record of the run, see `agro.runs.folder`
    prompts.jsonl         the prompts in the order of the trainer, one per line
    weights/v00000012/    the model after 12 optimizer steps, in transformers format (safetensors)
    weights/latest.json   the newest version, with its phase and step
    processes/NAME.json   the latest report of a process of the run

Weights are announced only once they are complete, so no collector loads a partial version. The last
`VERSIONS` versions stay: a collector may still be loading an older one.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from agro.errors import Refused
from agro.io.strictjson import dumps, loads
from agro.store.location import Location, url_of
from agro.store.shared import DatabaseFolder, LocalFolder
from agro.types import Prompt

RECORD, PROMPTS, WEIGHTS, PROCESSES = "config.json", "prompts.jsonl", "weights", "processes"
LATEST = f"{WEIGHTS}/latest.json"
VERSIONS = 3


@dataclass(frozen=True)
class PublishedWeights:
    """The newest weights of a run."""

    version: int  # optimizer steps
    phase: str
    step: int = 0  # the run's last completed step
    ended: bool = False  # whether the run has ended

    @property
    def name(self) -> str:
        """The name of their folder."""
        return f"{WEIGHTS}/v{self.version:08d}"


@dataclass(frozen=True)
class ProcessReport:
    """What a process of a run reports, and what its supervisor adds. None: unknown."""

    name: str
    role: Literal["trainer", "collector", "server"]
    since: float | None = field(default_factory=time.time)  # seconds since the epoch, as all times here
    host: str | None = field(default_factory=socket.gethostname)
    pid: int | None = field(default_factory=os.getpid)
    version: int | None = None  # of its weights
    step: int | None = None  # the run's step that the trainer has reached
    responses: int | None = None  # number that the collector has sampled
    push_error: float | None = None  # the largest of its servers' last probes, nats per token
    dropped: Sequence[str] | None = ()  # servers that it no longer uses
    seen: float | None = None  # time of the report
    restarts: int | None = None  # None: nothing restarts it
    ended: str = ""  # why it stopped; "": it runs, as far as is known


class Publications:
    """What a trainer publishes, and collectors read."""

    def __init__(self, shared: LocalFolder) -> None:
        self.shared = self._folder = shared  # `_folder` has the weights, which may be elsewhere

    @classmethod
    def of(cls, store: Location, run: str, folder: Path) -> Publications:
        """A run's publications, in the database of its store, or else in its folder."""
        url = url_of(store)
        publications = cls(LocalFolder(folder) if url is None else DatabaseFolder(url, run))
        return publications.told(publications.record())

    def told(self, record: Mapping[str, Any] | None) -> Publications:
        """Use the folder of weights that a run's configuration names."""
        weights = (record or {}).get("source", {}).get("weights")
        if weights is not None and record is not None:
            self._folder = LocalFolder(Path(weights) / str(record["run"]))
        return self

    def __str__(self) -> str:
        return str(self.shared)

    def begin(self, record: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        """Publish what collectors read first, and remove weights that a killed trainer never announced."""
        lines = []
        for prompt in prompts:
            content = {"id": prompt.id, "text": prompt.text, "columns": dict(prompt.columns)}
            lines.append(dumps(content, f"prompt {prompt.id}", ascii=True) + "\n")
        self.shared.write(PROMPTS, "".join(lines).encode("ascii"))
        self.told(record)
        self.shared.write(RECORD, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode("utf-8"))
        newest = self.newest()
        if newest is not None and newest.ended:  # it continues with more steps
            self._write(LATEST, replace(newest, ended=False))
        for version in self._versions():
            if newest is None or version > newest.name:
                self._folder.remove(version)
        for report in self.shared.names(PROCESSES):  # those processes may have died since
            self.shared.remove(report)

    def publish(self, weights: PublishedWeights, write: Callable[[Path], None]) -> None:
        """Announce weights, after `write` has put them into a folder unless they are there already."""
        self._folder.add(weights.name, write)
        self._write(LATEST, weights)
        for old in self._versions()[:-VERSIONS]:
            self._folder.remove(old)

    def end(self) -> None:
        newest = self.newest()
        if newest is not None:
            self._write(LATEST, replace(newest, ended=True))
            for old in self._versions()[:-1]:
                self._folder.remove(old)

    def newest(self) -> PublishedWeights | None:
        """The newest weights; None if nothing was published yet."""
        content = self._read(LATEST)
        return None if content is None else PublishedWeights(**content)

    def wait(self, published: PublishedWeights, seconds: float) -> None:
        """Return as soon as `published` isn't the newest any more, after `seconds` at the latest."""
        self.shared.wait(LATEST, _line(published), seconds)

    def record(self) -> dict[str, Any] | None:
        """The contents of the run's config.json; None if no trainer has begun."""
        return self._read(RECORD)

    def begun(self) -> dict[str, Any]:
        """`record`; raises `Refused` if there is none."""
        record = self.record()
        if record is None:
            raise Refused(
                f"{self}: expected the folder of a run (with config.json); start it with agro train first"
            )
        return record

    def prompts(self) -> list[Prompt]:
        """The run's prompts. Raises `Refused` if there are none."""
        content = self.shared.read(PROMPTS)
        if content is None:
            raise Refused(
                f"{self}: expected {PROMPTS}, which the trainer writes when it begins. What to do: start it, "
                "or resume it (agro train … --resume), with this version of agro"
            )
        records = [loads(line) for line in content.splitlines()]
        return [Prompt(record["text"], record["id"], record["columns"]) for record in records]

    def weights(self, published: PublishedWeights) -> AbstractContextManager[Path]:
        """The folder of a version. Raises `Refused` if newer versions have replaced it."""
        return self._folder.open(published.name)

    def has(self, published: PublishedWeights) -> bool:
        """Whether a version exists: a database loses it if its server crashes."""
        return published.name in self._versions()

    def report(self, process: ProcessReport) -> None:
        """Replace a process's report."""
        self._write(f"{PROCESSES}/{process.name}.json", replace(process, seen=time.time()))

    def reports(self) -> list[ProcessReport]:
        contents = [self._read(name) for name in self.shared.names(PROCESSES)]
        return [ProcessReport(**content) for content in contents if content is not None]

    def withdraw(self, process: ProcessReport) -> None:
        """Remove the report of a process that has ended."""
        self.shared.remove(f"{PROCESSES}/{process.name}.json")

    def _versions(self) -> list[str]:
        """The folders of weights, without the one of a server."""
        return [name for name in self._folder.names(WEIGHTS) if name.startswith(f"{WEIGHTS}/v")]

    def _read(self, name: str) -> dict[str, Any] | None:
        content = self.shared.read(name)
        return None if content is None else dict(json.loads(content))

    def _write(self, name: str, content: PublishedWeights | ProcessReport) -> None:
        self.shared.write(name, _line(content))


def _line(content: PublishedWeights | ProcessReport) -> bytes:
    return f"{json.dumps(asdict(content))}\n".encode()
