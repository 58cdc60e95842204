"""One store of several that earlier versions had as one: nothing is lost, and draws and ids stay the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest
from making import group, sample

from agro.cli.stores import Action
from agro.cli.stores import store as store_command
from agro.config import DataConfig, RunConfig
from agro.errors import Refused
from agro.store import At, DrawRule, Pair, Store
from agro.store.copying import join
from agro.store.draw_rules import noise
from agro.store.imports import ImportedFile

RULE = DrawRule(4, DataConfig(order="newest"), min_group=2)
COUNT = 12  # more than SQLite attaches


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """one.db with a log, judgments, a run that drew and committed, and a request; 0.db to 11.db with its
    parts, as earlier versions wrote them."""
    folder = tmp_path_factory.mktemp("stores")
    with Store.open(folder / "one.db") as store:
        ids = store.append([s for i in range(40) for s in group(f"p{i}", [0.0, None, 1.0])])
        store.add_pairs([Pair(ids[0], ids[2]), Pair(ids[7], ids[6])])
        store.append(group("own", [0.5, 1.0], role="policy", version=1), run="r", step=1)
        for step in (2, 3):
            store.draw(RULE, At("r", step, 7, step))
        store.ledger.commit("r", 3, "digest")
        store.requests.claim("r", "c", maximum=2, ahead=9)
        store.split.keep("r", {"a": "b"})
        store.imports.note_import(ImportedFile("digest", "log.jsonl", {}))
    for number in range(COUNT):
        shutil.copyfile(folder / "one.db", folder / f"{number}.db")
        with Store.open(folder / f"{number}.db") as store, store.transaction():
            _keep_share(store, number)
    return folder


def _keep_share(store: Store, number: int) -> None:
    run = store._database.run
    store._database._connection.create_function(
        "share", 1, lambda prompt_id: noise(0, 0, "shard", prompt_id) % COUNT
    )
    run("DELETE FROM draws WHERE (SELECT share(prompt_id) FROM samples WHERE id = sample) <> ?", [number])
    run("DELETE FROM pairs WHERE (SELECT share(prompt_id) FROM samples WHERE id = winner) <> ?", [number])
    for table in ("samples", "group_uses"):
        run(f"DELETE FROM {table} WHERE share(prompt_id) <> ?", [number])
    run("CREATE TABLE shard (number INTEGER NOT NULL, count INTEGER NOT NULL, newest INTEGER NOT NULL)")
    run("INSERT INTO shard VALUES (?, ?, 122)", [number, COUNT])


def parts(folder: Path) -> list[Path]:
    return [folder / f"{number}.db" for number in range(COUNT)]


def content(store: Store) -> list[object]:
    return [
        [(s.id, s) for s in store.samples()],
        sorted(map(astuple, store.pairs())),
        sorted(store.draws.drawn("r")),
        [draw.step for draw in store.draws.drawn("r")],
        store.imports.imported("digest"),
        store.ledger.commits("r"),
        store.requests.collectors("r"),
        dict(store.clusters.of("r") or {}),
        store.counts(),
        store.draws.candidates(RULE, "r", 9),
        store.draws.pick(RULE, At("r", 4, 7, 4)),
        store.tables.damage(),
        store.append([sample("new")]),  # the next id
    ]


def test_the_joined_store_is_that_of_which_they_were_parts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_command(Action.join, [*parts(folder), folder / "again.db"])
    assert "again.db: 122 samples in 41 groups" in capsys.readouterr().out
    with Store.open(folder / "one.db") as one, Store.open(folder / "again.db") as again:
        found = content(again)
        assert found == content(one)
        assert found[-1] == [123]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            lambda paths: paths[::-1],
            "11.db: expected store 1 of 12 that were one together, got store 12 of 12",
        ),
        (lambda paths: paths[:2], "expected store 1 of 2 that were one together, got store 1 of 12"),
        (lambda paths: [paths[0].with_name("one.db")] * 2, "got one that is complete alone"),
        (lambda paths: [paths[0].with_name("missing.db")] * 2, "no such store"),
    ],
)
def test_others_are_not_joined(
    folder: Path, chosen: Callable[[list[Path]], list[Path]], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        join(chosen(parts(folder)), folder / "out.db")
    assert not list(folder.glob("*out.db*"))


def test_nothing_is_written_over_and_an_import_that_was_cut_off_is_named(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match="is there already"):
        join(parts(folder), folder / "one.db")
    (folder / "3.db.replacing").touch()
    with pytest.raises(Refused, match=r"3\.db: an import into it and the others was cut off"):
        join(parts(folder), tmp_path / "out.db")
    (folder / "3.db.replacing").unlink()


@pytest.mark.parametrize(
    ("action", "names", "message"),
    [
        (Action.join, ["a.db", "b.db"], r"expected A\.db B\.db OUT\.db, got a\.db b\.db"),
        (Action.copy, ["a.db"], "expected A B, got a.db"),
        (Action.copy, ["a.db", "b.db", "c.db"], "expected A B, got a.db b.db c.db"),
    ],
)
def test_other_arguments_are_refused(action: Action, names: list[str], message: str) -> None:
    with pytest.raises(Refused, match=message):
        store_command(action, list(map(Path, names)))


@pytest.mark.parametrize("read_only", [False, True])
def test_one_of_several_is_refused_with_the_way_out(folder: Path, read_only: bool) -> None:
    with pytest.raises(Refused, match=r"2\.db: expected a store .* got store 3 of 12.*agro store join"):
        Store.open(folder / "2.db", read_only=read_only)


def test_several_stores_in_a_configuration_are_refused_with_the_way_out() -> None:
    with pytest.raises(Refused, match=r"data\.store: .*got \['a\.db', 'b\.db'\].*agro store join A\.db"):
        RunConfig.load("log", ['data.store=["a.db", "b.db"]'])
    with pytest.raises(Refused, match=r"data\.store=.*expected one store.*agro store join A\.db"):
        RunConfig.load("log", ["data.store=[a.db, b.db]"])  # as a shell hands it on
