"""Identities and closed forms of the objectives with ratios, and of their corrections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, batch_of, change, draw, evaluate

from agro import objectives
from agro_papers.methods.balanced import _Rule, _Tokens

LOW, HIGH = (0.6, 0.9, 0.02), (1.2, 3.0, 0.05)


def mismatched() -> Case:
    """Ratios π_old/μ of 0.5 to 4 of tokens."""
    case, rng = draw(3), np.random.default_rng(3)
    log_ratio = np.log(rng.choice([0.5, 0.9, 1.1, 4.0], size=case.mask.shape))
    old = case.old_logp - 1.0  # which leaves room for a ratio of 0.5
    return change(case, old_logp=old, behavior_logp=old - log_ratio)


@pytest.mark.parametrize("level", ["token", "sequence", "mean"])
def test_bounds_truncate_or_mask(level: str) -> None:
    """Between the bounds both rules are the ratio; beyond, the bound and 0. All tokens stay in the mean."""
    case = mismatched()
    options = {"weight": "mismatch", "weight_level": level}
    plain = evaluate(case, "rloo", {}).grad
    ratio, clamped, masked = (
        evaluate(case, "rloo", {**options, **bounds}).grad / np.where(plain == 0, 1, plain)
        for bounds in (
            {"weight_max": None},
            {"weight_min": 0.8, "weight_max": 2.0},
            {"weight_min": 0.8, "weight_max": 2.0, "weight_rule": "mask"},
        )
    )
    on = plain != 0
    np.testing.assert_allclose(clamped[on], np.clip(ratio, 0.8, 2.0)[on], rtol=1e-12)
    np.testing.assert_allclose(masked[on], np.where((ratio >= 0.8) & (ratio <= 2), ratio, 0)[on], rtol=1e-12)
    if level == "token":
        wanted = np.exp(case.old_logp - case.behavior_logp)
        np.testing.assert_allclose(ratio[on], wanted[on], rtol=1e-12)


def test_what_corrects_for_the_sampler_may_train_on_stale_samples() -> None:
    def fresh_only(name: str, **options: Any) -> bool:
        [need] = [n for n in objectives.get(name).needed(options) if n == "old_logp"]
        return need.fresh_only

    assert fresh_only("grpo", ratio="old")
    assert not fresh_only("grpo", ratio="old", weight="mismatch")
    assert not fresh_only("decoupled_ppo")
    assert not fresh_only("remix")


def test_the_clip_of_remix_never_binds_at_the_weights_that_drew() -> None:
    """π = π_old: w = κ, however far from 1."""
    case = mismatched()
    out = evaluate(change(case, logp=np.where(case.mask, case.old_logp, 0.0)), "remix", {})
    assert out.metrics["clipped_share"] == 0
    assert out.metrics["ratio_max"] > 3


def tokens_of(case: Case) -> _Tokens:
    B, T = case.mask.shape
    batch = batch_of(case)
    return _Tokens.of({"logp": torch.as_tensor(case.logp)}, batch, "behavior", torch.ones(B, T).double())


def reached(tokens: _Tokens, criterion: str, low: float, high: float) -> float:
    """P/N at these bounds: the largest odds at which it isn't short, by bisection."""
    least, most = 0.0, 1e6
    for _ in range(200):
        middle = (least + most) / 2
        short = tokens._is_short(_Rule(criterion, middle, LOW, HIGH, ("low", "high")), low, high)
        least, most = (least, middle) if short else (middle, most)
    return least


def test_raising_the_lower_bound_of_bapo_helps_the_gradient_alone() -> None:
    """P/N rises with c_high. With c_low it falls where clipped values count, and rises where they don't."""
    tokens = tokens_of(draw(6, groups=20, spread=0.6))
    values = [reached(tokens, "value", 0.6, high) for high in (1.2, 2.0, 3.0)]
    assert values == sorted(values)
    assert reached(tokens, "value", 0.9, 1.2) < reached(tokens, "value", 0.6, 1.2)
    assert reached(tokens, "gradient", 0.9, 1.2) > reached(tokens, "gradient", 0.6, 1.2)


@pytest.mark.parametrize("odds", [0.0, 0.8, 1.0, 1.2, 1e6])
@pytest.mark.parametrize("criterion", ["value", "gradient"])
def test_the_bounds_of_bapo_stay_in_their_ranges(odds: float, criterion: str) -> None:
    tokens = tokens_of(draw(6, groups=20, spread=0.6))
    low, high = tokens.search(_Rule(criterion, odds, LOW, HIGH, ("high", "low")))
    assert LOW[0] <= low <= LOW[1]
    assert HIGH[0] <= high <= HIGH[1]
    if odds == 0:
        assert (low, high) == (LOW[0], HIGH[0])
    if odds == 1e6:
        assert (low, high) == (LOW[1], HIGH[1])
