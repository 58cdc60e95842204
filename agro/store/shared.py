"""What the processes of a run share: requests for samples, leases, and a folder.

A request is one prompt of a run's endless order, identified by its number. A collector claims it, stores its
responses under the ledger of the run, scores them and marks it done; the trainer takes requests that are
done. A dead collector's claim goes to another one, which samples only the missing responses.

Each live process renews a lease under its name; an expired lease counts as a death. A stopped or unreachable
process loses its lease although it is alive. That is harmless: another process has already stored what it
stores later, and the store has each response once (`Origin`).

The folder is on this host or in the database of the run's store. It has small files, each replaced as a
whole, and folders of files, which are complete or missing. In a database, the files of folders are rows of 1
MiB that aren't logged, so they are missing after a crash of the server.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.io.files import remove, replacing, writing
from agro.store.database import Database, repeated
from agro.store.location import Location, opened
from agro.store.sample_rows import ledger_of
from agro.store.samples import Experience

RENEWALS = 4  # renewals of a lease before it expires
RELEASE_SECONDS = 5.0  # that an ending process waits for a store that others write to
PIECE_BYTES = 1 << 20
WITHIN = "(name > ? AND name < ?)"  # FOLDER/ and FOLDER0: 0 is the character after /
MANIFEST = ".manifest.json"  # for a folder in a database: its files, with their pieces and SHA-256
UNFINISHED = "run = ? AND done = 0"
WAITING = "count(CASE WHEN step IS NULL OR step > ? THEN 1 END)"


class SamplingRequest(NamedTuple):
    """A row of `requests`."""

    run: str
    number: int
    collector: str
    done: int = 0
    step: int | None = None  # the step that trained on it


class Requests:
    """The sampling requests that collectors and the trainer share."""

    def __init__(self, database: Database) -> None:
        self._db, self._experience = database, Experience(database)

    @repeated
    def claim(
        self,
        run: str,
        collector: str,
        *,
        maximum: int,
        ahead: int,
        trained: int = 0,
        dead: Collection[str] = (),
    ) -> list[int]:
        """Claim up to `maximum` numbers for `collector` to sample: its unfinished ones, so that a claim can
        be repeated, those of `dead` collectors, then new ones.

        At most `ahead` requests, whoever claimed them, exist on which no step up to `trained` has trained.
        """
        with self._db.transaction():
            self._db.check_once("structure", "requests")
            rows, [(newest, waiting)] = self._db.run_all(
                self._db.entries_query("requests", UNFINISHED, [run]),
                (f"SELECT coalesce(max(number), -1), {WAITING} FROM requests WHERE run = ?", [trained, run]),
            )
            claims = _by_number(self._db.checked("requests", rows))
            unfinished = [claim for claim in claims if claim.collector == collector]
            abandoned = [claim for claim in claims if claim.collector in dead and claim not in unfinished]
            claimed = [claim._replace(collector=collector) for claim in unfinished + abandoned][:maximum]
            count = max(0, min(maximum - len(claimed), ahead - waiting))
            claimed += [SamplingRequest(run, newest + 1 + i, collector) for i in range(count)]
            self._db.put("requests", claimed)
        return [claim.number for claim in claimed]

    def collectors(self, run: str) -> list[str]:
        """The collectors that have claimed requests which aren't done."""
        return sorted({claim.collector for claim in self._requests(UNFINISHED, [run])})

    @repeated
    def finish(self, run: str, numbers: Collection[int]) -> None:
        """Mark requests as done: all their responses are stored and scored."""
        self._update(run, numbers, done=1)

    def ready(self, run: str, maximum: int) -> list[int]:
        """The first requests that are done and not yet trained on."""
        self._db.check_once("structure", "requests")
        waiting = self._requests("run = ? AND step IS NULL AND done = 1", [run])
        return [request.number for request in waiting][:maximum]

    def backlog(self, run: str, trained: int) -> int:
        """The number of claimed requests on which no step up to `trained` has trained."""
        [(count,)] = self._db.run(f"SELECT {WAITING} FROM requests WHERE run = ?", [trained, run])
        return int(count)

    @repeated
    def take(self, run: str, step: int, numbers: Collection[int]) -> None:
        """Record that `run` trains on these requests at `step`; `rewind` undoes it after the last commit."""
        with self._db.transaction():
            self._update(run, numbers, step=step)
            self._db.note_changes(self._experience.find_in_ledger(ledger_of(run), list(numbers)))

    @repeated
    def reopen(self, run: str, numbers: Collection[int]) -> None:
        """Have these requests sampled again by their collectors, and mark their responses as redone."""
        with self._db.transaction():
            self._experience.set_aside(ledger_of(run), list(numbers))
            self._update(run, numbers, done=0)

    def _update(self, run: str, numbers: Collection[int], **changes: Any) -> None:
        clause = "run = ? AND number IN (SELECT value FROM json_each(?))"
        with self._db.transaction():
            chosen = self._requests(clause, [run, self._db.listed(numbers)])
            self._db.put("requests", [request._replace(**changes) for request in chosen])

    def _requests(self, clause: str, args: Sequence[Any]) -> list[SamplingRequest]:
        """The requests by number. Raises `Refused` for a damaged one."""
        return _by_number(self._db.entries("requests", clause, args))


