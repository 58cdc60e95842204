"""Several files from one store, and one from several: nothing is lost, and draws and ids stay the same."""

from __future__ import annotations

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
