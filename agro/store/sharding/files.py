"""Several stores from one, and one from several: rows are copied as they are, with their ids and checksums.

What belongs to a prompt is in the store of the prompt; what belongs to none, such as requests, in the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agro.errors import Refused
from agro.store.database import BUSY_TIMEOUT, LEDGERS, Database
from agro.store.location import Shards, exists, url_of
from agro.store.replacement import beside, complete, remove_unfinished, replaced
from agro.store.sample_rows import SAMPLE, decode_text
from agro.store.shard_record import ShardRecord
from agro.store.sharding.group import shard_of
from agro.store.split import TABLE as CLUSTERS

COLUMNS = {table: (*columns, "checksum") for table, columns in LEDGERS.items()}
COLUMNS |= {"samples": SAMPLE, "reference_logp": ("sample", "key", "run", "step", "logp", "checksum")}
OF_PROMPT = ("samples", "pairs", "group_uses")
OF_NONE = ("requests", "reference_logp", "commits")  # which the first store has
OF_FILE = ("imports", "identities")  # of which each store may have the same


def merge(shards: Shards, out: Path) -> None:
    """Make the store `out` of all that is in several, which stay as they are.

    Raises `Refused` where `out` exists, and where these aren't all of the stores, in order.
    """
    paths = _files(shards, missing=False)
    for number, path in enumerate(paths):
        with _opened(path, read_only=True) as database:
            if not ShardRecord(database).fits(number, len(paths)):
                raise Refused(f"{path}: expected one of {len(paths)} stores, got one that is complete alone")
    columns = ", ".join(COLUMNS["draws"])
    with _made(out) as database:
        database.run(f"CREATE TEMP TABLE parts ({columns})")
        for number, path in enumerate(paths):  # one by one: SQLite attaches ten at most
            _attach(database, path, "part")
            with database.transaction():
                for table in (*OF_PROMPT, *OF_FILE, *(OF_NONE if number == 0 else ())):
                    _copy(database, "part", table)
                if number == 0:
                    _copy_clusters(database, "part")
                database.run(f"INSERT INTO temp.parts SELECT {columns} FROM part.draws ORDER BY rowid")
            database.run("DETACH part")
        with database.transaction():
            database.run(f"INSERT INTO draws ({columns}) SELECT * FROM temp.parts ORDER BY run, step, rowid")


def split(one: Path, shards: Shards) -> None:
    """Share the samples of a store out to new ones, by their prompts. The store stays as it is.

    Raises `Refused` where one of `shards` exists, where the store is one of several itself, and for a
    judgment of responses to two prompts that belong to different ones.
    """
    paths = _files(shards, missing=True)
    with beside(paths) as new:
        _share_out(one, new)
        with replaced(paths, new):
            pass


def _share_out(one: Path, new: Sequence[Path]) -> None:
    with _opened(one, read_only=True) as database:
        if ShardRecord(database).place() is not None:
            raise Refused(f"{one}: expected a store with all samples, got one of several; merge them first")
    for number, path in enumerate(new):
        with _opened(path, read_only=False) as database:
            _fill(database, one, number, len(new))


def _fill(database: Database, one: Path, number: int, count: int) -> None:
    """Make a new store the one of this number."""
    ShardRecord(database).join(number, count)
    database.define("shard_of", lambda prompt_id: shard_of(decode_text(prompt_id), count))
    _attach(database, one, "one")
    with database.transaction():
        prompts = "SELECT DISTINCT prompt_id FROM one.samples"
        database.run("CREATE TEMP TABLE own (prompt_id PRIMARY KEY) WITHOUT ROWID")
        database.run(
            f"INSERT INTO temp.own SELECT * FROM ({prompts}) WHERE shard_of(prompt_id) = ?", [number]
        )
        is_own = "prompt_id IN (SELECT prompt_id FROM temp.own)"
        _copy(database, "one", "samples", is_own)
        has = "IN (SELECT id FROM main.samples)"
        split_up = database.run(
            f"SELECT winner, loser FROM one.pairs WHERE (winner {has}) <> (loser {has}) LIMIT 1"
        )
        if split_up:
            raise Refused(
                f"{one}: pair of {split_up[0][0]} and {split_up[0][1]}: expected responses to one prompt, "
                "which are in one of several stores, got two prompts'"
            )
        _copy(database, "one", "pairs", f"winner {has}")
        _copy(database, "one", "group_uses", is_own)
        _copy(database, "one", "draws", f"sample {has}")
        for table in ("imports", "commits", "requests"):  # which all know
            _copy(database, "one", table)
        _copy_clusters(database, "one")
        if number == 0:
            _copy(database, "one", "identities")
            _copy(database, "one", "reference_logp")
            database.run("UPDATE shard SET newest = (SELECT ifnull(max(id), 0) FROM one.samples)")


@contextmanager
def joined(shards: Shards) -> Iterator[Path]:
    """One store with what several have, new ones nothing; in the end they have what it has then.

    Where it raises, or this process is killed, all of them stay as they are, or all have it. Raises `Refused`
    where another process has one of them open; until the end no other one can write to them.
    """
    paths = _files(shards, missing=None)
    there = list(filter(exists, paths))
    with ExitStack() as held:
        for path in there:
            database = held.enter_context(_opened(path, read_only=False))
            with database.alone():
                pass
            held.enter_context(database.transaction())
            remove_unfinished(path)
        with beside(paths) as new:
            one = new[0].with_name("one") / paths[0].name  # the name is in messages
            one.parent.mkdir()
            if there:
                merge(shards, one)
            yield one
            _share_out(one, new)
            with replaced(paths, new):
                held.close()


def _attach(database: Database, path: Path, name: str) -> None:
    """To be read alone, so that a transaction takes no lock of it."""
    database.run(f"ATTACH ? AS {name}", [f"{path.absolute().as_uri()}?mode=ro"])


def _copy(database: Database, source: str, table: str, clause: str = "TRUE") -> None:
    columns = ", ".join(COLUMNS[table])
    repeated = "OR IGNORE " if table in OF_FILE else ""
    database.run(
        f"INSERT {repeated}INTO main.{table} ({columns}) SELECT {columns} FROM {source}.{table} "
        f"WHERE {clause} ORDER BY rowid"
    )


def _copy_clusters(database: Database, source: str) -> None:
    """Of runs, see `agro.store.split`; a store may have none."""
    if database.run(f"SELECT 1 FROM {source}.sqlite_master WHERE name = 'clusters'"):
        database.run(CLUSTERS)
        database.run(f"INSERT INTO main.clusters SELECT * FROM {source}.clusters")


def _files(shards: Shards, *, missing: bool | None) -> list[Path]:
    """The files of stores. Raises `Refused` for owners, and where one is there that should be `missing`, or
    isn't and should be there; None: either."""
    paths = []
    for location in shards.locations:
        if url_of(location) is not None:
            raise Refused(
                f"{location}: expected a file, got the URL of its owner. What to do: end the owner, and give "
                "the file"
            )
        path = Path(location)
        complete(path)
        if missing is not None and exists(path) is missing:
            raise Refused(f"{path}: {'is there already' if missing else 'no such store'}; give another path")
        paths.append(path)
    return paths


def _opened(path: Path, *, read_only: bool) -> Database:
    return Database(path, read_only=read_only, create=not read_only, timeout=BUSY_TIMEOUT)


@contextmanager
def _made(path: Path) -> Iterator[Database]:
    """A new store, of which nothing is there before it is complete."""
    if exists(path):
        raise Refused(f"{path}: is there already; give another path")
    with beside([path]) as [new]:
        with _opened(new, read_only=False) as database:
            yield database
        new.replace(path)
