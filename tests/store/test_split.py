"""Near-copies of a prompt are clustered, by a measure that a second, slow way to compute it confirms, and are
held out together, whatever is added to the store later."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from agro.config import DataConfig
from agro.errors import Refused
from agro.store import At, DrawRule, Store, is_held_out
from agro.store.split import NEAR_COPIES, clusters, clusters_in, normalized, read_clusters, write_clusters
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
        (tmp_path / NEAR_COPIES).write_text(broken)
        with pytest.raises(Refused, match="near_copies"):
            read_clusters(tmp_path)


def test_draws_split_by_the_clusters_in_use(store: Store) -> None:
    """Whatever near-copies the store has."""
    rule = DrawRule(1, DataConfig(replay=1.0, hold_out=0.5))
    fill(store)
    at = At("run", 1, 0, 0)
    assert 0 < len(store.draws.candidates(rule, "run", 0)) == store.draws.count(rule, at) < COPIES * QUESTIONS
    store.split.use({f"{q}-{n}": "0-0" for n in range(COPIES) for q in range(QUESTIONS)})
    drawn = len(store.draws.candidates(rule, "run", 0))
    assert drawn == store.draws.count(rule, at) == (0 if is_held_out("0-0", 0.5) else COPIES * QUESTIONS)


LEAST = 0.7


def words(rng: random.Random, n: int) -> str:
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(n))


def jaccard(a: str, b: str) -> float:
    """By the definition: 5-grams of both / those of either."""
    first, second = ({text[i : i + 5] for i in range(len(text) - 4)} for text in map(normalized, (a, b)))
    return len(first & second) / len(first | second)


def test_labels_case_and_spaces_are_taken_away() -> None:
    for text in ("Q17: What is  12 + 7?", "[dev] what is 12 + 7? ", "What is 12\n+ 7? (v2)"):
        assert normalized(text) == "what is 12 + 7?"
    assert normalized("520731>") == "520731>"  # nothing would be left


def test_tagged_copies_are_one_cluster_and_other_numbers_are_another() -> None:
    """The panel's job near-copies: tags of four letters, before one of three questions."""
    rng = random.Random(0)
    ends = ["4071>", "9923>", "4072>"]
    texts = ["".join(rng.choices("uvwxyz", k=4)) + ":" + rng.choice(ends) for _ in range(85)]
    assert len(set(clusters(texts, LEAST))) == 3
    numbers = [f"{i:03d}>" for i in range(100)]
    assert len(set(clusters(numbers, LEAST))) == 100


def test_the_estimate_is_the_jaccard_index() -> None:
    """Pairs from 0 to 1 apart: those clearly above the bound are together, those clearly below are not."""
    rng = random.Random(1)
    pairs = []
    for changed in range(40):
        text = words(rng, 60)
        parts = text.split()
        for place in rng.sample(range(60), changed):
            parts[place] = words(rng, 1)
        pairs.append((text, " ".join(parts)))
    labels = clusters([text for pair in pairs for text in pair], LEAST)
    near = 0
    for number, pair in enumerate(pairs):
        index, together = jaccard(*pair), labels[2 * number] == labels[2 * number + 1]
        near += index > LEAST
        if abs(index - LEAST) > 0.12:  # two standard errors of an estimate from 64 hashes
            assert together == (index > LEAST)
    assert 5 < near < 35


def test_an_instruction_that_all_share_is_no_sign_of_a_copy() -> None:
    rng = random.Random(2)
    instruction = words(rng, 60)
    texts = [f"{instruction} {words(rng, 8)}" for _ in range(60)]
    assert jaccard(texts[0], texts[1]) > LEAST
    assert len(set(clusters(texts, LEAST))) == 60


def test_a_chain_is_one_cluster_named_by_its_first_text() -> None:
    rng = random.Random(3)
    chain = [words(rng, 80).split()]
    for step in range(10):
        chain.append([*chain[-1][: 6 * step], *words(rng, 6).split(), *chain[-1][6 * step + 6 :]])
    texts = [*(words(rng, 80) for _ in range(5)), *(" ".join(parts) for parts in chain[:10])]
    assert jaccard(texts[5], texts[-1]) < 0.3
    assert clusters(texts, LEAST).tolist() == [0, 1, 2, 3, 4] + [5] * 10


def test_the_order_of_texts_names_other_firsts_but_makes_the_same_clusters() -> None:
    rng = random.Random(4)
    texts = [words(rng, 30) for _ in range(50)]
    texts += [text.replace("a", "x", 1) for text in texts[:20]]
    order = rng.sample(range(70), 70)
    plain, shuffled = clusters(texts, LEAST), clusters([texts[i] for i in order], LEAST)
    back = np.empty(70, int)
    back[order] = shuffled
    assert ((plain[:, None] == plain) == (back[:, None] == back)).all()


def test_empty_short_and_broken_texts() -> None:
    assert clusters([], LEAST).tolist() == []
    assert clusters(["", " ", "a", "A", "\ud800", "\ud800"], LEAST).tolist() == [0, 0, 2, 2, 4, 4]
    assert clusters(["What?", "what?", "What? no"], 1.0).tolist() == [0, 0, 2]
