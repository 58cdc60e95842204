"""Forgetting: what is deleted, that no byte of it is left, and what runs have of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import sample, write_lines

from agro.errors import Refused
from agro.logs.importing import import_files
from agro.store import At, DrawRule, Origin, Pair, Store, recover
from agro.store.sample_rows import ledger_of

SECRET = "xylophone-of-alice"


def found(folder: Path, text: str = SECRET) -> list[str]:
    """The files of a folder that have the text."""
    return [p.name for p in folder.iterdir() if p.name != "log.jsonl" and text.encode() in p.read_bytes()]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Two groups of 4: two responses each of alice, long enough for pages of their own, and of bob."""
    with Store.open(tmp_path / "s.db", timeout=0.2) as store:
        import_files(store, [write_lines(tmp_path / "log.jsonl", *map(record, range(8)))])
        yield store


def record(i: int) -> dict[str, Any]:
    is_alice = i % 2 == 1
    text = f"{SECRET} " * 400 if is_alice else "answer "
    meta = {"user": "alice" if is_alice else "bob", "deep": {"paid": is_alice}}
    return {"prompt": f"Q{i // 4}", "response": f"{text}{i}", "reward": i % 3, "meta": meta}


def test_nothing_is_left_in_the_file_and_the_log(tmp_path: Path, store: Store) -> None:
    assert {"s.db-wal"} <= set(found(tmp_path))
    ids = store.experience.find(meta=("user", "alice"))
    assert ids == [2, 4, 6, 8]
    store.add_pairs([Pair(1, 2), Pair(3, 1)])
    zeros = np.zeros(3, np.float32)
    store.ledger.keep_reference_logp("r", 1, "k", {2: zeros, 3: zeros})
    store.imports.forget(ids)
    assert found(tmp_path) == []
    assert [s.id for s in store.samples(redone=True)] == [1, 3, 5, 7]
    assert list(store.pairs()) == [Pair(3, 1)]
    assert list(store.ledger.reference_logp("r", "k", [2, 3], until=9)) == [3]
    assert (store.counts().samples, [g.size for g in store.groups()]) == (4, [2, 2])
    assert not store.tables.damage()
    store.append([sample()])  # the store is as before: others may write, with a log
    assert (tmp_path / "s.db-wal").exists()
    assert next(iter(store.samples(ids=[9]))).id == 9
    store.close()
    assert recover(tmp_path / "s.db", tmp_path / "new.db").taken["samples"] == 9


@pytest.mark.parametrize(
    ("what", "ids"),
    [
        ({"source": "file:log.jsonl"}, list(range(1, 9))),
        ({"meta": ("user", "bob")}, [1, 3, 5, 7]),
        ({"meta": ("deep.paid", "true")}, [2, 4, 6, 8]),
        ({"meta": ("deep", "true")}, []),
        ({"source": "file"}, []),
    ],
)
def test_what_is_found(store: Store, what: dict[str, Any], ids: list[int]) -> None:
    assert store.experience.find(**what) == ids


def test_damaged_meta_matches_nothing(store: Store) -> None:
    store.tables.run("UPDATE samples SET meta = '[\"bob\"]' WHERE id = 3")
    assert store.experience.find(meta=("user", "bob")) == [1, 5, 7]


def test_a_group_or_an_episode_is_found_as_a_whole(store: Store) -> None:
    [of_second] = store.samples(ids=[5])
    assert store.experience.find(prompt_id=of_second.prompt_id) == [5, 6, 7, 8]
    pieces = [sample(episode="e", meta={"turn": i}) for i in range(3)]
    store.append([*pieces, sample(episode="f", meta={"turn": 9}), sample("2+2=", episode="e")])
    assert store.experience.find(meta=("turn", "1")) == [9, 10, 11]


def test_a_forgotten_record_is_not_imported_again(tmp_path: Path, store: Store) -> None:
    log = tmp_path / "log.jsonl"
    store.imports.forget(store.experience.find(meta=("user", "alice")))
    report = import_files(store, [log])
    assert (report.samples, report.duplicates, report.forgotten) == (0, 4, 4)
    assert "not taken again: 4 samples that were deleted by agro forget" in str(report)
    with pytest.raises(Refused, match=r"4 of its samples were deleted by agro forget"):
        import_files(store, [log], mapping={"response": "prompt"}, replace=True)
    store.imports.forget(store.experience.find(source="file:log.jsonl"))
    assert found(tmp_path, "log.jsonl") == []
    with pytest.raises(Refused, match="all of its samples were deleted by agro forget"):
        import_files(store, [log])


def test_runs_keep_their_draws_and_their_samples_numbers(store: Store) -> None:
    """A run has committed step 2, with ids up to 8; the draw of step 1 is of what is forgotten later."""
    store.draws.record("run", 1, [2, 4])
    store.draws.record("run", 2, [1, 3])
    store.draws.record("other", 5, [2, 8])
    store.ledger.commit("run", 2, "digest")
    ids = store.experience.find(meta=("user", "alice"))
    assert [tuple(t) for t in store.draws.trained(ids)] == [("other", 2, 5, 5), ("run", 2, 1, 1)]
    store.imports.forget(ids)
    store.tables.check()
    drawn = [(d.step, d.sample, d.reward, d.source) for d in store.draws.drawn("run")]
    assert drawn[:2] == [(1, 2, None, "(forgotten)"), (1, 4, None, "(forgotten)")]
    assert [(step, i) for step, i, _, _ in drawn[2:]] == [(2, 1), (2, 3)]
    [new] = store.append([sample("Q0", "redo")], run="run", step=3)
    assert new == 9  # not 8, which the commit has: going back has to find it
    store.ledger.rewind("run")
    assert [s.id for s in store.samples()] == [1, 3, 5, 7]
    rule = DrawRule(groups=2, min_group=2)
    assert sorted(s.id for s in store.draw(rule, At("run", 3, 0, 0)).samples) == [1, 3, 5, 7]


def test_a_store_that_others_have_open_is_refused(store: Store) -> None:
    with Store.open(store.path) as other:
        other.counts()
        with pytest.raises(Refused, match="another process has the store open"):
            store.imports.forget([1])
    assert store.counts().samples == 8
    store.imports.forget([1])
    assert store.counts().samples == 7


def test_what_collectors_made_for_a_later_step_is_sampled_again(tmp_path: Path, store: Store) -> None:
    """Requests 0 and 1 are done; a commit has the step that trained on 0."""
    store.requests.claim("run", "c", maximum=3, ahead=3)
    for number in range(3):
        made = sample(f"R{number}", SECRET, meta={"user": "alice"})
        store.append([made], run="run", origins=[Origin(ledger_of("run"), number, "0")])
    store.requests.finish("run", [0, 1, 2])
    store.requests.take("run", 1, [0])
    store.ledger.commit("run", 1, "digest")
    store.requests.take("run", 2, [1])
    store.imports.forget(store.experience.find(meta=("user", "alice")))
    assert store.requests.ready("run", 9) == []
    assert store.experience.find_in_ledger(ledger_of("run"), [0, 1, 2]) == []
    assert store.requests.claim("run", "c", maximum=9, ahead=0, dead=["forgotten"]) == [1, 2]
    assert found(tmp_path) == []


def test_numbers_of_a_seed_are_not_used_twice(tmp_path: Path, store: Store) -> None:
    """And nothing else of the sampling is kept."""
    made = sample(sampling={"seed": 3, "x": "a setting"}, meta={"index": 7, "x": "a setting"})
    [new] = store.append([made])
    store.imports.forget([new])
    assert (store.experience.next_number(3), found(tmp_path, "a setting")) == (8, [])
