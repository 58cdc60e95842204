"""Several files from one store, and one from several: nothing is lost, and draws and ids stay the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest
from making import group, sample

from agro.config import DataConfig
from agro.errors import Refused
from agro.logs.importing import import_files
from agro.store import At, DrawRule, Pair, Store
from agro.store.location import Shards
from agro.store.sharding import files
from agro.store.sharding.files import joined, merge, split

RULE = DrawRule(4, DataConfig(order="newest"), min_group=2)


def paths(folder: Path, count: int = 3) -> Shards:
    return Shards(tuple(folder / f"{number}.db" for number in range(count)))


def filled(path: Path) -> None:
    """A store with a log, judgments, a run that drew and committed, a request, and a scored sample."""
    with Store.open(path) as store:
        ids = store.append([s for i in range(20) for s in group(f"p{i}", [0.0, None, 1.0])])
        store.add_pairs([Pair(ids[0], ids[2]), Pair(ids[7], ids[6])])
        store.append(group("own", [0.5, 1.0], role="policy", version=1), run="r", step=1)
        for step in (2, 3):
            store.draw(RULE, At("r", step, 7, step))
        store.ledger.commit("r", 3, "digest")
        store.requests.claim("r", "c", maximum=2, ahead=9)
        store.split.keep("r", {"a": "b"})


def content(store: Store) -> list[object]:
    return [
        [(s.id, s) for s in store.samples()],
        sorted(map(astuple, store.pairs())),
        sorted(store.draws.drawn("r")),
        store.ledger.commits("r"),
        store.requests.collectors("r"),
        dict(store.split._of_runs.of("r") or {}),
        store.counts(),
        store.draws.candidates(RULE, "r", 9),
        store.draws.pick(RULE, At("r", 4, 7, 4)),
        store.tables.damage(),
    ]


def test_a_store_that_is_split_and_merged_is_the_same(tmp_path: Path) -> None:
    filled(tmp_path / "one.db")
    split(tmp_path / "one.db", paths(tmp_path))
    merge(paths(tmp_path), tmp_path / "again.db")
    stores = (tmp_path / "one.db", paths(tmp_path), tmp_path / "again.db")
    contents = []
    for location in stores:
        with Store.open(location) as store:
            contents.append(content(store))
            assert store.append([sample("new")]) == [63]  # the next id
    assert contents[0] == contents[1] == contents[2]


def test_more_stores_than_sqlite_attaches_are_merged(tmp_path: Path) -> None:
    """SQLite attaches ten at most."""
    filled(tmp_path / "one.db")
    split(tmp_path / "one.db", paths(tmp_path, 12))
    merge(paths(tmp_path, 12), tmp_path / "again.db")
    with Store.open(tmp_path / "one.db") as one, Store.open(tmp_path / "again.db") as again:
        assert content(one) == content(again)


def test_one_of_several_and_a_missing_store_are_not_split(tmp_path: Path) -> None:
    filled(tmp_path / "one.db")
    split(tmp_path / "one.db", paths(tmp_path))
    (tmp_path / "new").mkdir()
    for source in ("0.db", "missing.db"):
        with pytest.raises(Refused, match=source):
            split(tmp_path / source, paths(tmp_path / "new"))
    assert not (tmp_path / "missing.db").exists()
    assert not list((tmp_path / "new").iterdir())


def test_nobody_writes_to_stores_while_others_are_made_of_them(tmp_path: Path) -> None:
    """What was written meanwhile would be lost when they are replaced."""
    shards = paths(tmp_path)
    filled(tmp_path / "one.db")
    split(tmp_path / "one.db", shards)
    with joined(shards), Store.open(shards, timeout=0.1) as store, pytest.raises(Refused, match=r"0\.1 s"):
        store.append([sample("p1")])


def test_imports_into_several_are_those_into_one(tmp_path: Path) -> None:
    """Two files, the second one added to stores that have the first, and again."""
    logs = []
    for name, numbers in (("log", range(60)), ("more", range(60, 90))):
        lines = (f'{{"prompt": "q{i // 4}", "response": "r{i}", "reward": {i % 3}}}\n' for i in numbers)
        logs.append(tmp_path / f"{name}.jsonl")
        logs[-1].write_text("".join(lines))
    for log in [*logs, logs[1]]:
        with Store.open(tmp_path / "one.db") as store:
            expected = import_files(store, [log]).to_json()
        with joined(paths(tmp_path)) as path, Store.open(path) as store:
            got = import_files(store, [log]).to_json()
        assert got == expected
    with Store.open(tmp_path / "one.db") as one, Store.open(paths(tmp_path)) as several:
        assert [(s.id, s) for s in several.samples()] == [(s.id, s) for s in one.samples()]
        assert several.imports.provenance() == one.imports.provenance()
        assert several.draw(RULE, At("r", 1, 3, 0)) == one.draw(RULE, At("r", 1, 3, 0))
        with (
            pytest.raises(Refused, match="store 1 of 3: expected all of them"),
            Store.open(tmp_path / "0.db", read_only=True) as alone,
        ):
            alone.require_all()


def test_what_fails_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BUSY_TIMEOUT", 0.0)
    filled(tmp_path / "one.db")
    split(tmp_path / "one.db", paths(tmp_path))
    with Store.open(paths(tmp_path), read_only=True) as store:
        before = store.ledger.fingerprint()
    with pytest.raises(ZeroDivisionError), joined(paths(tmp_path)):
        raise ZeroDivisionError
    with (
        Store.open(tmp_path / "1.db"),
        pytest.raises(Refused, match="another process has the store open"),
        joined(paths(tmp_path)),
    ):
        raise AssertionError
    with Store.open(paths(tmp_path), read_only=True) as store:
        assert store.ledger.fingerprint() == before
    for action, message in (
        (lambda: split(tmp_path / "one.db", paths(tmp_path)), "0.db: is there already"),
        (lambda: merge(paths(tmp_path, 2), tmp_path / "x.db"), "expected store 1 of 2, got store 1 of 3"),
        (lambda: merge(Shards(("http://a:1",)), tmp_path / "x.db"), "expected a file, got the URL"),
        (lambda: merge(paths(tmp_path / "none"), tmp_path / "x.db"), "no such store"),
    ):
        with pytest.raises(Refused, match=message):
            action()
    assert not (tmp_path / "x.db").exists()
    with Store.open(tmp_path / "two.db") as store:
        ids = store.append([sample(f"p{i}") for i in range(9)])
        store.add_pairs([Pair(i, j) for i in ids for j in ids if i != j])
    (tmp_path / "new").mkdir()
    with pytest.raises(Refused, match="expected responses to one prompt"):
        split(tmp_path / "two.db", paths(tmp_path / "new"))
    assert list((tmp_path / "new").iterdir()) == []


def killed_at(number: int, work: Callable[[], None]) -> bool:
    """Whether a process that does this was killed before its n-th change of a name in a folder."""

    def child() -> None:
        left = number

        def counted(plain: Callable[..., object]) -> Callable[..., object]:
            def change(*args: object, **kwargs: object) -> object:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return plain(*args, **kwargs)

            return change

        Path.replace = counted(Path.replace)  # type: ignore[method-assign, assignment]
        Path.unlink = counted(Path.unlink)  # type: ignore[method-assign, assignment]
        work()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def samples_in(shards: Shards) -> int:
    """In all of them together, each of which has no damage; a missing one has none."""
    count = 0
    for path in map(Path, shards.locations):
        with Store.open(path) as store:
            assert not store.tables.damage()
            count += store.counts().samples
    return count


@pytest.mark.parametrize("opened_first", [0, 1])
def test_stores_change_together_or_not_at_all_whenever_the_import_is_killed(
    tmp_path: Path, opened_first: int
) -> None:
    """An import of 40 into two stores that have 62 samples, killed before each change of a file's name."""
    filled(tmp_path / "one.db")
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f'{{"prompt": "q{i}", "response": "r", "reward": 1}}\n' for i in range(40)))
    found, number, is_killed = [], 0, True
    while is_killed:
        shards = paths(tmp_path / str(number), 2)
        (tmp_path / str(number)).mkdir()
        split(tmp_path / "one.db", shards)

        def work(shards: Shards = shards) -> None:
            with joined(shards) as path, Store.open(path) as store:
                import_files(store, [log])

        is_killed = killed_at(number, work)
        with Store.open(shards.locations[opened_first]):
            found.append(samples_in(shards))
        work()  # once more: nothing is added twice, and nothing is left beside the stores
        assert samples_in(shards) == 102
        assert sorted(os.listdir(tmp_path / str(number))) == ["0.db", "1.db"]
        shutil.rmtree(tmp_path / str(number))
        number += 1
    assert found == sorted(found)
    assert set(found) == {62, 102}


