"""Identities and closed forms of methods: those with ratios, weights, masks and other advantages, PPO's
advantages by hand, the baseline of the step, and what on-policy AGRO says of its trap.

`baseline = "step"` is enumerated: two prompts of three responses, of which each step draws one or two,
independently. On fresh samples the expected step is the policy gradient, whatever the noise.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, batch_of, change, draw, evaluate

from agro import Batch, objectives
from agro.errors import Refused
from agro.objectives import advantage
from agro.objectives.ingredients import log_ratio
from agro.objectives.methods import consistency
from agro.objectives.methods.clipped import explained_variance, gae
from agro.objectives.reduce import Groups
from agro_papers.methods.trust_region import searched_bounds

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


Bound = tuple[float, float, float]


def found_bounds(criterion: str, odds: float, low: Bound, high: Bound) -> tuple[float, float]:
    """That BAPO finds in one step, c_high first; all tokens count alike."""
    case = draw(6, groups=20, spread=0.6)
    batch, logp = batch_of(case), torch.as_tensor(case.logp)
    groups = Groups.of(batch)
    size = torch.where(batch.mask, groups.at_tokens(advantage.standardized(groups)), 0.0)
    w = log_ratio({"logp": logp}, batch, "behavior").exp()
    return searched_bounds(w, size, odds, low, high, criterion, first="high")


def reached(criterion: str, low: float, high: float) -> float:
    """P/N at these bounds: the largest odds at which it isn't short, by bisection."""
    least, most = 0.0, 1e6
    for _ in range(200):
        middle = (least + most) / 2
        found = found_bounds(criterion, middle, (low, low, 1.0), (high, 2 * high, high))
        least, most = (least, middle) if found[1] > high else (middle, most)
    return least


def test_raising_the_lower_bound_of_bapo_helps_the_gradient_alone() -> None:
    """P/N rises with c_high. With c_low it falls where clipped values count, and rises where they don't."""
    values = [reached("value", 0.6, high) for high in (1.2, 2.0, 3.0)]
    assert values == sorted(values)
    assert reached("value", 0.9, 1.2) < reached("value", 0.6, 1.2)
    assert reached("gradient", 0.9, 1.2) > reached("gradient", 0.6, 1.2)


@pytest.mark.parametrize("odds", [0.0, 0.8, 1.0, 1.2, 1e6])
@pytest.mark.parametrize("criterion", ["value", "gradient"])
def test_the_bounds_of_bapo_stay_in_their_ranges(odds: float, criterion: str) -> None:
    low, high = found_bounds(criterion, odds, LOW, HIGH)
    assert LOW[0] <= low <= LOW[1]
    assert HIGH[0] <= high <= HIGH[1]
    if odds == 0:
        assert (low, high) == (LOW[0], HIGH[0])
    if odds == 1e6:
        assert (low, high) == (LOW[1], HIGH[1])


BASE = -60.0


def grad(case: Case, name: str, **options: Any) -> np.ndarray:
    return evaluate(case, name, options).grad


def log_ratios_of(case: Case) -> np.ndarray:
    out = np.zeros(case.mask.shape)
    out[case.mask] = case.logp[case.mask] - case.behavior_logp[case.mask]
    return out


def one_response(log_ratios: list[float], better: bool = True) -> Batch:
    """Log-probs of −60 in a response of these log-ratios to the behavior; another of one token with ratio 1.

    A = ±½.
    """
    T = len(log_ratios)
    mask = [[False, *[True] * T], [False, True, *[False] * (T - 1)]]
    behavior = [[0.0, *(BASE - x for x in log_ratios)], [0.0, BASE, *[0.0] * (T - 1)]]
    rewards = [1.0, 0.0] if better else [0.0, 1.0]
    return Batch.of(mask=mask, reward=rewards, group=[0, 0], behavior_logp=behavior, old_logp=behavior)


def coefficients(name: str, log_ratios: list[float], better: bool = True, **options: Any) -> np.ndarray:
    """k of each token of `one_response`, where the gradient is −k A over the number of tokens."""
    batch, T = one_response(log_ratios, better), len(log_ratios)
    out = objectives.evaluate(name, [[0.0, *[BASE] * T]] * 2, batch, **options)
    return np.asarray(out.grad)[0, 1:] * (T + 1) * (-2.0 if better else 2.0)