def _by_number(rows: Iterable[tuple[Any, ...]]) -> list[SamplingRequest]:
    return sorted((SamplingRequest(*row) for row in rows), key=lambda request: request.number)


class Leases:
    """The leases of a store, by the clock of the host that has it."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @repeated
    def renew(self, name: str, seconds: float) -> None:
        """Let `name` count as alive for the next `seconds`."""
        with self._db.transaction():
            row = (name, self._db.now() + seconds, seconds)
            self._db.insert("leases", ("name", "ends", "seconds"), [row], key=("name",))

    @repeated
    def release(self, name: str) -> None:
        with self._db.transaction():
            self._db.run("DELETE FROM leases WHERE name = ?", [name])

    def alive(self, names: Collection[str]) -> list[str]:
        """The names with a valid lease. One that ends too late was given before the clock was set back."""
        rows = self._db.run(
            "SELECT name FROM leases WHERE ends > ?1 AND ends <= ?1 + seconds "
            "AND name IN (SELECT value FROM json_each(?2)) ORDER BY name",
            [self._db.now(), self._db.listed(names)],
        )
        return [name for (name,) in rows]


def trainer_of(run: str) -> str:
    """The lease name of a run's trainer."""
    return f"trainer of {run}"


class LocalFolder:
    """A folder of this host's file system. Names are relative paths, such as `weights/latest.json`."""

    look_seconds = 0.1  # between two reads of an awaited file

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if it doesn't exist."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Put a small file in place, as a whole."""
        file = self.path / name
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as new:
                new.write(content)

    def names(self, folder: str) -> list[str]:
        """The files and the complete folders in `folder`, sorted."""
        path = self.path / folder
        if not path.is_dir():
            return []
        return sorted(f"{folder}/{entry.name}" for entry in path.iterdir() if not entry.name.startswith("."))

    def add(self, name: str, write: Callable[[Path], None]) -> None:
        """Let `write` create the folder `name`, unless it exists; its argument is a path that doesn't
        exist."""
        if not (self.path / name).exists():
            write(self.path / name)

    @contextmanager
    def open(self, name: str) -> Iterator[Path]:
        """The folder `name` as files of this host. Raises `Refused` if it doesn't exist (any more)."""
        folder = self.path / name
        if not folder.is_dir():
            raise Refused(f"{folder}: expected a folder; it was removed, or never existed")
        yield folder

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it exists."""
        remove(self.path / name)

    def wait(self, name: str, previous: bytes | None, seconds: float) -> None:
        """Return as soon as a small file differs from `previous`, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.read(name) == previous and time.monotonic() < deadline:
            time.sleep(self.look_seconds)


