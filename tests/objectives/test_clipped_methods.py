"""Identities and closed forms of the objectives with ratios, and of their corrections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, batch_of, change, draw, evaluate

from agro import Batch, objectives
from agro.errors import Refused
from agro_papers.methods.balanced import _Rule, _Tokens

LOW, HIGH = (0.6, 0.9, 0.02), (1.2, 3.0, 0.05)


def two_tokens(w: float, *, drawn: float = 1.0) -> Batch:
    """One token each: rewards 1 and 0, so A = ±½ without std. π = e^-2, the second one's ratio to μ is w.

    `drawn`: π_old/μ of both.
    """
    behavior = np.array([[0.0, -2.0], [0.0, -2.0 - np.log(w)]])
    return Batch.of(
        mask=[[False, True]] * 2,
        reward=[1.0, 0.0],
        group=[0, 0],
        behavior_logp=behavior,
        old_logp=behavior + np.log(drawn),
        ref_logp=[[0.0, -2.5], [0.0, -1.5]],
    )


LOGP = [[0.0, -2.0], [0.0, -2.0]]


def slopes(name: str, batch: Batch, **options: Any) -> list[float]:
    grad: list[float] = objectives.evaluate(name, LOGP, batch, **options).grad[:, 1].tolist()
    return grad


@pytest.mark.parametrize(("w", "moves"), [(0.7, False), (2.9, True), (3.1, False)])
def test_the_dual_clip_ends_the_gradient_of_a_wrong_token(w: float, moves: bool) -> None:
    """w A / n with A = -½ from 0.8 to 3; a right token has no such bound."""
    found = slopes("grpo", two_tokens(w), std=False, dual_clip=3.0)
    assert found == pytest.approx([-0.25, w / 4 if moves else 0.0], abs=1e-15)


def test_a_constant_length_weighs_tokens_and_the_own_length_responses() -> None:
    """Lengths 1 and 2, w = 1: A/(n T) becomes A/(n 8), and over all three tokens A/3."""
    logp = [[0.0, -2.0, 0.0], [0.0, -2.0, -1.0]]
    batch = Batch.of(
        mask=[[False, True, False], [False, True, True]], reward=[1.0, 0.0], group=[0, 0], behavior_logp=logp
    )
    for average, first, second in (("response", 0.25, 0.125), (8.0, 1 / 32, 1 / 32), ("token", 1 / 6, 1 / 6)):
        out = objectives.evaluate("grpo", logp, batch, std=False, average=average)
        np.testing.assert_allclose(out.grad[:, 1], [-first, second], atol=1e-15)


@pytest.mark.parametrize("name", ["gspo", "gmpo", "sapo", "deepseek_v32"])
def test_at_the_behavior_policy_all_are_grpo(name: str) -> None:
    """w = 1: -A / (n T). GMPO's geometric mean and the slope of SAPO's gate, 4 σ(0)², are 1."""
    case = draw(1)
    fresh = change(case, behavior_logp=case.logp)
    wanted = evaluate(fresh, "grpo", {}).grad
    np.testing.assert_allclose(evaluate(fresh, name, {"std": True}).grad, wanted, atol=1e-14)


def test_luspo_is_gspo_times_the_length() -> None:
    case = draw(2, spread=1e-4)
    lengths = {
        r: sum(int(m.sum()) for m, s in zip(case.mask, case.response) if s == r) for r in case.response
    }
    times = np.array([lengths[r] for r in case.response])[:, None]
    wanted = times * evaluate(case, "gspo", {}).grad
    np.testing.assert_allclose(evaluate(case, "luspo", {}).grad, wanted, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "slope"),
    [
        ({}, lambda w, d: 1 - np.exp(-d)),
        ({"kl": "k2"}, lambda w, d: d),
        ({"unbiased_kl": True}, lambda w, d: w * d),
        ({"kl": "k2", "unbiased_kl": True}, lambda w, d: w * (d + d**2 / 2)),
    ],
)
def test_the_slope_of_the_kl_term(options: dict[str, Any], slope: Any) -> None:
    """β/n times it; d = ½ and -½, w = 1 and 1.1."""
    batch, w, d = two_tokens(1.1), np.array([1.0, 1.1]), np.array([0.5, -0.5])
    with_kl, without = (slopes("grpo", batch, beta=beta, **options) for beta in (0.3, 0.0))
    np.testing.assert_allclose(np.subtract(with_kl, without), 0.15 * slope(w, d), atol=1e-15)


def test_correction_weights_leave_the_kl_term_alone() -> None:
    options = {"beta": 0.3, "weight": "mismatch", "weight_rule": "mask", "weight_max": 1.5}
    kept = slopes("grpo", two_tokens(1.0, drawn=2.0), **options)
    np.testing.assert_allclose(kept, 0.15 * (1 - np.exp([-0.5, 0.5])), atol=1e-15)


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


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "decoupled_ppo"])
def test_without_a_mismatch_the_corrections_are_grpo(name: str) -> None:
    case = draw(4)
    same = change(case, behavior_logp=case.old_logp)
    np.testing.assert_array_equal(
        evaluate(same, name, {}).grad, evaluate(same, "grpo", {"ratio": "old"}).grad
    )


def test_what_corrects_for_the_sampler_may_train_on_stale_samples() -> None:
    def fresh_only(name: str, **options: Any) -> bool:
        [need] = [n for n in objectives.get(name).needed(options) if n == "old_logp"]
        return need.fresh_only

    assert fresh_only("grpo", ratio="old")
    assert not fresh_only("grpo", ratio="old", weight="mismatch")
    assert not fresh_only("decoupled_ppo")
    assert not fresh_only("remix")


@pytest.mark.parametrize("bad", [{"weight_level": "token"}, {"weight_min": 0.5}, {"weight_rule": "mask"}])
def test_bounds_without_a_weight_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(Refused, match='is of a weight, but weight = "none"'):
        evaluate(draw(0), "grpo", bad)


def test_a_wrong_response_that_the_policy_has_left_is_dropped() -> None:
    """log μ/π of the second token is -log w = 0.69 > 0.5; within the clip of 0.9 it would get a slope."""
    kept, dropped = (
        slopes("deepseek_v32", two_tokens(0.5), clip=(0.9, 0.9), off_policy=delta) for delta in (0.7, 0.5)
    )
    assert kept == pytest.approx([-0.25, 0.125], abs=1e-15)
    assert dropped == pytest.approx([-0.25, 0.0], abs=1e-15)


@pytest.mark.parametrize(
    ("new", "old", "good", "kept"),
    [(0.5, 0.2, True, False), (0.05, 0.01, True, True), (0.1, 0.4, False, False), (0.5, 0.2, False, True)],
)
def test_dppo_looks_at_probabilities(new: float, old: float, good: bool, kept: bool) -> None:
    """A ratio of 5 is kept where it is 0.04 of probability; one of 2.5 is masked where it is 0.3."""
    logp = np.log([[1.0, new], [1.0, 0.5]])
    batch = Batch.of(
        mask=[[False, True]] * 2,
        reward=[float(good), float(not good)],
        group=[0, 0],
        behavior_logp=np.log([[1.0, old], [1.0, 0.5]]),
    )
    out = objectives.evaluate("dppo", logp, batch)
    wanted = (-0.25 if good else 0.25) * new / old if kept else 0.0
    assert out.grad[0, 1] == pytest.approx(wanted, abs=1e-15)


def test_kimi_pulls_each_token_back() -> None:
    """-w A/2 + 2 τ e/2 with e = log 1.5."""
    found = slopes("kimi_k25", two_tokens(1.5), pull=0.1)
    assert found == pytest.approx([-0.25, 1.5 * 0.25 + 0.1 * np.log(1.5)], abs=1e-15)


def test_remix_on_fresh_samples_is_ppo() -> None:
    case = draw(5)
    fresh = change(case, old_logp=case.behavior_logp)
    wanted = evaluate(fresh, "grpo", {"average": "token"}).grad
    np.testing.assert_array_equal(evaluate(fresh, "remix", {}).grad, wanted)


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


def test_without_a_target_bapo_is_ppo() -> None:
    case = draw(7)
    wanted = evaluate(case, "grpo", {"clip": (0.4, 0.2), "average": "token"}).grad
    np.testing.assert_array_equal(evaluate(case, "bapo", {"target": 0.0}).grad, wanted)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"low": (0.9, 0.6, 0.1)}, "low: expected start, maximum and step"),
        ({"high": (1.2, 3.0, 0.0)}, "high: expected start, maximum and step"),
        ({"low": (0.6, 1.5, 0.1)}, r"lower bound may go to 1\.5, above the upper one, 1\.2"),
    ],
)
def test_bounds_that_bapo_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        evaluate(draw(0), "bapo", options)
