"""Several processes on one store, and processes that are killed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from making import group, killed, sample, write_lines

from agro.logs.importing import import_files
from agro.store import At, DrawRule, Store
from agro.store.database import SqliteDatabase
from agro.store.ledger import Imports
from agro.store.location import is_store

# Forked children have everything imported; none uses a connection or threads of the parent's.
fork = multiprocessing.get_context("fork")


def append_groups(path: Path, name: str, n: int, together: Any) -> None:
    together.wait(60)
    with Store.open(path) as store:
        for i in range(n):
            store.append(group(f"{name} {i}", [0.0, 1.0, 0.5, 0.25]), run=name, step=i)


def draw_whole_groups(path: Path, out: Any, together: Any) -> None:
    together.wait(60)
    with Store.open(path) as store:
        store.append(group("first", [0.0, 1.0, 0.5, 0.25]))
        seen: Counter[int] = Counter()
        step = 0
        while step < 20 or store.counts().groups < 81:
            step += 1
            drawn = store.draw(DrawRule(1, min_group=2), At("trainer", step, seed=0, version=0))
            seen[len(drawn.samples)] += 1
            # A trainer computes between draws; SQLite's turns aren't fair to writers that wait.
            time.sleep(0.002)
        out.put((step, dict(seen)))


def test_two_processes_append_while_a_third_draws(tmp_path: Path) -> None:
    # Nobody has made the store: the first of them does.
    path, out, together = tmp_path / "s.db", fork.Queue(), fork.Barrier(3)
    work = [
        fork.Process(target=append_groups, args=(path, "a", 40, together)),
        fork.Process(target=append_groups, args=(path, "b", 40, together)),
        fork.Process(target=draw_whole_groups, args=(path, out, together)),
    ]
    for process in work:
        process.start()
    step, seen = out.get(timeout=60)
    for process in work:
        process.join(60)
    assert [process.exitcode for process in work] == [0, 0, 0]
    assert seen == {4: step}  # a group is seen with all of its responses
    with Store.open(path, read_only=True) as store:
        assert {g.size for g in store.groups()} == {4}
        assert store.counts().samples == 81 * 4
        assert store.tables.run("SELECT count(*) FROM draws") == [(4 * step,)]
        assert store.tables.run("PRAGMA integrity_check") == [("ok",)]
        for name in "ab":
            assert [s.prompt for s in store.samples(run=name)] == [f"{name} {i // 4}" for i in range(160)]


def test_a_store_that_others_begin_too_waits_for_them(tmp_path: Path, monkeypatch) -> None:
    """Where two processes begin the write-ahead log at once, SQLite reports a busy file to one of them."""
    plain, asked = SqliteDatabase._connect, []

    class Contended:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self.connection = connection

        def __getattr__(self, name: str) -> Any:
            return getattr(self.connection, name)

        def execute(self, sql: str, *args: Any) -> Any:
            if sql == "PRAGMA journal_mode = wal":
                asked.append(sql)
                if len(asked) < 3:
                    error = sqlite3.OperationalError("database is locked")
                    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
                    raise error
            return self.connection.execute(sql, *args)

    monkeypatch.setattr(SqliteDatabase, "_connect", lambda *a: Contended(plain(*a)))
    with Store.open(tmp_path / "s.db") as store:
        assert store.tables.run("PRAGMA journal_mode") == [("wal",)]
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("at", "time"), [("INSERT INTO samples", 1), ("INSERT INTO samples", 250), ("COMMIT", 1)]
)
def test_a_process_that_is_killed_leaves_what_it_appended_and_nothing_of_what_it_was_appending(
    tmp_path: Path, at: str, time: int
) -> None:
    """At a statement of its second append."""
    path = tmp_path / "s.db"

    def append() -> None:
        with Store.open(path) as store:
            store.append(group("first", [0.0, 1.0]))
            seen = 0

            def count(statement: str) -> None:
                nonlocal seen
                seen += statement.startswith(at)
                if seen == time:
                    os.kill(os.getpid(), signal.SIGKILL)

            store.tables._connection.set_trace_callback(count)
            store.append(sample("second", "x" * 5000) for _ in range(500))

    killed(append)
    with Store.open(path) as store:
        assert [s.prompt for s in store.samples()] == ["first", "first"]
        assert store.tables.run("PRAGMA integrity_check") == [("ok",)]


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_an_import_that_is_killed_goes_on_where_it_was(tmp_path: Path, monkeypatch, packed: str) -> None:
    """Killed inside of the third transaction of 8 records: two are stored, and a second import adds the rest.

    Every fifth record is a pair: four of the first 16 records, so 20 samples; six of all 30, so 36. Others
    have ratings from the 21st on.
    """
    rows = []
    for i in range(30):
        answers = {"chosen": f"good {i}", "rejected": "bad"} if i % 5 == 0 else {"response": f"answer {i}"}
        answers |= {"score": i} if i >= 20 and i % 5 else {}
        rows.append({"prompt": f"Q{i % 7}", **answers})
    log = write_lines(tmp_path / f"log.jsonl{packed}", *rows)
    monkeypatch.setattr("agro.io.record_files.CHUNK", 8)
    write, calls = Imports.note_identities, itertools.count(1)

    def note(store: Imports, places: dict[str, tuple[str, int]]) -> None:
        write(store, places)
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def imported() -> None:
        monkeypatch.setattr(Imports, "note_identities", note)
        with Store.open(tmp_path / "killed.db") as store:
            import_files(store, [log], mapping={"reward": "score"})

    killed(imported)
    with Store.open(tmp_path / "killed.db") as store, Store.open(tmp_path / "whole.db") as whole:
        assert store.counts().samples == 20
        again = import_files(store, [log], mapping={"reward": "score"})
        assert (again.samples, again.duplicates, again.pairs, again.scored) == (16, 20, 2, 8)
        report = import_files(whole, [log], mapping={"reward": "score"})
        assert (report.samples, report.groups, report.pairs, report.repeats) == (36, 7, 6, 0)
        assert list(store.samples()) == list(whole.samples())
        assert list(store.pairs()) == list(whole.pairs())
        assert not store.tables.damage()


def test_a_store_that_is_opened_again_keeps_the_locks_of_its_process(tmp_path: Path) -> None:
    """Else another process that closes the store deletes the write-ahead log under those who have it open."""
    path = tmp_path / "store.db"
    with Store.open(path) as store:
        store.append([sample("p", "r")])
        Store.open(path).close()
        assert is_store(path)
        program = "import sys; from agro.store import Store; Store.open(sys.argv[1]).close()"
        subprocess.run([sys.executable, "-c", program, str(path)], check=True)
        assert path.with_name("store.db-wal").exists()
        store.append([sample("p", "another")])
    with Store.open(path) as store:
        assert [s.response for s in store.samples()] == ["r", "another"]
        assert not store.tables.damage()
