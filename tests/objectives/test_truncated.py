"""Identities and closed forms of objectives with weights, masks and other advantages."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from cases import Case, change, draw, evaluate

from agro import Batch, objectives
from agro.errors import Refused

BASE = -60.0
TOKEN_MEAN = ["cispo", "aipo", "minpro", "vespo", "m2po", "rec", "opmd_token", "mdpo"]


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


@pytest.mark.parametrize("name", TOKEN_MEAN)
def test_at_the_behavior_policy_all_are_reinforce(name: str) -> None:
    """w = 1: −A over the number of all tokens, A = r − r̄. (The KL of mdpo has a gradient of 1 + log w.)"""
    case = draw(30, episodes=False)
    case.behavior_logp = case.logp
    options = {} if name in ("aipo", "opmd_token") else {"advantage": "mean"}
    expected = grad(case, "rec")
    if name == "mdpo":
        options["kl"] = "square"
    np.testing.assert_allclose(grad(case, name, **options), expected, atol=1e-15)


def test_the_weight_of_cispo_keeps_every_token() -> None:
    """The weight is the ratio, 1.28 above it: also where PPO's clip has no gradient."""
    log_ratios = np.log([0.1, 0.9, 1.2, 5.0]).tolist()
    for better in (True, False):
        found = coefficients("cispo", log_ratios, better, advantage="mean")
        np.testing.assert_allclose(found, [0.1, 0.9, 1.2, 1.28], rtol=1e-12)
    found = coefficients("cispo", log_ratios, advantage="mean", clip=(0.2, 0.28))
    np.testing.assert_allclose(found, [0.8, 0.9, 1.2, 1.28], rtol=1e-12)


def test_the_weight_of_aipo_saturates_at_rho_and_goes_to_0() -> None:
    np.testing.assert_allclose(
        coefficients("aipo", [-30.0, 0.0, np.log(3.9), np.log(4.1), 50.0]),
        [np.exp(-30.0), 1, 3.9, 4, 4],
        rtol=1e-12,
    )


def test_minpro_lets_a_small_ratio_count_for_every_later_token() -> None:
    """And for none before it: the weights are 1, 0.01, 0.01 · 1, 0.01 · 1.1."""
    ratios = np.array([1.0, 0.01, 1.0, 1.1])
    found = coefficients("minpro", np.log(ratios).tolist(), advantage="mean")
    np.testing.assert_allclose(found, [1, 0.01, 0.01, 0.011], rtol=1e-12)
    held = coefficients("minpro", np.log(ratios).tolist(), advantage="mean", clip=(0.2, 0.28))
    np.testing.assert_allclose(held, [1, 0.8, 0.8, 0.8], rtol=1e-12)


def test_minpro_looks_back_alone() -> None:
    """Whatever order later ratios have, the weights before are the same."""
    later = [0.3, -0.2, 0.1]
    first = {
        tuple(coefficients("minpro", [-0.1, 0.2, *order], advantage="mean")[:2].tolist())
        for order in itertools.permutations(later)
    }
    assert len(first) == 1


def test_minpro_capped_is_cispo_where_no_ratio_is_below_1() -> None:
    ratios = [0.0, 0.05, 0.1, 0.14]
    capped = coefficients("minpro", ratios, advantage="mean", cap_at_one=True)
    np.testing.assert_allclose(capped, coefficients("cispo", ratios, advantage="mean"), rtol=1e-14)
    plain = coefficients("minpro", ratios[1:], advantage="mean")
    np.testing.assert_allclose(plain, np.exp([0.05, 0.15, 0.19]), rtol=1e-12)


def test_the_weight_of_vespo_by_hand() -> None:
    """W = ½ of the response: e^λ W^k e^(−λW) is e^1.5/4 where A > 0, e^1/8 where A < 0."""
    log_ratios = [np.log(0.5) + 0.3, -0.3]
    for better, expected in ((True, np.exp(1.5) / 4), (False, np.exp(1.0) / 8)):
        found = coefficients("vespo", log_ratios, better, advantage="mean")
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert (coefficients("vespo", [59.0, 0.0], advantage="mean") == 0).all()  # no overflow


