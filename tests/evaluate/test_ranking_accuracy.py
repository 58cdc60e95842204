"""Ranking accuracy of pairs: plain, length-normalized and idealized, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from agro.stats.off_policy import RankedPair, RankingAccuracy, pairs_by_reward


def test_by_hand() -> None:
    """log π: −4 > −6 is right; −6 < −5 is wrong, per token −2 > −5 right; equal ones count one half. The
    reference prefers the second pair's loser by 3 nats, which a margin of 1 at β = ½ doesn't make up for."""
    pairs = [RankedPair(0, 1, 1.0), RankedPair(2, 3, 1.0), RankedPair(4, 5, 1.0)]
    logp = np.array([-4.0, -6.0, -6.0, -5.0, -1.0, -1.0])
    lengths = np.array([2, 2, 3, 1, 1, 1])
    ref_logp = np.array([-5.0, -5.0, -8.0, -5.0, -1.0, -1.0])
    groups = np.array([0, 0, 1, 1, 2, 2])
    found = RankingAccuracy.of(pairs, groups, logp, lengths, ref_logp, 0.5)
    assert found.plain == pytest.approx([1, 0, 0.5])
    assert found.length_normalized == pytest.approx([1, 1, 0.5])
    assert found.idealized == pytest.approx([1, 0, 1])
    assert RankingAccuracy.of(pairs, groups, logp, lengths, ref_logp, None).idealized is None
    assert RankingAccuracy.of(pairs, groups, logp, lengths).to_json()["plain"]["value"] == pytest.approx(0.5)


def test_prompts_count_alike_however_many_pairs_they_have() -> None:
    """Three pairs of the first prompt, two of them right, and one of the second, wrong."""
    rewards, groups = np.array([2.0, 1.0, 0.0, 1.0, 0.0]), np.array([0, 0, 0, 1, 1])
    pairs = pairs_by_reward(rewards, groups)
    assert sorted(pairs) == [(0, 1, 1.0), (0, 2, 2.0), (1, 2, 1.0), (3, 4, 1.0)]
    found = RankingAccuracy.of(pairs, groups, np.array([-1.0, -3.0, -2.0, -2.0, -1.0]), np.ones(5, int))
    assert found.plain == pytest.approx([2 / 3, 0])


def test_the_optimum_has_the_idealized_accuracy() -> None:
    """π* ∝ π_ref e^{r/β} of 5 responses to each of 50 prompts, made here."""
    rng = np.random.default_rng(0)
    rewards, groups = rng.random(250), np.repeat(np.arange(50), 5)
    ref = np.log(rng.dirichlet(np.ones(5), 50)).ravel()
    optimum = ref + rewards / 0.3
    optimum -= np.log(np.exp(optimum).reshape(50, 5).sum(1)).repeat(5)
    pairs = pairs_by_reward(rewards, groups)
    found = RankingAccuracy.of(pairs, groups, optimum, np.ones(250, int), ref, 0.3)
    assert found.idealized is not None
    assert found.plain == pytest.approx(found.idealized)
    assert 0.5 < found.plain.mean() < 1
