"""One store of several that earlier versions had as one: each had the prompts of its share of a hash.

Rows are copied as they are, with their ids, which the first store gave out for all, and their checksums. What
belongs to no prompt, such as requests, was in the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from agro.errors import Refused
from agro.io.files import sync, writing
from agro.store.database import BUSY_TIMEOUT, LEDGERS
from agro.store.sample_rows import SAMPLE
from agro.store.split import TABLE as CLUSTERS
from agro.store.sqlite import SqliteDatabase

COLUMNS = {table: (*columns, "checksum") for table, columns in LEDGERS.items()}
COLUMNS |= {"samples": SAMPLE, "reference_logp": ("sample", "key", "run", "step", "logp", "checksum")}
OF_FIRST = ("requests", "reference_logp", "commits")


def join(paths: Sequence[Path], out: Path) -> None:
    """Make the store `out` of all that is in several, which stay as they are.

    Raises `Refused` where `out` exists, and where these aren't all of the stores, in order.
    """
    if out.exists():
        raise Refused(f"{out}: is there already; give another path")
    for number, path in enumerate(paths):
        if path.with_name(f"{path.name}.replacing").exists():
            raise Refused(
                f"{path}: an import into it and the others was cut off. What to do: complete it by agro "
                "check of all of them, with the version of agro that began it"
            )
        with _open(path, read_only=True) as database:
            share = database.share()
        if share != (number, len(paths)):
            got = "one that is complete alone" if share is None else f"store {share[0] + 1} of {share[1]}"
            raise Refused(
                f"{path}: expected store {number + 1} of {len(paths)} that were one together, got {got}. "
                "What to do: give all of them, in the order of data.store. Of stores that never were one "
                "agro export writes the samples, and agro import takes these files into one store"
            )
    with writing(out), TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        new = Path(folder) / out.name
        with _open(new, read_only=False) as database:
            _copy_all(database, paths)
        sync(new)
        new.rename(out)
        sync(out.parent)


def _copy_all(database: SqliteDatabase, paths: Sequence[Path]) -> None:
    columns = ", ".join(COLUMNS["draws"])
    database.run(f"CREATE TEMP TABLE parts ({columns})")
    for number, path in enumerate(paths):  # one by one: SQLite attaches ten at most
        database.run("ATTACH ? AS part", [f"{path.absolute().as_uri()}?mode=ro"])
        with database.transaction():
            # Each may have the same files as others, which name the samples of all.
            for table in ("samples", "pairs", "group_uses", "imports", "identities"):
                _copy(database, table)
            if number == 0:
                for table in OF_FIRST:
                    _copy(database, table)
                if database.run("SELECT 1 FROM part.sqlite_master WHERE name = 'clusters'"):
                    database.run(CLUSTERS)
                    database.run("INSERT INTO main.clusters SELECT * FROM part.clusters")
            database.run(f"INSERT INTO temp.parts SELECT {columns} FROM part.draws ORDER BY rowid")
        database.run("DETACH part")
    with database.transaction():
        database.run(f"INSERT INTO draws ({columns}) SELECT * FROM temp.parts ORDER BY run, step, rowid")


def _copy(database: SqliteDatabase, table: str) -> None:
    columns = ", ".join(COLUMNS[table])
    repeated = "OR IGNORE " if table in ("imports", "identities") else ""
    database.run(
        f"INSERT {repeated}INTO main.{table} ({columns}) SELECT {columns} FROM part.{table} ORDER BY rowid"
    )


def _open(path: Path, *, read_only: bool) -> SqliteDatabase:
    return SqliteDatabase(path, read_only=read_only, create=not read_only, timeout=BUSY_TIMEOUT)