class DatabaseFolder(LocalFolder):
    """The shared folder of a run, in the database of its store: the methods of `LocalFolder`.

    Each method runs one or more statements, outside of the turns of the store's writers.
    """

    look_seconds = 0.2

    def __init__(self, url: str, run: str) -> None:
        """`run`: the run's id."""
        self._url, self._run = url, run
        self._db = opened(url)

    def __str__(self) -> str:
        return self._url

    def read(self, name: str) -> bytes | None:
        rows = self._db.run("SELECT content FROM shared WHERE run = ? AND name = ?", [self._run, name])
        return rows[0][0] if rows else None

    def write(self, name: str, content: bytes) -> None:
        row, columns = (self._run, name, content, self._db.now()), ("run", "name", "content", "written")
        self._db.insert("shared", columns, [row], key=columns[:2])

    def names(self, folder: str) -> list[str]:
        names = set[str]()
        for table in ("shared", "pieces"):
            sql = f"SELECT DISTINCT name FROM {table} WHERE run = ? AND {WITHIN}"
            for (name,) in self._db.run(sql, [self._run, f"{folder}/", f"{folder}0"]):
                entry, _, file = name.removeprefix(f"{folder}/").partition("/")
                if file in ("", MANIFEST):
                    names.add(f"{folder}/{entry}")
        return sorted(names)

    def add(self, name: str, write: Callable[[Path], None]) -> None:
        if self._piece(f"{name}/{MANIFEST}", 0) is not None:
            return
        with tempfile.TemporaryDirectory(prefix="agro-") as temporary:
            folder = Path(temporary) / "folder"
            write(folder)
            manifest = {}
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                file, total, number = path.relative_to(folder).as_posix(), hashlib.sha256(), 0
                with path.open("rb") as source:
                    while piece := source.read(PIECE_BYTES):
                        self._put(f"{name}/{file}", number, piece)
                        total.update(piece)
                        number += 1
                manifest[file] = {"pieces": number, "sha256": total.hexdigest()}
            self._put(f"{name}/{MANIFEST}", 0, json.dumps(manifest).encode())

    @contextmanager
    def open(self, name: str) -> Iterator[Path]:
        missing = Refused(f"{self}: {name} is missing: it was removed, lost by a crash, or never complete")
        manifest = self._piece(f"{name}/{MANIFEST}", 0)
        if manifest is None:
            raise missing
        with tempfile.TemporaryDirectory(prefix="agro-") as temporary:
            for file, expected in json.loads(manifest).items():
                path, total = Path(temporary) / file, hashlib.sha256()
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as target:
                    for number in range(expected["pieces"]):
                        piece = self._piece(f"{name}/{file}", number)
                        if piece is None:
                            raise missing
                        target.write(piece)
                        total.update(piece)
                if total.hexdigest() != expected["sha256"]:
                    raise Refused(f"{self}: {name}/{file}: its SHA-256 differs from the published one")
            yield Path(temporary)

    def remove(self, name: str) -> None:
        for table in ("shared", "pieces"):
            sql = f"DELETE FROM {table} WHERE run = ? AND (name = ? OR {WITHIN})"
            self._db.run(sql, [self._run, name, f"{name}/", f"{name}0"])

    def _put(self, name: str, number: int, content: bytes) -> None:
        columns = ("run", "name", "number", "content")
        self._db.insert("pieces", columns, [(self._run, name, number, content)], key=columns[:3])

    def _piece(self, name: str, number: int) -> bytes | None:
        sql = "SELECT content FROM pieces WHERE run = ? AND name = ? AND number = ?"
        rows = self._db.run(sql, [self._run, name, number])
        return rows[0][0] if rows else None


def shared_runs(url: str) -> list[str]:
    """The ids of the runs that shared something in a database; the latest one is last."""
    with opened(url, read_only=True, create=False) as database:
        rows = database.run("SELECT run FROM shared WHERE name = 'config.json' ORDER BY written, run")
    return [run for (run,) in rows]


@contextmanager
def leased(location: Location, name: str, seconds: float) -> Iterator[None]:
    """Hold a lease of the store under `name` while the block runs. Raises `Refused` as `Store.open` does."""
    with opened(location) as database:
        Leases(database).renew(name, seconds)
    stop = Event()
    thread = Thread(target=_renew, args=(location, name, seconds, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(seconds)


def _renew(location: Location, name: str, seconds: float, stop: Event) -> None:
    """Renew a lease until the end, then release it. It expires while the store can't be reached."""
    while not stop.wait(seconds / RENEWALS):
        with suppress(Refused), opened(location, timeout=seconds) as database:
            leases = Leases(database)
            leases.renew(name, seconds)
            while not stop.wait(seconds / RENEWALS):
                leases.renew(name, seconds)
    with suppress(Refused), opened(location, timeout=RELEASE_SECONDS) as database:
        Leases(database).release(name)