def test_m2po_masks_the_largest_squares_of_the_step() -> None:
    """Squares 0.01, 0.04, 0.09, 0.16 of the first response and 0 of the second.

    The mean of all is 0.06, of all but the largest 0.035.
    """
    log_ratios = [0.1, -0.2, 0.3, -0.4]
    found = coefficients("m2po", log_ratios, advantage="mean", budget=0.04)
    np.testing.assert_allclose(found, [*np.exp(log_ratios[:3]), 0], rtol=1e-12)
    assert (coefficients("m2po", log_ratios, advantage="mean", budget=0.06 + 1e-12) > 0).all()


def test_m2po_of_the_authors_looks_at_harmful_tokens() -> None:
    """A > 0: those of 0.1 and 0.3. Their mean is 0.05; with the larger one counted as 0.01 it is 0.01."""
    log_ratios = [0.1, -0.2, 0.3, -0.4]
    found = coefficients("m2po", log_ratios, advantage="mean", tokens="harmful")
    np.testing.assert_allclose(found, np.exp([0.1, -0.2, -np.inf, -0.4]), rtol=1e-12)


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


def test_nested_reft_without_skipped_layers_has_one_rule() -> None:
    """μ is then the policy before the step; retrace weighs by λ at most."""
    case = draw(32)
    case.old_logp = case.behavior_logp
    np.testing.assert_array_equal(grad(case, "nested_reft"), grad(case, "nested_reft", mismatch="ignore"))
    on_policy = change(case, behavior_logp=case.logp)
    np.testing.assert_allclose(
        grad(on_policy, "nested_reft", mismatch="retrace", retrace=0.7), 0.7 * grad(on_policy, "nested_reft")
    )
    far = change(case, behavior_logp=case.logp - 3.0)
    np.testing.assert_allclose(
        grad(far, "nested_reft", mismatch="retrace"), grad(on_policy, "nested_reft"), atol=1e-15
    )


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


def test_asymre_adds_imitation_of_all_samples() -> None:
    """Its gradient minus that of REINFORCE with the group's mean: 0.1 times that of −log π of a response."""
    case = draw(36)
    ones = change(case, reward=[1.0] * len(case.reward))
    added = grad(case, "asymre") - grad(case, "reinforce", baseline="mean")
    np.testing.assert_allclose(added, 0.1 * grad(ones, "reinforce"), atol=1e-15)


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


def test_opmd_is_reinforce_of_another_step() -> None:
    case = draw(37)
    plain = grad(case, "rec")
    for tau in (0.5, 3.0):
        np.testing.assert_allclose(grad(case, "opmd", tau=tau), plain / (1 + tau), atol=1e-15)
        pairs = grad(case, "opmd", tau=tau, form="pairwise")
        np.testing.assert_allclose(pairs, 2 * tau / max(1, tau) * plain, atol=1e-15)
    with pytest.raises(Refused, match='form = "pairwise"'):
        evaluate(case, "opmd", {"form": "pairwise", "baseline": "soft"})


def test_kimi_is_reinforce_and_the_square_of_a_response() -> None:
    """2β times the gradient of −(r − r̄) log π + (β/2) e²; of one token opmd_token has β/2 = 0.1."""
    case = draw(38, groups=1, sizes=(3, 3), episodes=False)
    case.mask = np.zeros_like(case.mask)
    case.mask[:, 2] = True
    case.logp[:, 2], case.behavior_logp[:, 2] = [-1.0, -2.0, -3.0], [-1.5, -1.0, -3.0]
    np.testing.assert_allclose(grad(case, "kimi", beta=0.2), 2 * 0.2 * grad(case, "opmd_token"), atol=1e-15)


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
