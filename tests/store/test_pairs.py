"""Draws of judged pairs: whole ones, of eligible responses, the same again for the same seed and step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from making import draw as draw_by
from making import group, sample, texts

from agro.config import DataConfig
from agro.errors import Refused
from agro.store import At, DrawRule, Pair, Store
from agro.store.draw_rules import pick_pairs
from agro.types import Sample

RULE = DrawRule(1, pairs=True, min_group=2, scored_only=False)


def add(store: Store, name: str, pairs: list[tuple[int, int]], size: int = 6, **fields: Any) -> list[int]:
    """A group of responses without rewards, and judgments of them by their places."""
    ids = store.append(group(name, [None] * size, **fields))
    store.add_pairs(Pair(ids[a], ids[b]) for a, b in pairs)
    return ids


def draw(
    store: Store, step: int | None = None, groups: int = 1, scored_only: bool = False, **data: Any
) -> list[Sample]:
    rule = DrawRule(groups, DataConfig(**data), pairs=True, min_group=2, scored_only=scored_only)
    return draw_by(store, rule, step)


def said(samples: list[Sample]) -> str:
    return "".join(s.response[-1] for s in samples)


def test_whole_pairs_up_to_the_size() -> None:
    """Two of the three pairs have room in 5, or in 4.

    Each is dropped a third of the time, 1000 ± 26 of 3000.
    """
    pairs = [(0, 1), (2, 3), (4, 5)]
    for size in (4, 5):
        rule = DrawRule(1, DataConfig(group_size=size), pairs=True, min_group=2)
        picks = [pick_pairs(pairs, rule, At("r", s, 0, 0), "p") for s in range(3000)]
        assert all(len(p) == 4 and p == sorted(p) for p in picks)
        counts = Counter(map(tuple, picks))
        assert counts.keys() == {(0, 1, 2, 3), (0, 1, 4, 5), (2, 3, 4, 5)}
        assert max(abs(n - 1000) for n in counts.values()) < 4 * 26
    assert pick_pairs(pairs, RULE, At("r", 0, 0, 0), "p") == [0, 1, 2, 3, 4, 5]


def test_a_pair_that_fits_is_taken_behind_one_that_does_not() -> None:
    """All share response 0: 3 responses contain two of the pairs (0, i), and then (1, 2) too."""
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2)]
    rule = DrawRule(1, DataConfig(group_size=3), pairs=True, min_group=2)
    assert {len(pick_pairs(pairs, rule, At("r", s, 0, 0), "p")) for s in range(50)} == {3}


def test_only_responses_that_were_compared_are_drawn(store: Store) -> None:
    add(store, "p", [(0, 1), (3, 1)])
    add(store, "without", [])
    for step in range(1, 4):
        assert said(draw(store, step)) == "013"
    wanted = r"expected 2 groups with a pair of eligible responses to draw from, got 1\. .*, add pairs, "
    with pytest.raises(Refused, match=wanted):
        draw(store, groups=2)


def test_both_responses_of_a_pair_are_eligible(store: Store) -> None:
    a, b, c, d = store.append([*group("p", [1.0, None, 0.0]), sample("p", "response 3", 1.0, role="expert")])
    other = store.append(group("q", [1.0]))[0]
    store.add_pairs([Pair(a, b), Pair(a, c), Pair(d, c), Pair(a, other)])
    assert said(draw(store)) == "0123"
    assert said(draw(store, scored_only=True)) == "023"
    assert said(draw(store, roles=("log",))) == "012"
    with pytest.raises(Refused, match="got 0"):
        draw(store, roles=("expert",))


def test_a_row_of_an_episode_stands_for_all_of_it(store: Store) -> None:
    """The pair within episode d joins nothing."""
    rows = [sample("p", f"{e}{i}", None, episode=e) for e in "abcd" for i in range(2)]
    rows[5] = rows[5].replace(role="expert")
    a, _, _, last, c, _, d, other = store.append(rows)
    store.add_pairs([Pair(a, last), Pair(a, c), Pair(d, other)])
    assert texts(draw(store, roles=("log",))) == ["a0", "a1", "b0", "b1"]
    assert texts(draw(store)) == ["a0", "a1", "b0", "b1", "c0", "c1"]


def test_a_group_whose_pairs_cannot_be_drawn_is_no_candidate(store: Store) -> None:
    """One of two prompts, one within an episode, one with an episode of which a row isn't eligible."""
    first, second = (store.append(group(name, [None]))[0] for name in ("p", "q"))
    within = store.append(sample("r", f"{i}", None, episode="e") for i in range(2))
    broken = store.append(
        [sample("s", "a", None, episode="e"), sample("s", "b", None, episode="e", role="expert")]
    )
    plain = store.append([sample("s", "c", None)])[0]
    store.add_pairs([Pair(first, second), Pair(*within), Pair(plain, broken[0])])
    with pytest.raises(Refused, match="got 0"):
        draw(store, roles=("log",))
    assert texts(draw(store)) == ["a", "b", "c"]