SQUARES = [0.1, -0.2, 0.3, -0.4]  # of which the mean with those of the other response, 0, is 0.06


@pytest.mark.parametrize(
    ("name", "ratios", "options", "expected"),
    [
        # the ratio, 1.28 above it: also where PPO's clip has no gradient
        ("cispo", [0.1, 0.9, 1.2, 5.0], {}, [0.1, 0.9, 1.2, 1.28]),
        ("cispo", [0.1, 0.9, 1.2, 5.0], {"better": False}, [0.1, 0.9, 1.2, 1.28]),
        ("cispo", [0.1, 0.9, 1.2, 5.0], {"clip": (0.2, 0.28)}, [0.8, 0.9, 1.2, 1.28]),
        # saturates at ρ = 4 and goes to 0
        ("aipo", np.exp([-30.0, 0.0, np.log(3.9), np.log(4.1), 50.0]), {}, [np.exp(-30.0), 1, 3.9, 4, 4]),
        # a small ratio counts for every later token, and for none before it
        ("minpro", [1.0, 0.01, 1.0, 1.1], {}, [1, 0.01, 0.01, 0.011]),
        ("minpro", [1.2, 1.0, 0.01], {}, [1.2, 1.2, 0.01]),
        ("minpro", [1.0, 0.01, 1.0, 1.1], {"clip": (0.2, 0.28)}, [1, 0.8, 0.8, 0.8]),
        # above 1 the least of before multiplies, unless it is capped
        ("minpro", np.exp([0.05, 0.1, 0.14]), {}, np.exp([0.05, 0.15, 0.19])),
        ("minpro", np.exp([0.05, 0.1, 0.14]), {"cap_at_one": True}, np.exp([0.05, 0.1, 0.14])),
        # W = ½ of the response: e^λ W^k e^(−λW) is e^1.5/4 where A > 0, e^1/8 where A < 0
        ("vespo", [0.5 * np.exp(0.3), np.exp(-0.3)], {}, [np.exp(1.5) / 4] * 2),
        ("vespo", [0.5 * np.exp(0.3), np.exp(-0.3)], {"better": False}, [np.exp(1.0) / 8] * 2),
        ("vespo", np.exp([59.0, 0.0]), {}, [0, 0]),  # no overflow
        # without the largest of the squares their mean over the step is 0.035
        ("m2po", np.exp(SQUARES), {"budget": 0.04}, [*np.exp(SQUARES[:3]), 0]),
        ("m2po", np.exp(SQUARES), {"budget": 0.06 + 1e-12}, np.exp(SQUARES)),
        # of harmful tokens, those of 0.1 and 0.3, the mean is 0.05; with 0.01 for the larger one it is 0.01
        ("m2po", np.exp(SQUARES), {"tokens": "harmful"}, np.exp([0.1, -0.2, -np.inf, -0.4])),
    ],
    ids=str,
)
def test_weights_of_tokens(name: str, ratios: Any, options: dict[str, Any], expected: Any) -> None:
    options = options if name == "aipo" else {"advantage": "mean"} | options
    found = coefficients(name, np.log(ratios).tolist(), **options)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_m2po_without_a_kept_token_stands_still() -> None:
    case = draw(31, spread=0.0)
    case.behavior_logp = case.logp - 1.0
    assert (grad(case, "m2po") == 0).all()


def test_raft_pp_imitates_the_best_until_the_ratio_is_too_large() -> None:
    """−w over the tokens of the response and over the two responses; nothing of the other one."""
    batch = one_response([0.0, 0.1, 0.3, -2.0])
    out = objectives.evaluate("raft_pp", [[0.0, *[BASE] * 4]] * 2, batch)
    np.testing.assert_allclose(out.grad[0, 1:], -np.exp([0, 0.1, -np.inf, -2]) / 8, atol=1e-15)
    assert (out.grad[1] == 0).all()


