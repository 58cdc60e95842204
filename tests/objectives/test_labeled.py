"""Objectives whose labels are rewards, and those on pairs with a part of their own: identities and numbers by
hand."""

from __future__ import annotations

from math import exp, log
from typing import Any

import numpy as np
import pytest
from cases import change, draw, evaluate

from agro import Batch, objectives
from agro.objectives import Evaluation

BETA = 0.4


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def on(
    name: str,
    rho: list[float],
    rewards: list[float],
    *,
    group: str = "",
    meaning: list[float] | None = None,
    **options: Any,
) -> Evaluation:
    """Responses of one token whose log-ratios to the reference are ρ; one group unless `group` says which."""
    n = len(rho)
    batch = Batch.of(
        mask=[[0, 1]] * n,
        reward=rewards,
        group=[*(group or "a" * n)],
        ref_logp=[[0.0, -9.0]] * n,
        extra={} if meaning is None else {"meaning": meaning},
    )
    if meaning is not None:
        options["equivalent"] = "meaning"
    logp = [[0.0, x - 9.0] for x in rho]
    return objectives.evaluate(name, logp, batch, **{"beta": BETA} | options)


def of_pairs(name: str, rho: list[float], pairs: Any, ref: Any = None, **options: Any) -> Evaluation:
    n = len(rho)
    ref = ref or [-9.0] * n
    anchor = [[0.0, x] for x in ref]
    batch = Batch.of(
        mask=[[0, 1]] * n, reward=[0] * n, group=[0] * n, ref_logp=anchor, behavior_logp=anchor, pairs=pairs
    )
    logp = [[0.0, x + f] for x, f in zip(rho, ref)]
    return objectives.evaluate(name, logp, batch, **{"beta": BETA} | options)


def test_kto_by_hand() -> None:
    """ρ = 1, −0.4, 0.6, of which the mean is z₀ = 0.4; good, bad, good: σ(β(z₀ − ρ)), σ(β(ρ − z₀))."""
    out = on("kto", [1.0, -0.4, 0.6], [1.0, 0.0, 1.0])
    value = [sigmoid(BETA * x) for x in (-0.6, -0.8, -0.2)]
    assert out.metrics["reference_point"] == pytest.approx(0.4, rel=1e-14)
    assert out.loss == pytest.approx(sum(value) / 3, rel=1e-13)
    slopes = [sign * BETA * v * (1 - v) / 3 for sign, v in zip((-1, 1, -1), value)]
    np.testing.assert_allclose(out.grad[:, 1], slopes, rtol=1e-12)


def test_kto_where_it_begins_and_its_weights() -> None:
    """ρ = 0: ½ each, slopes ∓β/4; a threshold says who is good; λ multiply."""
    out = on("kto", [0.0, 0.0], [0.7, 0.3], threshold=0.5, desirable=2.0, undesirable=3.0)
    assert out.loss == pytest.approx((2 + 3) / 2 / 2)
    np.testing.assert_allclose(out.grad[:, 1], [-2 * BETA / 8, 3 * BETA / 8], rtol=1e-13)


def test_a_reference_point_is_0_at_least() -> None:
    """ρ = −1 and −3: their mean isn't a divergence. Without one it is 0 too."""
    found = on("kto", [-1.0, -3.0], [1.0, 0.0])
    assert found.metrics["reference_point"] == 0
    assert found.loss == on("kto", [-1.0, -3.0], [1.0, 0.0], kl="none").loss
    above = on("kto", [1.0, 3.0], [1.0, 0.0], kl="none")
    assert above.metrics["reference_point"] == 0
    assert above.loss == pytest.approx((sigmoid(-BETA) + sigmoid(3 * BETA)) / 2)


def test_online_dpo_is_dpo_on_the_best_and_the_worst() -> None:
    out = on("online_dpo", [0.3, 1.0, -0.5], [0.5, 0.1, 0.9])
    pair = of_pairs("dpo", [0.3, 1.0, -0.5], [(2, 1)])
    assert out.loss == pytest.approx(pair.loss, rel=1e-14)
    np.testing.assert_allclose(out.grad, pair.grad, rtol=1e-13)


def test_all_that_are_as_good_make_pairs() -> None:
    out = on("online_dpo", [0.3, 1.0, -0.5, 0.1], [1.0, 0.0, 1.0, 0.5])
    both = of_pairs("dpo", [0.3, 1.0, -0.5, 0.1], [(0, 1), (2, 1)])
    assert out.loss == pytest.approx(both.loss, rel=1e-14)
    np.testing.assert_allclose(out.grad, both.grad, rtol=1e-13)


def test_a_group_with_equal_rewards_has_no_pair() -> None:
    """It counts 0 in the mean over groups, and not at all in the metrics."""
    alone = on("online_dpo", [1.0, 0.0], [1.0, 0.0])
    out = on("online_dpo", [1.0, 0.0, 2.0, -1.0], [1.0, 0.0, 1.0, 1.0], group="aabb")
    assert out.loss == pytest.approx(alone.loss / 2, rel=1e-14)
    assert (out.grad[2:] == 0).all()
    assert out.metrics["ordered_share"] == 1
    assert out.metrics["implicit_margin"] == pytest.approx(BETA)
    none = on("online_dpo", [1.0, 0.0], [1.0, 1.0])
    assert none.loss == 0
    assert (none.grad == 0).all()
    assert np.isnan(none.metrics["ordered_share"])


