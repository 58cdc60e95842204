"""Rules over groups: AMPO's teachers, Guide's hints, SOPHIA's choice."""

from __future__ import annotations

import math

import pytest

from agro import Batch, objectives
from agro.errors import Refused
from agro.types import Sample
from agro_papers.groups import (
    asks_for_hint,
    comprehension,
    keeps_hinted,
    on_demand,
    propagate,
    shortest_right,
)


def test_teachers_replace_only_where_all_are_wrong() -> None:
    assert on_demand([0, 1, 0], [0.5, 0.9]) == {}
    assert on_demand([0, 0, 0], []) == {}
    found = on_demand([0] * 8, [0.2, 0.9, 0.1, 0.5], k=2, seed=3)
    assert sorted(found.values()) == [1, 3]
    assert found == on_demand([0] * 8, [0.2, 0.9, 0.1, 0.5], k=2, seed=3)
    places = {place for seed in range(40) for place in on_demand([0] * 4, [1.0], k=1, seed=seed)}
    assert places == {0, 1, 2, 3}
    assert set(on_demand([0, 0], [0.3] * 5, k=9).values()) == {0, 1}  # ties: earlier ones


def test_advantages_of_a_group_with_teachers() -> None:
    """k = 2 of n = 8 replaced: 1 - k/n = 3/4 on teachers, -1/4 on the rest. At p = γ and w = 1: -A/4, -A."""
    replaced = on_demand([0] * 8, [0.2, 0.9], k=2)
    role = ["expert" if i in replaced else "policy" for i in range(8)]
    rows = [[0.0, math.log(0.1)]] * 8
    batch = Batch.of(
        mask=[[False, True]] * 8,
        reward=[float(r == "expert") for r in role],
        group=[0] * 8,
        role=role,
        behavior_logp=[None if r == "expert" else row for r, row in zip(role, rows)],
    )
    grad = objectives.evaluate("ampo", rows, batch).grad[:, 1] * 8
    assert grad.tolist() == pytest.approx([-0.75 / 4 if r == "expert" else 0.25 for r in role], rel=1e-12)


def test_comprehension_is_the_mean_probability_of_the_answer() -> None:
    """0.9 · mean(1/2, 1/4) + 0.1 · format; never below 0 against the score without the text."""
    answer = [math.log(0.5), math.log(0.25)]
    assert comprehension(answer, format=1.0) == pytest.approx(0.9 * 0.375 + 0.1)
    assert comprehension(answer, without=0.5) == 0
    with pytest.raises(Refused, match="answer's tokens"):
        comprehension([])


def test_hints_are_for_groups_that_are_all_wrong() -> None:
    assert [asks_for_hint(r) for r in ([0, 0], [0, 1])] == [True, False]
    assert [keeps_hinted(r) for r in ([0, 0], [0, 1], [1, 1])] == [False, True, False]


def sample(number: int, prompt: str, parent: str | None, reward: float | None, length: int) -> Sample:
    meta = {} if parent is None else {"parent": parent}
    return Sample(prompt, "x" * length, reward=reward, prompt_id=prompt, meta=meta, id=number)


def test_a_parent_has_the_mean_reward_of_its_children() -> None:
    assert propagate(["a", "b", "a", "a"], [1, 0, 0, 1]) == {"a": pytest.approx(2 / 3), "b": 0}


def test_the_shortest_right_response_of_good_parents() -> None:
    """Of p the parent "a" has 2/3 and "b" 1/2; of q no child is right."""
    children = [
        sample(1, "p", "a", 1, 9),
        sample(2, "p", "a", 0, 1),
        sample(3, "p", "a", 1, 7),
        sample(4, "p", "b", 1, 3),
        sample(5, "p", "b", 0, 3),
        sample(6, "q", "a", 0, 2),
    ]
    assert [s.id for s in shortest_right(children, 0.5)] == [3]  # strictly above
    assert [s.id for s in shortest_right(children, 0.4)] == [4]
    assert shortest_right(children, 1.0) == []
    with pytest.raises(Refused, match=r"sample 7 has no meta\.parent"):
        shortest_right([sample(7, "p", None, 1, 2)], 0.5)
    with pytest.raises(Refused, match="sample 8 has no reward"):
        shortest_right([sample(8, "p", "a", None, 2)], 0.5)