def test_one_sided_rec_with_the_ratio_is_the_gradient_of_ppo() -> None:
    """Of the clipped minimum, by hand."""
    case = draw(33, episodes=False, spread=0.6)
    found = grad(case, "rec", mask="one_side", token_weight="is", clip=(0.2, 0.3))
    plain = grad(case, "rec")
    w = np.exp(log_ratios_of(case))
    gains = (plain < 0) & (w > 1.3) | (plain > 0) & (w < 0.8)
    np.testing.assert_allclose(found, np.where(gains, 0.0, w * plain), atol=1e-15)
    assert 0.1 < gains[case.mask].mean() < 0.9


def test_the_ring_lies_between_both_masks() -> None:
    """Kept tokens of "two_side" are those of "ring", and those are of "one_side"."""
    case = draw(34, spread=1.0)
    kept = {mask: grad(case, "rec", mask=mask) != 0 for mask in ("two_side", "ring", "one_side")}
    assert (kept["two_side"] <= kept["ring"]).all()
    assert (kept["ring"] <= kept["one_side"]).all()
    assert kept["two_side"].sum() < kept["ring"].sum() < kept["one_side"].sum()


def test_red_weight_is_weighed_reinforce_and_imitation() -> None:
    """Σ w (r − r̄) = Σ w (r − r̄_w) + (r̄_w − r̄) Σ w of one group's tokens, with r̄_w ≥ r̄."""
    case = draw(35, groups=1, sizes=(5, 5), episodes=False)
    r = np.array(case.reward)
    w = np.exp(r - r.mean())
    mean = (w * r).sum() / w.sum()
    expected = -(w * (r - mean) + (mean - r.mean()) * w) / case.mask.sum()
    np.testing.assert_allclose(
        grad(case, "red_weight"), np.where(case.mask, expected[:, None], 0.0), atol=1e-15
    )
    assert mean > r.mean()


def test_red_drop_by_hand() -> None:
    """Rewards 1, 0, 0, 0: two of three zeros are dropped. What is left is 1 and 0, so A = ½ and, with
    probability ⅓, −½."""
    batch = Batch.of(mask=[[0, 1]] * 4, reward=[1, 0, 0, 0], group=[0] * 4)
    out = objectives.evaluate("red_drop", [[0, -1.0]] * 4, batch)
    np.testing.assert_allclose(out.grad[:, 1], [-1 / 8, *[1 / 24] * 3], atol=1e-15)
    more = Batch.of(mask=[[0, 1]] * 4, reward=[1, 1, 1, 0], group=[0] * 4)  # nothing is dropped
    out = objectives.evaluate("red_drop", [[0, -1.0]] * 4, more)
    np.testing.assert_allclose(out.grad[:, 1], [*[-1 / 16] * 3, 3 / 16], atol=1e-15)


def test_reinforce_on_a_log_goes_to_the_wrong_arm() -> None:
    """REC's bandit: μ = [.3, .6, .1], r = [0, .8, 1], as 10 responses of one token.

    The expected coefficients μ (r − E r) are [−.174, .132, .042], so it goes to the second arm. With a
    baseline that is .6 lower all are positive, and it ends where π is in proportion to them.
    """
    arms, rewards = [0] * 3 + [1] * 6 + [2], [0.0] * 3 + [0.8] * 6 + [1.0]
    batch = Batch.of(mask=[[0, 1]] * 10, reward=rewards, group=[0] * 10)
    for shift, expected in ((0.0, [-0.174, 0.132, 0.042]), (-0.6, [0.006, 0.492, 0.102])):
        logits, c = np.zeros(3), np.zeros(3)
        out = objectives.evaluate("reinforce", [[0, -1.0]] * 10, batch, baseline="mean", shift=shift)
        np.add.at(c, arms, -np.asarray(out.grad)[:, 1])  # which doesn't depend on the policy
        np.testing.assert_allclose(c, expected, atol=1e-12)
        for _ in range(4000):
            p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            logits = logits + c - p * c.sum()
        np.testing.assert_allclose(p, c / c.sum() if shift else [0, 1, 0], atol=1e-6)


