"""Pairs of actions from a search tree."""

from __future__ import annotations

import pytest

from agro.errors import Refused
from agro.store import Pair
from agro_papers.tree import Attempt, step_pairs


def test_pairs_are_those_with_a_gap_above_theta_the_widest_first() -> None:
    """Values at α = ½: 0.9, 0.5, 0.2 (by the critic alone), so that the gaps are 0.4, 0.3 and 0.7."""
    tried = [Attempt(1, 0.4, 0.6), Attempt(2, 1.0, 0.8), Attempt(3, None, 0.2)]
    assert step_pairs(tried, theta=0.35) == [Pair(2, 3), Pair(2, 1)]
    assert step_pairs(tried, theta=0.0) == [Pair(2, 3), Pair(2, 1), Pair(1, 3)]
    assert step_pairs(tried, theta=0.0, most=1) == [Pair(2, 3)]
    assert step_pairs(tried, theta=0.7 + 1e-9) == []


def test_alpha_is_the_share_of_the_search() -> None:
    tried = [Attempt(1, 1.0, 0.0), Attempt(2, 0.0, 0.4)]
    assert step_pairs(tried, theta=0.5, alpha=1.0) == [Pair(1, 2)]
    assert step_pairs(tried, theta=0.3, alpha=0.0) == [Pair(2, 1)]
    assert step_pairs([Attempt(1, 0.5), Attempt(2, 0.5)], theta=0.0) == []


def test_what_nobody_valued_is_refused() -> None:
    with pytest.raises(Refused, match="sample 7: expected a value by the search or by a critic"):
        step_pairs([Attempt(7, None), Attempt(8, 1.0)], theta=0.1)
    with pytest.raises(Refused, match="alpha from 0 to 1"):
        step_pairs([], theta=0.1, alpha=1.5)
