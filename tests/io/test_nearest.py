"""The name that was meant: slips of the hand first, then likeness."""

from __future__ import annotations

import pytest

from agro.io.nearest import nearest
from agro.objectives import names


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("gpro", "grpo"),  # swapped letters; difflib says gvpo
        ("GPRO", "grpo"),
        ("rlo", "rloo"),  # one letter less
        ("dppo", "dpo"),  # one more: also ppo, and dpo comes first in FAMOUS
        ("kro", "kto"),  # another one
        ("reinforse", "reinforce"),
        ("qqqqqq", None),
    ],
)
def test_slips(typed: str, meant: str | None) -> None:
    assert nearest(typed, names()) == meant


def test_without_a_slip_the_most_alike_name_counts() -> None:
    assert nearest("learning", ["learn", "weight_decay"]) == "learn"
    assert nearest("learning", ["weight_decay"], 0.6) is None