def test_mdpo_begins_with_the_policy_gradient_and_a_small_step_stays() -> None:
    """Over a prefix's tokens Σ_a μ_a ∇(w log w) is Σ_a π_a (1 + log w) ∇log π_a, 0 at π = μ."""
    case = draw(39)
    case.behavior_logp = case.logp
    np.testing.assert_allclose(grad(case, "mdpo", kl="square"), grad(case, "rec"), atol=1e-15)
    equal = change(case, reward=[0.5] * len(case.reward))
    assert (grad(equal, "mdpo", kl="square") == 0).all()
    small = draw(39)
    towards = grad(small, "mdpo", kl="square", step_size=1e-6) * 1e-6
    e = log_ratios_of(small)
    weight = np.array(small.weight)[:, None] * small.mask
    np.testing.assert_allclose(towards, weight * e / weight.sum(), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean", [0.75, -0.25, -0.25, -0.25]),
        ("others", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("standardized", [1.5, -0.5, -0.5, -0.5]),  # over ½
        ("maxrl", [3.0, -1.0, -1.0, -1.0]),
        ("opo", [0.5, -0.5, -0.5, -0.5]),  # 3 of 6 tokens
        ("reinforce_pp", [1.0, -1.0, -1.0, -1.0]),  # mean and deviation over tokens: ½ and ½
        ("reinforce_pp_baseline", [1.0, -1.0, -1.0, -1.0]),
        ("red_drop", [0.5, -1 / 6, -1 / 6, -1 / 6]),
    ],
)
def test_advantages_by_hand(kind: str, expected: list[float]) -> None:
    """Rewards 1, 0, 0, 0 of responses of 3, 1, 1 and 1 tokens."""
    mask = [[0, 1, 1, 1], *[[0, 1, 0, 0]] * 3]
    batch = Batch.of(mask=mask, reward=[1, 0, 0, 0], group=[0] * 4)
    out = objectives.evaluate("reinforce", [[-1.0] * 4] * 4, batch, baseline=kind)
    np.testing.assert_allclose(np.asarray(out.grad)[:, 1] * -4, expected, rtol=1e-5)


def test_a_part_of_large_values_hides_no_other_one() -> None:
    """Parts 1, 0, 0, 0 and 0, 10, 0, 0: 1.5 and −0.5 of each, in all ±1, of deviation 1 (GDPO)."""
    parts = [[1.0, 0.0], [0.0, 10.0], [0.0, 0.0], [0.0, 0.0]]
    extra = {"reward_parts": parts, "part_weights": [[1.0, 1.0]] * 4}
    batch = Batch.of(mask=[[0, 1]] * 4, reward=[1.0, 10.0, 0.0, 0.0], group=[0] * 4, extra=extra)
    out = objectives.evaluate("reinforce", [[0, -1.0]] * 4, batch, baseline="gdpo")
    np.testing.assert_allclose(np.asarray(out.grad)[:, 1] * -4, [1, 1, -1, -1], rtol=1e-5)


def test_the_baseline_of_a_token_weighs_by_the_gradient_up_to_it() -> None:
    """π of ½ and ¼ with Σ π² = ½, so 1 − 2π + Σ π² of ½ and 1: b = ⅓, A = ⅔ and −⅓ (OTB)."""
    batch = Batch.of(mask=[[0, 1]] * 2, reward=[1.0, 0.0], group=[0] * 2)
    logp, q = [[0, np.log(0.5)], [0, np.log(0.25)]], [[0, 0.5], [0, 0.125]]
    out = objectives.evaluate("otb", logp, batch, streams={"proposal": q})
    np.testing.assert_allclose(np.asarray(out.grads["logp"])[:, 1] * -2, [2 / 3, -1 / 3])