def test_gepo_of_one_good_and_one_bad_response_is_dpo() -> None:
    out, pair = on("gepo", [0.8, 0.3], [1.0, 0.0]), of_pairs("dpo", [0.8, 0.3], [(0, 1)])
    assert out.loss == pytest.approx(pair.loss, rel=1e-14)
    np.testing.assert_allclose(out.grad, pair.grad, rtol=1e-13)


def test_the_variance_of_gepo_is_agro_with_equal_rewards() -> None:
    """All good: Var with 1/n of β ρ, which is 2(n − 1)/n times AGRO's loss; 0 where they share ρ."""
    rho = [0.8, 0.3, -0.4]
    out = on("gepo", rho, [1.0] * 3)
    agro = on("agro", rho, [1.0] * 3, scale="loss")
    assert out.loss == pytest.approx(4 / 3 * agro.loss, rel=1e-13)
    np.testing.assert_allclose(out.grad, 4 / 3 * agro.grad, rtol=1e-12)
    assert on("gepo", rho, [1.0] * 3, unit="nat").loss == pytest.approx(out.loss / BETA**2, rel=1e-13)
    assert on("gepo", [0.8, 0.8], [1.0] * 2).loss < 1e-30


def test_gepo_without_a_good_response_or_with_a_shift() -> None:
    assert on("gepo", [0.8, 0.3], [0.0, 0.0]).loss == 0
    rho, rewards = [0.8, 0.3, -0.4, 0.0], [1.0, 1.0, 0.0, 0.0]
    moved = on("gepo", [x + 0.7 for x in rho], rewards)
    assert moved.loss == pytest.approx(on("gepo", rho, rewards).loss, rel=1e-13)
    # ρ̄ are 0.55 and −0.2; Var_W is 0.25² · β²
    assert moved.loss == pytest.approx(log(1 + exp(-BETA * 0.75)) + BETA**2 * 0.0625, rel=1e-13)


def test_two_spellings_share_the_weight_of_one_response() -> None:
    """Good ones: two spellings of one answer, and another answer. Without the variance, whose share is 0, the
    slope of each spelling is half that of the other answer; by reward all three have the same one."""
    rho, rewards, meaning = [0.8, 0.8, 0.3, -0.4], [1.0, 1.0, 1.0, 0.0], [7.0, 7.0, 3.0, 9.0]
    out = on("gepo", rho, rewards, meaning=meaning, variance=0.0).grad[:, 1]
    assert out[0] == out[1] == pytest.approx(out[2] / 2, rel=1e-14)
    assert out.sum() == pytest.approx(0, abs=1e-15)
    by_reward = on("gepo", rho, rewards, variance=0.0).grad[:, 1]
    assert by_reward[0] == by_reward[2] == pytest.approx(-by_reward[3] / 3, rel=1e-14)
    # a spelling more of an answer changes nothing
    once = on("gepo", rho[1:], rewards[1:], meaning=meaning[1:])
    assert on("gepo", rho, rewards, meaning=meaning).loss == pytest.approx(once.loss, rel=1e-14)


def test_only_responses_of_one_meaning_are_to_be_alike() -> None:
    """Var of 0.8 and 0.2 is 0.09, of one response 0; the mean over two meanings is 0.045. None is bad."""
    out = on("gepo", [0.8, 0.2, 5.0], [1.0] * 3, meaning=[7.0, 7.0, 3.0])
    assert out.loss == pytest.approx(BETA**2 * 0.045, rel=1e-13)


@pytest.mark.parametrize("h", [-1.0, 0.0, 2.0, 4.0])
def test_the_hinge(h: float) -> None:
    """max(0, 1 − βh), slopes ∓β below 1, which is at h = 2.5."""
    out = of_pairs("slic", [0.0, h], [(1, 0)])
    assert out.loss == pytest.approx(max(0.0, 1 - BETA * h), abs=1e-15)
    slope = -BETA if h < 2.5 else 0.0
    np.testing.assert_allclose(out.grad[:, 1], [-slope, slope])


def test_the_calibration_of_slic_is_on_log_probs() -> None:
    """δ − (log π_w − log π_l), −1 and −9: no loss; the other way round 1 + 8. With a term −λ log π_w."""
    options = {"anchor": "none", "beta": 1.0}
    assert of_pairs("slic", [0.0, 0.0], [(1, 0)], [-9.0, -1.0], **options).loss == 0
    assert of_pairs("slic", [0.0, 0.0], [(0, 1)], [-9.0, -1.0], **options).loss == 9
    with_target = of_pairs("slic", [0.0, 0.0], [(0, 1)], [-9.0, -1.0], imitation=0.1, **options)
    assert with_target.loss == pytest.approx(9 + 0.1 * 9)