def test_a_split_makes_all_stores_or_none_whenever_it_is_killed(tmp_path: Path) -> None:
    filled(tmp_path / "one.db")
    found, is_killed = [], True
    while is_killed:
        shards = paths(tmp_path / str(len(found)))
        (tmp_path / str(len(found))).mkdir()

        def work(shards: Shards = shards) -> None:
            split(tmp_path / "one.db", shards)

        is_killed = killed_at(len(found), work)
        found.append(samples_in(shards))
    assert found == sorted(found)
    assert set(found) == {0, 62}


def test_notes_of_a_replacement_that_never_counted_are_not_followed(tmp_path: Path) -> None:
    """Those of another one, and where the store whose note decides isn't here."""
    filled(tmp_path / "one.db")
    split(tmp_path / "one.db", paths(tmp_path))
    stale = tmp_path / "1.db.replacing"
    new = [tmp_path / f".{name}.gone.unfinished" / name for name in ("0.db", "1.db")]
    new[1].parent.mkdir()
    (tmp_path / "one.db").rename(new[1])
    names = [[str(tmp_path / file.name), str(file)] for file in new]
    stale.write_text(json.dumps(names))
    (tmp_path / "0.db.replacing").write_text("[]")
    with Store.open(tmp_path / "1.db") as store:
        store.draws.candidates(RULE, "r", 9)
    assert new[1].exists()
    names[0] = ["/none/0.db", "/none/.0.db.gone.unfinished/0.db"]
    stale.write_text(json.dumps(names))
    with pytest.raises(Refused, match="isn't here"):
        Store.open(tmp_path / "1.db")


def test_a_note_that_somebody_else_wrote_moves_no_file(tmp_path: Path) -> None:
    store, other = tmp_path / "0.db", tmp_path / "letters.txt"
    filled(store)
    other.write_text("mine")
    for names in ([[str(store), str(other)]], [[str(other), str(other)]]):
        store.with_name("0.db.replacing").write_text(json.dumps(names))
        with pytest.raises(Refused, match="expected a note of agro"):
            Store.open(store)
    assert other.read_text() == "mine"