def test_certain_tokens_have_no_baseline() -> None:
    """π = 1 of the first token in both: W = 0, so b = 0 there; ½ and 1 after it as above (OTB). And π and q
    as float32 rounds them leave b between the rewards."""
    batch = Batch.of(mask=[[0, 1, 1]] * 2, reward=[1.0, 0.0], group=[0] * 2)
    logp, q = [[0, 0, np.log(0.5)], [0, 0, np.log(0.25)]], [[0, 1.0, 0.5], [0, 1.0, 0.125]]
    out = objectives.evaluate("otb", logp, batch, streams={"proposal": q})
    np.testing.assert_allclose(np.asarray(out.grads["logp"])[:, 1:] * -2, [[1, 2 / 3], [0, -1 / 3]])
    rounded = [[0, 1.0 + 6e-8, 0.5], [0, 1.0 - 6e-8, 0.125]]
    near = [[0, -1e-9, np.log(0.5)], [0, -1e-9, np.log(0.25)]]
    out = objectives.evaluate("otb", near, batch, streams={"proposal": rounded})
    advantage = np.asarray(out.grads["logp"])[:, 1] * -2
    assert 0 <= advantage[0] <= 1
    assert -1 <= advantage[1] <= 0


@pytest.mark.parametrize("kind", ["maxrl", "reinforce_pp", "reinforce_pp_baseline", "standardized"])
def test_equal_rewards_have_no_advantage(kind: str) -> None:
    """Also where their mean isn't exactly them, as of three times 0.1."""
    for r in (0.0, 0.1):
        batch = Batch.of(mask=[[0, 1]] * 3, reward=[r] * 3, group=[0] * 3)
        out = objectives.evaluate("reinforce", [[0, -1.0]] * 3, batch, baseline=kind)
        assert (np.asarray(out.grad) == 0).all()


def test_the_right_responses_of_maxrl_weigh_1_in_all() -> None:
    """Of k right ones of n the gradient is (1/k) of each, less 1/n of all."""
    for k in (1, 2, 5):
        batch = Batch.of(mask=[[0, 1]] * 6, reward=[1] * k + [0] * (6 - k), group=[0] * 6)
        out = objectives.evaluate("maxrl", [[0, -1.0]] * 6, batch)
        expected = np.array([1 / k] * k + [0] * (6 - k)) - 1 / 6
        np.testing.assert_allclose(np.asarray(out.grad)[:, 1], -expected, atol=1e-15)


VALUES = [[0.0, 0.5, 0.6, 0.8]]  # of what comes before each token


@pytest.mark.parametrize(
    ("gamma", "trace", "expected"),
    [
        # δ = (.6 − .5, .8 − .6, 1 − .8), A₃ = .2, A₂ = .2 + ½ · .2, A₁ = .1 + ½ · .3
        (1.0, 0.5, [0.25, 0.3, 0.2]),
        # δ = (.54 − .5, .72 − .6, .2), A₂ = .12 + .45 · .2, A₁ = .04 + .45 · .21
        (0.9, 0.5, [0.1345, 0.21, 0.2]),
        (1.0, 1.0, [0.5, 0.4, 0.2]),  # r − V
        (1.0, 0.0, [0.1, 0.2, 0.2]),  # δ
    ],
)
def test_advantages_of_three_tokens(gamma: float, trace: float, expected: list[float]) -> None:
    mask = torch.tensor([[False, True, True, True]])
    reward, value = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor(VALUES)
    found = gae(reward.double(), value.double(), mask, gamma, trace)
    assert found[0].tolist() == pytest.approx([0.0, *expected])


def test_a_tool_s_tokens_are_no_steps_and_their_reward_is_the_one_s_before() -> None:
    """Tokens 1 and 3 are the policy's: δ₁ = r₂ + V₃ − V₁ = .3 + .8 − .5, δ₃ = 1 − .8."""
    mask = torch.tensor([[False, True, False, True]])
    reward = torch.tensor([[0.0, 0.0, 0.3, 1.0]]).double()
    found = gae(reward, torch.tensor(VALUES).double(), mask, 1.0, 0.5)
    assert found[0].tolist() == pytest.approx([0.0, 0.6 + 0.5 * 0.2, 0.0, 0.2])


