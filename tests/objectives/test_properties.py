"""What must be true of the objectives for any numbers, and batches small enough to check on paper.

What the plain loops of `independent` have by construction isn't repeated here, such as that the order of
rows, padding and the rows of an episode say nothing: test_agreement.py compares with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import NAMED, VARIANTS, Case, by_objective, change, draw, draw_for, evaluate, take

from agro import Batch, objectives

EVERY = by_objective(VARIANTS)


def only(*chosen: str, along: bool = True, but: tuple[str, ...] = (), stored: bool = True) -> Any:
    """Variants whose name begins with one of `chosen`, but those with any of `but` in it.

    Without `along`, only those that use a response as one unit; without `stored`, those without a stored
    baseline or the step's, which don't move with the group.
    """
    at = [
        i
        for i, v in enumerate(NAMED)
        if v.startswith(chosen) and not any(b in v for b in but) and (along or "rows" not in VARIANTS[i][2])
        if stored or VARIANTS[i][1].get("baseline") not in ("stored", "step")
    ]
    return by_objective([VARIANTS[i] for i in at])


CENTERED = only(
    *("agro", "rloo", "reinforce-baseline=mean", "kl_pg", "grpo", "pair_consistency", "dpo"),
    but=("imitation_reward",),  # which a shift crosses
    stored=False,
)


def same(found: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def shift_of(case: Case) -> np.ndarray:
    """A number for each row, the same in a group: 1, 2, 3, …"""
    return np.array([1.0 + list(dict.fromkeys(case.group)).index(g) for g in case.group])


# By hand: two responses of one prompt, rewards 1 and 0, two tokens and one token.
# ρ = (0.2 + 0.1, -0.4) = (0.3, -0.4). At β = 0.5: R = (1 - 0.15, 0 + 0.2) = (0.85, 0.2), R_1 - R_2 = 0.65.
HAND = {
    "mask": [[False, True, True], [False, True, False]],
    "reward": [1.0, 0.0],
    "group": ["a", "a"],
    "ref_logp": [[9.0, -1.2, -2.1], [9.0, -0.6, 9.0]],
    "behavior_logp": [
        [9.0, -1.0 - np.log(1.1), -2.0 - np.log(1.5)],
        [9.0, -1.0 - np.log(0.5), 9.0],
    ],  # w = 1.1, 1.5, 0.5
    "staleness": [0, 0],
}
HAND_LOGP = [[0.0, -1.0, -2.0], [0.0, -1.0, -3.0]]
HAND_KL = [[7.0, 0.1, 0.2], [7.0, 0.4, 7.0]]
# A of grpo: ±0.5 / (√0.5 + 1e-6), as std² = ½(1 - 0)². Its clip keeps w A = 1.1 A, limits 1.5 to 1.2 (A > 0)
# and, as A < 0, takes max(0.5, 0.8) = 0.8. Shares: ½ · ½ for each of two tokens, ½ for the one.
A = 0.5 / (0.5**0.5 + 1e-6)
HAND_CASES: list[tuple[str, dict[str, Any], float, list[float]]] = [
    # ¼ · 0.65² = 0.105625; reward: ∓½ · 0.65; loss: times 0.5
    ("agro", {"beta": 0.5}, 0.105625, [-0.325, -0.325, 0.325]),
    ("agro", {"beta": 0.5, "scale": "loss"}, 0.105625, [-0.1625, -0.1625, 0.1625]),
    # ½ (-0.5 · ±0.65 + ½ · 0.4225) = ½ (∓0.325 + 0.21125)
    ("agro_onpolicy", {"beta": 0.5}, 0.105625, [-0.056875, -0.056875, 0.268125]),
    # -½ (1 · -3 + -1 · -1) = 1
    ("rloo", {}, 1.0, [-0.5, -0.5, 0.5]),
    ("rloo", {"beta": 0.5}, 0.65, [-0.325, -0.325, 0.325]),
    # -½ · 1 · -3; means: -½ (½ · -3 - ½ · -1) = ½; b = 0.25: -½ (0.75 · -3 - 0.25 · -1) = 1
    ("reinforce", {}, 1.5, [-0.5, -0.5, 0.0]),
    ("reinforce", {"baseline": "mean"}, 0.5, [-0.25, -0.25, 0.25]),
    ("reinforce", {"baseline": 0.25}, 1.0, [-0.375, -0.375, 0.125]),
    # 1 + 0.5 · ½ · (0.3 + 0.4)
    ("kl_pg", {"beta": 0.5}, 1.175, [-0.5, -0.5, 0.5]),
    ("grpo", {}, -A * ((1.1 + 1.2) / 4 - 0.8 / 2), [-1.1 * A / 4, 0.0, 0.0]),
    (
        "grpo",
        {"std": False, "clip": (0.6, 0.5)},
        -0.5 * ((1.1 + 1.5) / 4 - 0.5 / 2),
        [-0.1375, -0.1875, 0.125],
    ),
    ("sft", {}, 4 / 3, [-1 / 3, -1 / 3, -1 / 3]),
]


@pytest.mark.parametrize(
    ("name", "options", "loss", "grad"), HAND_CASES, ids=[f"{n}-{o}" for n, o, *_ in HAND_CASES]
)
def test_by_hand(name: str, options: dict[str, Any], loss: float, grad: list[float]) -> None:
    if "clip" in options:
        # w = 1.5 lies on the edge of the clip: a hair inside, so that rounding can't tip it over
        options = {**options, "clip": (0.6, 0.5 + 1e-9)}
    out = objectives.evaluate(name, HAND_LOGP, Batch.of(**HAND), streams={"kl": HAND_KL}, **options)
    assert out.loss == pytest.approx(loss, abs=1e-14)
    same(out.grad[np.array(HAND["mask"])], np.array(grad), 1e-14)
    if name == "kl_pg":
        same(out.grads["kl"], np.array([[0, 0.25, 0.25], [0, 0.25, 0]]), 1e-14)


@CENTERED
def test_a_shift_of_a_prompts_rewards_changes_no_gradient(
    name: str, options: dict[str, Any], needs: set[str]
) -> None:
    case = draw_for(needs, 0)
    moved = change(case, reward=np.array(case.reward) + shift_of(case))
    before, after = evaluate(case, name, options), evaluate(moved, name, options)
    for stream in before.grads:
        same(after.grads[stream], before.grads[stream])
    assert after.loss == pytest.approx(before.loss, abs=1e-11)


@only("agro", "rloo", "pair_consistency", "dpo", along=False, stored=False)
def test_a_shift_of_a_prompts_reference_changes_nothing(
    name: str, options: dict[str, Any], needs: set[str]
) -> None:
    """ρ + c for all responses of a prompt: the normalizer of π_ref, which no group-centered objective sees.

    With token averages that is c at each token. (Of estimates token by token it is so in expectation: agro
    prove.)
    """
    case = draw(1, episodes=False)
    ref = case.ref_logp.copy()
    if options.get("average") == "token":
        ref -= shift_of(case)[:, None]
    else:
        ref[np.arange(len(ref)), case.mask.argmax(1)] -= shift_of(case)
    before, after = evaluate(case, name, options), evaluate(change(case, ref_logp=ref), name, options)
    of_winner = "winner" in options and options.get("anchor") != "behavior"
    if options.get("weight") == "reference" or of_winner:  # ρ of a response is what it is
        assert np.abs(after.grad - before.grad).max() > 1e-3
    else:
        same(after.grad, before.grad, 1e-11)


@EVERY
def test_a_group_of_weight_0_is_not_there(name: str, options: dict[str, Any], needs: set[str]) -> None:
    case = draw_for(needs, 6, weights=False)
    gone = np.array([g == case.group[0] for g in case.group])
    a = evaluate(change(case, weight=1.0 - gone), name, options)
    b = evaluate(take(case, np.flatnonzero(~gone)), name, options)
    assert a.loss == pytest.approx(b.loss, rel=1e-12)
    same(a.grad[~gone], b.grad)
    assert (a.grad[gone] == 0).all()


def test_onpolicy_adds_the_likelihood_ratio_part() -> None:
    """½ A²/n beside agro's own gradient; with the baseline that part sums to 0 over a group's responses."""
    case = draw(14, groups=1, sizes=(4, 4), episodes=False)
    beta = 0.3
    pathwise = evaluate(case, "agro", {"beta": beta, "scale": "loss"}).grad
    extra = evaluate(case, "agro_onpolicy", {"beta": beta}).grad - pathwise
    centered = evaluate(case, "agro_onpolicy", {"beta": beta, "baseline": True}).grad - pathwise
    first = case.mask.argmax(1)
    rows = np.arange(4)
    advantage = -4 / beta * pathwise[rows, first]
    same(extra[rows, first], advantage**2 / 8)
    v = advantage**2 / 2
    same(centered[rows, first], (v - (v.sum() - v) / 3) / 4)
    assert abs(centered[rows, first].sum()) < 1e-12


def test_at_the_optimum_the_loss_and_both_gradients_are_0() -> None:
    """log π* = log π_ref + (r - V)/β for any V: generation consistency."""
    case, beta = draw(15, episodes=False), 0.4
    logp = case.ref_logp.copy()
    first = case.mask.argmax(1)
    logp[np.arange(len(logp)), first] += (np.array(case.reward) - shift_of(case)) / beta
    optimum = change(case, logp=logp)
    for name in ("agro", "agro_onpolicy"):
        out = evaluate(optimum, name, {"beta": beta})
        assert out.loss < 1e-28
        assert np.abs(out.grad).max() < 1e-14
    assert np.abs(evaluate(optimum, "rloo", {}).grad).max() > 0.01


def test_equal_rewards() -> None:
    """Reward-only objectives stand still; agro still draws the log-ratios of a group together."""
    case = draw(16, rewards="equal")
    for name, options in [
        ("rloo", {}),
        ("reinforce", {"baseline": "mean"}),
        ("kl_pg", {"beta": 0.3}),
        ("grpo", {}),
    ]:
        assert np.abs(evaluate(case, name, options).grad).max() < 1e-9
    out = evaluate(case, "agro", {"beta": 0.3})
    assert np.abs(out.grad).max() > 0.01
    flat = change(case, ref_logp=case.logp)
    assert np.abs(evaluate(flat, "agro", {"beta": 0.3}).grad).max() < 1e-15