def test_what_a_resumed_run_left_behind_takes_its_pairs_along(store: Store) -> None:
    a, b, c = store.append(group("p", [None] * 3), run="r", step=1)
    kept = store.append(group("p", [None]))[0]
    store.add_pairs([Pair(a, b), Pair(c, kept)])
    store.ledger.rewind("r")
    with pytest.raises(Refused, match="got 0"):
        draw(store)


def test_a_draw_is_noted_and_can_be_repeated(tmp_path: Path) -> None:
    drawn = []
    for name in ("a.db", "b.db"):
        with Store.open(tmp_path / name) as store:
            for i in range(4):
                add(store, f"p{i}", [(0, 1), (2, 3), (4, 5), (1, 5)])
            drawn.append([draw(store, step, groups=2, group_size=4) for step in range(1, 6)])
            assert [d.sample for d in store.draws.drawn("r")] == [s.id for step in drawn[-1] for s in step]
    assert drawn[0] == drawn[1]
    assert len({said(samples) for samples in drawn[0]}) > 1


def test_the_pairs_among_some_samples(store: Store) -> None:
    a, b, c, *_ = add(store, "p", [(0, 1), (2, 0), (0, 1)])
    assert list(store.pairs([a, b])) == [Pair(a, b), Pair(a, b)]
    assert list(store.pairs([b, c])) == []
    store.tables.run("UPDATE pairs SET winner = ?, loser = ? WHERE rowid = 1", [b, a])
    assert list(store.pairs([a, c])) == [Pair(c, a)]
    with pytest.raises(Refused, match="1 pair not as written: pair 1"):
        list(store.pairs([a, b]))


def test_ties_are_drawn_only_where_votes_are_read(store: Store) -> None:
    """Unknown votes are as judged."""
    ids = store.append(group("p", [None] * 6))
    judged = [Pair(ids[0], ids[1], 2, 2), Pair(ids[2], ids[3], 3, 1), Pair(ids[4], ids[5])]
    store.add_pairs(judged)
    tied = store.append(group("tied", [None] * 2))
    store.add_pairs([Pair(tied[0], tied[1], 0, 0)])
    assert (store.counts().pairs, store.counts().ties) == (2, 2)
    drawn = store.draw(DrawRule(1, pairs=True, scored_only=False), At("r", 1, seed=0, version=0))
    assert (said(drawn.samples), drawn.pairs) == ("2345", judged[1:])
    with pytest.raises(Refused, match="expected 2 groups with a pair"):
        draw(store, 2, groups=2)
    drawn = store.draw(DrawRule(2, pairs=True, ties=True, scored_only=False), At("r", 3, seed=0, version=0))
    assert sorted(said(drawn.samples)) == list("00112345")
    assert len(drawn.pairs) == 4