def evaluated(value: float, old: float, **options: float | None) -> objectives.Evaluation:
    """One token of reward 1, π = μ, whose value was `old` and is `value` now."""
    batch = Batch.of(
        mask=[[0, 1]], reward=[1.0], group=[0], behavior_logp=[[0, -1.0]], old_value=[[0.0, old]]
    )
    streams = {"prefix_value": [[0.0, value]]}
    return objectives.evaluate("ppo", [[0.0, -1.0]], batch, streams=streams, **options)


def test_a_value_that_went_far_toward_its_target_stays() -> None:
    """From .2 to .5 of 1: beyond .2 + .2 the larger error is the clipped one, ½ (.4 − 1)², without slope."""
    far = evaluated(0.5, 0.2)
    assert far.metrics["value_loss"] == pytest.approx(0.18)
    assert far.grads["prefix_value"].tolist() == [[0.0, 0.0]]
    free = evaluated(0.5, 0.2, value_clip=None)
    assert free.metrics["value_loss"] == pytest.approx(0.125)
    assert free.grads["prefix_value"].tolist() == [[0.0, pytest.approx(-0.5)]]


def test_the_policy_s_gradient_is_the_advantage_of_the_old_value() -> None:
    assert evaluated(0.9, 0.2).grads["logp"].tolist() == [[0.0, pytest.approx(-0.8)]]


def test_a_response_in_several_rows_is_refused() -> None:
    batch = Batch.of(
        mask=[[0, 1], [0, 1]],
        reward=[1.0, 1.0],
        group=[0, 0],
        response=[0, 0],
        behavior_logp=[[0, -1.0]] * 2,
        old_value=[[0.0, 0.0]] * 2,
    )
    with pytest.raises(Refused, match="needs each response in one row"):
        objectives.evaluate("ppo", [[0.0, -1.0]] * 2, batch, streams={"prefix_value": [[0.0, 0.0]] * 2})


def test_the_share_of_the_targets_variance_that_the_values_explain() -> None:
    """Targets 0 and 2 around 1, errors ± .5: 1 − .25 / 1."""
    batch = Batch.of(mask=[[0, 1, 1]], reward=[0.0], group=[0])
    target = torch.tensor([[0.0, 0.0, 2.0]]).double()
    value = torch.tensor([[0.0, 0.5, 1.5]]).double()
    assert explained_variance(batch, value, target).item() == pytest.approx(0.75)
    assert explained_variance(batch, value, 0 * target).isnan()


BETA = 0.3
POLICY = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])  # of a response to each prompt
REFERENCE = np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4]])
REWARD = np.array([[0.0, 1.0, 0.4], [1.0, 0.9, 0.0]])


def step(drawn: tuple[tuple[int, ...], ...], noise: tuple[float, ...], name: str) -> np.ndarray:
    """[2,3] the step in the logits of both prompts, from one group of each."""
    rows = [(x, y) for x, of_prompt in enumerate(drawn) for y in of_prompt]
    batch = Batch.of(
        mask=[[False, True]] * len(rows),
        reward=[REWARD[row] + more for row, more in zip(rows, noise, strict=True)],
        group=[x for x, _ in rows],
        ref_logp=[[0.0, math.log(REFERENCE[row])] for row in rows],
    )
    logp = [[0.0, math.log(POLICY[row])] for row in rows]
    found = objectives.evaluate(name, logp, batch, beta=BETA, baseline="step").grad
    logits = np.zeros((2, 3))
    for (x, y), slope in zip(rows, found, strict=True):
        logits[x] += slope[1] * ((np.arange(3) == y) - POLICY[x])
    return logits


@pytest.mark.parametrize("name", ["agro", "rloo"])
@pytest.mark.parametrize("n", [1, 2])
def test_the_expected_step_is_the_policy_gradient(name: str, n: int) -> None:
    """Of E r − β KL, half of it from each prompt; rewards ± 0.5 in turn, so that each noise is met."""
    expected = np.zeros((2, 3))
    for a in itertools.product(range(3), repeat=n):
        for b in itertools.product(range(3), repeat=n):
            chance = math.prod(POLICY[0, list(a)]) * math.prod(POLICY[1, list(b)])
            for signs in itertools.product((-0.5, 0.5), repeat=2):
                noise = (signs[0],) + (0.0,) * (n - 1) + (signs[1],) + (0.0,) * (n - 1)
                expected += chance / 4 * step((a, b), noise, name)
    R = REWARD - BETA * np.log(POLICY / REFERENCE)
    exact = -POLICY * (R - (POLICY * R).sum(1, keepdims=True)) / 2
    np.testing.assert_allclose(expected, exact, atol=1e-12)


