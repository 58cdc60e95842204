"""Prompts of an evaluation that were trained on, and near-copies of these."""

from __future__ import annotations

from agro.pages.store.check_survey import Contamination
from agro.types import Prompt

TRAINED = (
    "How many apples has Anna if she buys twelve and eats three of them on Monday?",
    [{"role": "user", "content": "Name the capital of Peru."}],
)


def test_copies_and_near_copies_are_told_apart() -> None:
    prompts = [
        Prompt("Q7: how many apples has Anna if she buys  twelve and eats three of them on monday?", "a"),
        Prompt("How many apples has Anna if she buys twelve and eats three of them on Friday?", "b"),
        Prompt([{"role": "user", "content": "Name the capital of Peru."}], "c"),
        Prompt("Who wrote Faust?", "d"),
    ]
    found = Contamination.of(prompts, TRAINED, 0.7)
    assert (found.exact, found.near, found.trained) == (("a", "c"), ("b",), 2)
    assert found.sentence == (
        "of 4 prompts 2 were trained on (a, c), 1 are near-copies of training prompts (b); the run has 2 "
        "training prompts"
    )


def test_copies_among_themselves_are_no_contamination() -> None:
    found = Contamination.of(
        [Prompt("Who wrote Faust?", "a"), Prompt("Who wrote Faust??", "b")], TRAINED, 0.7
    )
    assert (found.exact, found.near) == ((), ())
