"""Near-copies of a prompt are held out together, whatever is added to the store later."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from agro.config import DataConfig
from agro.errors import Refused
from agro.store import At, DrawRule, Store, is_held_out
from agro.store.split import FILE, clusters_in, read_clusters, write_clusters
from agro.types import Sample

COPIES, QUESTIONS = 12, 30
rng = random.Random(0)
TEXTS = [" ".join("".join(rng.choices("abcdefgh", k=6)) for _ in range(12)) for _ in range(QUESTIONS)]


def copy(question: int, number: int) -> str:
    return f"[v{number}] {TEXTS[question]}{'!' * number}"


def fill(store: Store) -> None:
    store.append(
        Sample(copy(q, n), f"{i}", reward=float(i), prompt_id=f"{q}-{n}")
        for n in range(COPIES)
        for q in range(QUESTIONS)
        for i in range(2)
    )


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_all_copies_of_a_question_are_on_one_side(store: Store, share: float) -> None:
    fill(store)
    data = DataConfig(replay=1.0, hold_out=share)
    held_out = store.split.held_out(data)
    sides = {q: {held_out(f"{q}-{n}") for n in range(COPIES)} for q in range(QUESTIONS)}
    assert all(len(side) == 1 for side in sides.values())
    expected = [q for q in range(QUESTIONS) if is_held_out(f"{q}-0", share)]  # the smallest id of each
    assert [q for q in range(QUESTIONS) if sides[q] == {True}] == expected
    for candidate in store.draws.candidates(DrawRule(1, data), "run", 0):
        assert sides[int(candidate.prompt_id.split("-")[0])] == {False}
    picked = store.draws.pick(DrawRule(200, data, fewer=True), At("run", 1, 0, 0))
    assert {int(p.split("-")[0]) for p in picked} == set(range(QUESTIONS)) - set(expected)


def test_with_a_bound_of_1_each_prompt_decides_for_itself(store: Store) -> None:
    fill(store)
    held_out = store.split.held_out(DataConfig(hold_out=0.5, near_copies=1.0))
    # A number of exclamation marks tells the copies apart.
    for key in (f"{q}-{n}" for q in range(QUESTIONS) for n in range(COPIES)):
        assert held_out(key) == is_held_out(key, 0.5)


def test_a_store_that_grows_keeps_its_sides(store: Store) -> None:
    def held_out() -> set[str]:
        is_out = store.split.held_out(DataConfig(hold_out=0.5))
        return {g.prompt_id for g in store.groups() if is_out(g.prompt_id)}

    fill(store)
    before = held_out()
    store.append([Sample(copy(q, 99), "", prompt_id=f"!{q}") for q in range(QUESTIONS)])  # smaller ids
    assert before == {key for key in held_out() if not key.startswith("!")}


def test_clusters_are_kept_and_read(tmp_path: Path) -> None:
    assert read_clusters(tmp_path) is None
    prompts = [("b", "What is it?"), ("a", "[x] what is  it?"), ("c", "Who was that?")]
    clusters = clusters_in(prompts, 0.7)
    assert clusters == clusters_in(prompts[::-1], 0.7) == {"a": "a", "b": "a"}
    write_clusters(tmp_path, clusters)
    assert read_clusters(tmp_path) == clusters
    for broken in ("[]", "{", '{"a": 1}'):
        (tmp_path / FILE).write_text(broken)
        with pytest.raises(Refused, match="near_copies"):
            read_clusters(tmp_path)


def test_every_process_draws_by_the_clusters_that_a_run_keeps(path: Any) -> None:
    """They are those of the run, whatever near-copies the store has."""
    rule = DrawRule(1, DataConfig(replay=1.0, hold_out=0.5))
    clusters = {f"{q}-{n}": "0-0" for n in range(COPIES) for q in range(QUESTIONS)}
    with Store.open(path) as store:
        fill(store)
        store.split.keep("run", clusters)
    with Store.open(path) as store:
        drawn = len(store.draws.candidates(rule, "run", 0))
        assert drawn == (0 if is_held_out("0-0", 0.5) else COPIES * QUESTIONS)
        others = len(store.draws.candidates(rule, "another run", 0))
        assert 0 < others < COPIES * QUESTIONS
