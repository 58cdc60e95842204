"""Identities and closed forms of objectives with weights, masks and other advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case, change, draw, evaluate

from agro import Batch, objectives

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