def test_seppo_flips_with_the_sign_of_the_winners_log_ratio() -> None:
    """Fits: DPO against the sample; else −log σ(β(ρ_w + ρ_0)), or −log σ(β ρ_w)."""
    fits = of_pairs("seppo", [0.6, 0.2], [(0, 1)])
    dpo = of_pairs("dpo", [0.6, 0.2], [(0, 1)])
    assert fits.loss == pytest.approx(dpo.loss, rel=1e-14)
    np.testing.assert_allclose(fits.grad, dpo.grad, rtol=1e-13)
    flipped = of_pairs("seppo", [-0.6, 0.2], [(0, 1)])
    assert flipped.loss == pytest.approx(log(1 + exp(BETA * 0.4)), rel=1e-13)
    assert flipped.grad[0, 1] == flipped.grad[1, 1] < 0
    dropped = of_pairs("seppo", [-0.6, 0.2], [(0, 1)], doubt="drop")
    assert dropped.loss == pytest.approx(log(1 + exp(BETA * 0.6)), rel=1e-13)
    assert dropped.grad[1, 1] == 0
    assert of_pairs("seppo", [0.0, 0.2], [(0, 1)]).loss == pytest.approx(log(1 + exp(BETA * 0.2)))


def test_opa_dpo_without_its_term_is_the_mean_of_two_dpo_losses() -> None:
    """The given answer and the revised one over the model's own, which is response 2."""
    rho = [0.8, 0.3, -0.4]
    parts = [of_pairs("dpo", rho, [pair]).loss for pair in ((0, 2), (1, 2))]
    assert of_pairs("opa_dpo", rho, [(0, 2), (1, 2)], winner=0.0).loss == pytest.approx(sum(parts) / 2)
    term = (log(1 + exp(-BETA * 0.8)) + log(1 + exp(-BETA * 0.3))) / 2
    assert of_pairs("opa_dpo", rho, [(0, 2), (1, 2)]).loss == pytest.approx(sum(parts) / 2 + term)


def test_against_recorded_log_probs_fresh_pairs_begin_at_log_2() -> None:
    case = change(draw(4), behavior_logp=draw(4).logp, ref_logp=np.full_like(draw(4).logp, np.nan))
    out = evaluate(case, "agent_q", {"beta": BETA})
    assert out.loss == pytest.approx(log(2), rel=1e-14)
    assert out.metrics["implicit_margin"] == 0


@pytest.mark.parametrize("c", [-2.0, -0.1, 0.3, 2.0])
@pytest.mark.parametrize("h", [-1.0, 0.2, 0.35, 3.0])
def test_a_pair_is_ranked_where_the_loss_is_below_its_threshold(c: float, h: float) -> None:
    """log π_w ≥ log π_l exactly where DPO's loss is −log σ(βc) at most, c = f_l − f_w (arXiv 2405.19534)."""
    out = of_pairs("dpo", [h, 0.0], [(0, 1)], [-9.0 - c, -9.0])
    assert (out.loss <= log(1 + exp(-BETA * c))) == bool(out.metrics["ranked_share"])
    assert out.metrics["ranked_share"] == (h - c >= 0)
    assert out.metrics["ranked_share_anchor"] == (c <= 0)
    assert out.metrics["ranked_share_ideal"] == 1
    smooth = of_pairs("dpo", [h, 0.0], [(0, 1)], [-9.0 - c, -9.0], label_smoothing=0.4)
    assert smooth.metrics["ranked_share_ideal"] == (-c + log(0.6 / 0.4) / BETA >= 0)


def test_equal_policies_order_nothing_and_rank_as_they_do() -> None:
    """h = 0 everywhere: a tie isn't in order; in the ranking it counts as right."""
    out = of_pairs("dpo", [0.0] * 3, [(0, 1), (0, 2), (1, 2)], [-1.0, -2.0, -1.0])
    assert out.metrics["ordered_share"] == 0
    assert out.metrics["ranked_share"] == pytest.approx(2 / 3)


def test_the_ranking_per_token() -> None:
    """−3 over two tokens is more than −2 over one, per token."""
    batch = Batch.of(
        mask=[[0, 1, 1], [0, 1, 0]], reward=[0, 0], group=[0, 0], ref_logp=[[0, -1, -1]] * 2, pairs=[[0, 1]]
    )
    found = objectives.evaluate("dpo", [[0, -1.5, -1.5], [0, -2.0, 0]], batch, beta=BETA).metrics
    assert (found["ranked_share"], found["ranked_share_per_token"]) == (0, 1)


@pytest.mark.parametrize("name", ["ipo", "dpo"])
def test_swapping_labels_turns_the_gradient_at_h_0(name: str) -> None:
    one, other = (of_pairs(name, [0.0, 0.0], [pair]).grad for pair in ((0, 1), (1, 0)))
    np.testing.assert_array_equal(one, -other)


def test_ipo_is_least_at_its_gap() -> None:
    assert of_pairs("ipo", [1 / (2 * BETA), 0.0], [(0, 1)]).loss < 1e-30
    assert of_pairs("ipo", [0.0, 0.0], [(0, 1)]).loss == pytest.approx(1 / (2 * BETA) ** 2)
