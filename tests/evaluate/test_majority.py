"""majority@k by hand and by enumeration, and what counts as the same answer."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from agro.rollout.evaluate import Heldout, answer_of, majority_of_k
from agro.types import Sample


def test_by_hand() -> None:
    """Two right answers a, two equal wrong ones b, and a single c. Of three: {a, a, x} in 3 choices of 10 is
    right, {b, b, x} in 3 wrong, {a, b, c} in 4 a tie of three: 3/10 + 4/10 · 1/3."""
    passed, voted = [True, True, False, False, False], ["a", "a", "b", "b", "c"]
    assert majority_of_k(passed, voted, 3) == pytest.approx(0.3 + 0.4 / 3)
    assert majority_of_k(passed, voted, 1) == pytest.approx(0.4)
    assert majority_of_k(passed, voted, 5) == pytest.approx(0.5)
    assert math.isnan(majority_of_k(passed, voted, 6))


def test_what_has_no_answer_votes_for_nothing() -> None:
    assert majority_of_k([True, False, False], ["a", None, None], 3) == 1
    assert majority_of_k([False, False], [None, None], 2) == 0


def test_drawn_choices_are_near_all_of_them() -> None:
    """C(15, 8) = 6,435 choices; 1,000 are drawn, whose mean has an error of at most .016."""
    passed, voted = [True] * 6 + [False] * 9, ["a"] * 6 + list("bbbbcccdd")
    every = []
    for chosen in combinations(range(15), 8):
        counts = {x: sum(voted[i] == x for i in chosen) for x in "abcd"}
        winners = [x for x in counts if counts[x] == max(counts.values())]
        every.append(("a" in winners) / len(winners))
    assert majority_of_k(passed, voted, 8) == pytest.approx(np.mean(every), abs=0.05)


@pytest.mark.parametrize(
    ("reward", "meaning", "response", "expected"),
    [
        ("exact", None, " 4\n", "4"),
        ("math", None, r"So 2 + 2 is \boxed{4}.", "4"),
        ("regex", None, "I add. The final answer is 4", "4"),
        ("exact", 17.0, "four", 17.0),
    ],
)
def test_the_same_answer(reward: str, meaning: float | None, response: str, expected: object) -> None:
    assert answer_of(Sample("2+2?", response), meaning, reward) == expected


def test_of_an_evaluation_with_lengths_and_truncation() -> None:
    """Responses of 2, 1, 3 and 2 tokens to one prompt, three of them "4", the last one cut."""
    samples = []
    for index, (response, length) in enumerate([("4", 2), ("5", 1), ("4", 3), ("4", 2)]):
        tokens, action = np.zeros(length + 1, np.int32), np.arange(length + 1) > 0
        meta = {"index": index, "finish": "length" if index == 3 else "stop"}
        samples.append(Sample("2+2?", response, tokens=tokens, action=action, meta=meta))
    found = Heldout(np.array([[1.0, 0.0, 1.0, 1.0]]), tuple(samples), reward="exact")
    report = found.to_json(1.0)
    assert report["majority@4"]["value"] == 1
    assert (report["length"]["value"], report["truncated"]["value"]) == (2, 0.25)
    [record] = found.by_prompt()
    assert (record["lengths"], record["truncated"]) == ([2, 1, 3, 2], [False, False, False, True])