def test_one_group_has_nothing_to_be_compared_with() -> None:
    batch = Batch.of(mask=[[False, True]] * 2, reward=[1.0, 0.0], group=["x"] * 2, ref_logp=[[0.0, -1.0]] * 2)
    with pytest.raises(Refused, match="at least 2 groups, got 'x' alone"):
        objectives.evaluate("agro", [[0.0, -1.0]] * 2, batch, beta=BETA, baseline="step")


def test_right_responses_are_raised_where_all_of_a_prompt_are() -> None:
    """R is 1 or 0 at the reference, g = (1 − e⁻¹)² for all: b of x is the mean of y, ½; of y that of x, 1."""
    batch = Batch.of(
        mask=[[False, True]] * 4, reward=[1.0, 1.0, 1.0, 0.0], group=["x", "x", "y", "y"],
        ref_logp=[[0.0, -1.0]] * 4,
    )  # fmt: skip
    out = objectives.evaluate("agro", [[0.0, -1.0]] * 4, batch, beta=BETA, baseline="step")
    np.testing.assert_allclose(out.grad[:, 1], [-0.125, -0.125, 0.0, 0.25], atol=1e-15)


NAN = math.nan
# μ₃/(2β Var) of one success in four is ½/β, of three in four −½/β; equal and unknown rewards say nothing.
REWARDS = np.array([[0, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, NAN, 1, 0]], dtype=np.float64)


def test_of_options() -> None:
    assert "½ − β = 0.4" in str(consistency.options_warning({"beta": 0.1, "likelihood_ratio": 1.0}))
    for beta, c in ((0.5, 1.0), (0.1, 0.9), (0.1, "adaptive")):
        assert consistency.options_warning({"beta": beta, "likelihood_ratio": c}) is None


@pytest.mark.parametrize(
    ("beta", "c", "said"),
    [
        (0.1, 1.0, r"on 2 of 3 .* whose 4 rewards differ \(of 5\) .* above 1 \(median 5\)"),
        (0.5, 1.0, r"on 0 of 3 .* above 1 \(median 1\)"),
        (0.1, 0.25, r"on 2 of 3 .* above 4 \(median 5\)"),
        (0.1, 0.1, r"on 0 of 3 .* above 10 \(median 5\)"),
    ],
)
def test_of_rewards(beta: float, c: float, said: str) -> None:
    found = consistency.rewards_warning(REWARDS, {"beta": beta, "likelihood_ratio": c})
    assert re.search(said, str(found))


def test_of_three_rewards_there_is_a_ratio_and_of_two_none() -> None:
    """Of 0, 0, 1: 3/1 · (2/9)/(2/3) / 2β = ½/β."""
    options = {"beta": 0.1, "likelihood_ratio": 1.0}
    assert "(median 5)" in str(consistency.rewards_warning(np.array([[0.0, 0.0, 1.0]]), options))
    assert consistency.rewards_warning(np.array([[0.0, 1.0]]), options) is None


@pytest.mark.parametrize(("beta", "c"), [(0.1, "adaptive"), (0.0, 1.0), (0.1, 0.0)])
def test_without_a_trap_nothing_is_said_of_rewards(beta: float, c: object) -> None:
    assert consistency.rewards_warning(REWARDS, {"beta": beta, "likelihood_ratio": c}) is None
    assert consistency.rewards_warning(REWARDS[3:], {"beta": 0.1, "likelihood_ratio": 1.0}) is None


def test_of_metrics() -> None:
    assert "60%" in str(consistency.metrics_warning({"reversed_share": 0.6}, {}))
    assert consistency.metrics_warning({"reversed_share": 0.5}, {}) is None
    assert consistency.metrics_warning({"reversed_share": NAN}, {}) is None
