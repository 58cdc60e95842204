"""What a step trains on: drawn groups, then what was made for it; waiting for others; changed records."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from making import group, sample, texts

from agro.config import DataConfig
from agro.errors import Refused
from agro.store import At, Draw, DrawRule, Selection, Store, drawing
from agro.store.drawing import DamagedSample, Draws
from agro.types import Sample

AT = At("r", 2, seed=0, version=1)


def numbered(name: str, *numbers: int, **fields: object) -> list[Sample]:
    """Responses of a prompt by their numbers, in the order in which they finished."""
    return [sample(name, str(i), meta={"index": i}, role="policy", version=1, **fields) for i in numbers]


@pytest.mark.parametrize("finished", [(0, 1, 2, 10), (10, 2, 0, 1), (2, 10, 1, 0)])
def test_what_was_made_follows_the_picked_groups_by_number(store: Store, finished: tuple[int, ...]) -> None:
    """10 comes after 2: numbers, not texts. Neither the ids nor the order of `made` matters."""
    store.append(group("old", [0.0, 1.0]))
    ids = store.append(numbered("a", *finished), run="r", step=2)
    drawn = store.draw(DrawRule(1, DataConfig(roles=("log",))), AT, made=ids[::-1])
    assert texts(drawn.samples) == ["response 0", "response 1", "0", "1", "2", "10"]
    assert not drawn.damaged
    assert [d.sample for d in store.draws.drawn("r")] == [s.id for s in drawn.samples]
    # "old" is no run's: its version is unknown.
    assert [s.version for s in drawn.samples] == [-1, -1, 1, 1, 1, 1]


def test_only_what_was_made_is_drawn_without_a_rule(store: Store) -> None:
    """By its numbers; rows of an episode stay in their order."""
    store.append(group("old", [0.0, 1.0]))
    rows = [
        sample("c", f"{i} {k}", episode=f"e{i}", meta={"index": i}, role="policy", version=1)
        for i in (5, 4)
        for k in range(3)
    ]
    made = [*numbered("a", 1, 0), *numbered("b", 3, 2, reward=None), *rows]
    ids = store.append(made, run="r", step=2)
    expected = ["0", "1", "2", "3", "4 0", "4 1", "4 2", "5 0", "5 1", "5 2"]
    assert texts(store.draw(None, AT, made=ids).samples) == expected
    assert store.draw(None, AT._replace(step=3)).samples == []


def test_a_picked_group_gives_its_older_samples_once(store: Store) -> None:
    """Prompts are picked and sampled in the same step: what was made for them stands at the end alone."""
    rule = DrawRule(2, DataConfig(group_size=2))
    store.append([*numbered("a", 0, 1), *numbered("b", 2, 3)], run="r", step=1)
    picked = store.draws.pick(rule, AT)
    ids = store.append([*numbered("a", 5, 4), *numbered("b", 7, 6)], run="r", step=2)
    drawn = store.draws.draw_picked([Selection(rule, picked)], AT, ids)
    older = {sample("a").prompt_id: ["0", "1"], sample("b").prompt_id: ["2", "3"]}
    assert texts(drawn.samples) == [*older[picked[0]], *older[picked[1]], "4", "5", "6", "7"]
    # A later step draws the groups with all four.
    later = store.draw(DrawRule(2), At("r", 3, seed=0, version=1))
    assert sorted(texts(later.samples)) == list("01234567")


def test_an_episode_of_which_a_row_was_made_now_is_not_drawn_from_its_group(store: Store) -> None:
    store.append([sample("a", "older")])
    rows = [sample("a", f"row {k}", episode="e", meta={"index": 0}) for k in range(2)]
    ids = store.append(rows, run="r", step=2)
    drawn = store.draws.draw_picked([Selection(DrawRule(1), [sample("a").prompt_id])], AT, ids)
    assert texts(drawn.samples) == ["older", "row 0", "row 1"]


def test_the_order_of_a_group_is_that_of_the_numbers_whatever_the_ids(tmp_path: Path) -> None:
    """Two stores with the same responses, which finished in another order: the same ones are drawn."""
    drawn = []
    for name, orders in (("a", [(0, 1, 2, 3), (0, 1, 2, 3)]), ("b", [(3, 0, 2, 1), (2, 1, 3, 0)])):
        with Store.open(tmp_path / f"{name}.db") as store:
            for step, order in enumerate(orders, 1):
                rows = [s.replace(response=f"{step}/{s.response}") for s in numbered("p", *order)]
                store.append(rows, run="r", step=step)
            at = [At("r", step, seed=0, version=1) for step in range(3, 9)]
            drawn.append([texts(store.draw(DrawRule(1, DataConfig(group_size=3)), a).samples) for a in at])
    assert drawn[0] == drawn[1]
    assert len({tuple(r) for r in drawn[0]}) > 2


def test_fewer_takes_what_there_is(store: Store) -> None:
    rule = DrawRule(3, min_group=2, fewer=True, wait=60.0)
    began = time.monotonic()
    assert store.draws.pick(rule, AT) == []
    assert store.draw(rule, AT).samples == []
    store.append([*group("p", [0.0, 1.0]), *group("q", [0.0, 1.0]), *group("alone", [1.0])])
    assert len(store.draw(rule, AT).samples) == 4
    assert time.monotonic() - began < 40  # it doesn't wait for more


def test_a_draw_waits_for_what_another_thread_appends(store: Store, path: Path, monkeypatch) -> None:
    monkeypatch.setattr(drawing, "POLL_SECONDS", 0.01)
    store.append(group("first", [0.0, 1.0]))
    looked = threading.Event()
    plain = Draws._ordered

    def watched(*args):
        found = plain(*args)
        looked.set()
        return found

    def append() -> None:
        looked.wait(30)
        with Store.open(path) as other:
            ids = other.append(group("second", [None, None]), run="other")
            other.set_rewards((i, 1.0, {}) for i in ids)

    monkeypatch.setattr(Draws, "_ordered", watched)
    thread = threading.Thread(target=append)
    thread.start()
    drawn = store.draw(DrawRule(2, min_group=2, wait=30.0), AT)
    thread.join()
    assert sorted({str(s.prompt) for s in drawn.samples}) == ["first", "second"]
    assert len(drawn.samples) == 4


def test_waiting_ends_with_the_time_and_what_the_store_has(store: Store, monkeypatch) -> None:
    monkeypatch.setattr(drawing, "POLL_SECONDS", 0.01)
    store.append([*group("p", [0.0, 1.0]), *group("q", [1.0, None])])
    began = time.monotonic()
    with pytest.raises(Refused, match=r"0\.15 s.*expected 2 groups.*got 1.*4 samples in 2 groups") as refused:
        store.draw(DrawRule(2, min_group=2, wait=0.15), AT)
    assert 0.15 <= time.monotonic() - began < 10
    assert "1 of them not scored" in str(refused.value)
    assert store.draws.drawn("r") == []
    with pytest.raises(Refused, match=r"expected 2 groups.*got 1.*4 samples in 2 groups") as at_once:
        store.draw(DrawRule(2, min_group=2), AT)
    assert "waited" not in str(at_once.value)


def test_a_damaged_sample_is_reported_with_its_group_and_episode(store: Store) -> None:
    """One of a drawn group, one of an episode that was made for the step: both are missing. A repeated draw
    reports the same."""
    old = store.append(group("old", [0.0, 1.0, 0.5]))
    rows = [sample("a", f"row {k}", episode="e", meta={"index": 0}) for k in range(2)]
    made = store.append(rows, run="r", step=2)
    store.tables.run("UPDATE samples SET response = 'other' WHERE id IN (?, ?)", [old[1], made[1]])
    rule = DrawRule(1, DataConfig(roles=("log",)))
    drawn = store.draws.draw_picked([Selection(rule, [sample("old").prompt_id])], AT, made)
    assert texts(drawn.samples) == ["response 0", "response 2", "row 0"]
    assert drawn.damaged == [
        DamagedSample(old[1], sample("old").prompt_id, None),
        DamagedSample(made[1], sample("a").prompt_id, "e"),
    ]
    assert store.draws.draw_picked([Selection(rule, [sample("old").prompt_id])], AT, made) == drawn


def test_draws_say_whose_a_sample_is_how_old_and_how_long(store: Store) -> None:
    tokens, action = np.arange(11), np.array([False] * 2 + [True] * 9)
    [log] = store.append([Sample("p", "logged", reward=0.5, source="file:\ud800", role="log")])
    [mine] = store.append(
        [Sample("p", "sampled", role="policy", tokens=tokens, action=action, version=6)], run="me", step=3
    )
    [other] = store.append(
        [Sample("p", "of another", reward=-1.0, role="policy", source="x")], run="you", step=1
    )
    store.draws.record("me", 3, [mine])
    store.draws.record("me", 5, [log, mine, other, log])
    store.draws.record("you", 1, [log])
    found = store.draws.drawn("me", {3: 6, 5: 10})
    assert store.draws.drawn("nobody", {1: 1}) == []
    assert [d.staleness for d in store.draws.drawn("me", {3: None})] == [None] * 5
    assert found == [
        Draw(3, mine, None, "policy", "", is_own=True, staleness=0, length=9),
        Draw(5, log, 0.5, "log", "file:\ud800", is_own=False, staleness=None, length=None),
        Draw(5, mine, None, "policy", "", is_own=True, staleness=4, length=9),
        Draw(5, other, -1.0, "policy", "x", is_own=False, staleness=None, length=None),
        Draw(5, log, 0.5, "log", "file:\ud800", is_own=False, staleness=None, length=None),
    ]
