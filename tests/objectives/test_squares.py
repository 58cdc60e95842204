"""Presets of squared_consistency: equalities with the published losses, and numbers by hand."""

from __future__ import annotations

from math import exp, log
from typing import Any

import numpy as np
import pytest
from cases import draw, evaluate

from agro import Batch, objectives
from agro.objectives import Evaluation

BETA = 0.4


def of_two(name: str, e: tuple[float, float], rewards: tuple[float, float], **options: Any) -> Evaluation:
    """Two responses of one token; e are their log-ratios to whatever the anchor is."""
    anchor = [[0.0, -3.0]] * 2
    batch = Batch.of(
        mask=[[0, 1]] * 2,
        reward=rewards,
        group=[0, 0],
        ref_logp=anchor,
        behavior_logp=anchor,
        old_logp=anchor,
        extra={"stored_value": [0.3, 0.3], "stored_quantile": [0.9, 0.2]},
    )
    return objectives.evaluate(name, [[0.0, -3.0 + x] for x in e], batch, **options)


@pytest.mark.parametrize(("name", "factor"), [("gvpo", 1.0), ("vargrad", 0.0), ("copg", 4.0), ("rebel", 4.0)])
def test_of_two_responses_they_are_multiples_of_agro(name: str, factor: float) -> None:
    """¼ (a_1 − a_2)² is AGRO's; GVPO's the same, CoPG's and REBEL's (a_1 − a_2)², VarGrad's over 2β²."""
    e, r = (0.7, -0.2), (1.0, 0.25)
    off = r[0] - r[1] - BETA * (e[0] - e[1])
    factor = factor or 2 * 0.5 / BETA**2
    out = of_two(name, e, r, beta=BETA)
    assert out.loss == pytest.approx(factor * off**2 / 4, rel=1e-13)
    slope = factor * BETA / 2 * off
    np.testing.assert_allclose(out.grad[:, 1], [-slope, slope], rtol=1e-12)


@pytest.mark.parametrize(("name", "per"), [("copg", lambda n: 2 * n), ("vargrad", lambda n: 2 * (n - 1) / n)])
def test_of_n_responses_they_are_multiples_of_agro(name: str, per: Any) -> None:
    """2n, and 2 (n − 1)/(n β²), times AGRO's loss."""
    for n in (2, 3, 5):
        case = draw(n, sizes=(n, n))
        found, agro = (
            evaluate(case, name, {"beta": BETA}),
            evaluate(case, "agro", {"beta": BETA, "scale": "loss"}),
        )
        factor = per(n) / (BETA**2 if name == "vargrad" else 1)
        assert found.loss == pytest.approx(factor * agro.loss, rel=1e-12)
        np.testing.assert_allclose(found.grad, factor * agro.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("h", [-3.0, 0.0, 0.25, 2.0])
def test_copg_with_a_gap_of_a_half_is_ipo(h: float) -> None:
    """β² (h − 1/(2β))², whichever response is first."""
    out = of_two("copg", (h, 0.0), (0.5, 0.0), beta=BETA)
    assert out.loss == pytest.approx(BETA**2 * (h - 1 / (2 * BETA)) ** 2, rel=1e-13)
    turned = of_two("copg", (0.0, h), (0.0, 0.5), beta=BETA)
    np.testing.assert_allclose(turned.grad, out.grad[::-1], rtol=1e-13)


def test_equal_rewards_pull_the_gap_of_log_ratios_to_0() -> None:
    for name in ("copg", "rebel"):
        assert of_two(name, (0.5, -0.5), (1.0, 1.0), beta=BETA).loss == pytest.approx(BETA**2)
        assert (of_two(name, (0.5, 0.5), (1.0, 1.0), beta=BETA).grad == 0).all()


def test_oapl_where_it_begins() -> None:
    """e = 0: −2β₂/n (r − V), V = β₁ log ½ (e^{r₁/β₁} + e^{r₂/β₁}); equal rewards leave 0."""
    out = of_two("oapl", (0.0, 0.0), (1.0, 0.0))
    V = log((exp(1.0) + 1) / 2)
    np.testing.assert_allclose(out.grad[:, 1], [-1e-3 * (1 - V), 1e-3 * V], rtol=1e-12)
    assert (of_two("oapl", (0.0, 0.0), (1.0, 1.0)).grad == 0).all()


def test_the_soft_maximum_lies_between_mean_and_maximum() -> None:
    """The loss at e = 0 is the mean of (r − V)²: rewards 1 and 0, V = ½ as β₁ → ∞, 1 as β₁ → 0."""
    assert of_two("oapl", (0.0, 0.0), (1.0, 0.0), value_beta=1e9).loss == pytest.approx(0.25, rel=1e-6)
    assert of_two("oapl", (0.0, 0.0), (1.0, 0.0), value_beta=1e-4).loss == pytest.approx(0.5, rel=1e-3)


def test_oapl_with_an_infinite_beta_is_kimi() -> None:
    case = draw(3)
    soft = evaluate(case, "oapl", {"beta": BETA, "value_beta": 1e9})
    kimi = evaluate(case, "kimi", {"beta": BETA})
    assert soft.loss == pytest.approx(kimi.loss, rel=1e-6)
    np.testing.assert_allclose(soft.grad, kimi.grad, atol=1e-7)


def test_apo_is_0_at_the_optimum() -> None:
    """π* = π_ref exp(r/β)/Z of one response, whose V* = β log Z is given: here r = 1, V* = 0.3."""
    out = of_two("apo", ((1.0 - 0.3) / BETA, (0.2 - 0.3) / BETA), (1.0, 0.2), beta=BETA)
    assert out.loss < 1e-30
    np.testing.assert_allclose(out.grad, 0, atol=1e-15)


def test_kimi_is_not_centered_in_the_log_ratios() -> None:
    """r − r̄ − τe, rewards ½ and −½ off their mean and e = (1, 1): (0.5 − τ)² and (0.5 + τ)², τ = 0.4."""
    out = of_two("kimi", (1.0, 1.0), (1.0, 0.0), beta=BETA)
    assert out.loss == pytest.approx((0.1**2 + 0.9**2) / 2, rel=1e-13)
    np.testing.assert_allclose(out.grad[:, 1], [-BETA * 0.1, BETA * 0.9], rtol=1e-12)


def test_qrpo_is_0_at_its_optimum() -> None:
    """log π/π_ref = q/β − log Z, Z = ∫₀¹ exp(q/β) dq by Simpson's rule; the rewards don't count."""
    q, beta = np.linspace(0, 1, 2001), 0.5
    weights = np.where(np.arange(2001) % 2, 4.0, 2.0)
    weights[[0, -1]] = 1.0
    log_z = log(float(weights @ np.exp(q / beta)) / 6000)
    out = of_two("qrpo", (0.9 / beta - log_z, 0.2 / beta - log_z), (7.0, -3.0), beta=beta)
    assert out.loss < 1e-20
    moved = of_two("qrpo", (0.9 / beta - log_z + 1.0, 0.2 / beta - log_z), (7.0, -3.0), beta=beta)
    assert moved.loss == pytest.approx(beta**2 / 2, rel=1e-9)


def test_tbrm_by_hand() -> None:
    """β/2 (ρ + V − r/β)²: ρ = 0.5, V = 2, r = 1, β = 0.4 are 0; ρ = −0.5, V = 1, r = 0 are 0.05. The slope of
    both ρ and V is β (ρ + V − r/β)/n."""
    batch = Batch.of(mask=[[0, 1]] * 2, reward=[1.0, 0.0], group=[0, 0], ref_logp=[[0.0, -3.0]] * 2)
    streams = {"normalizer": [[0.0, 2.0], [0.0, 1.0]]}
    out = objectives.evaluate("tbrm", [[0.0, -2.5], [0.0, -3.5]], batch, streams=streams, beta=BETA)
    assert out.loss == pytest.approx((0.0 + 0.05) / 2, rel=1e-12)
    for stream in ("logp", "normalizer"):
        np.testing.assert_allclose(out.grads[stream][:, 1], [0.0, BETA * 0.5 / 2], atol=1e-15)


def test_fpa_of_a_pair_is_simper_with_other_weights() -> None:
    """SimPER's −exp(mean log π_w) + exp(mean log π_l) has the slopes ∓c/T; half of that, as two responses are
    averaged. λ = 0: c of π; else that of π̂, which is given."""
    logp, future = [[0.0, -1.0, -2.0], [0.0, -0.5, 9.0]], [[0.0, -2.0, -2.0], [0.0, -4.0, 9.0]]
    batch = Batch.of(mask=[[0, 1, 1], [0, 1, 0]], reward=[1.0, 0.0], group=[0, 0])
    own = objectives.evaluate("fpa", logp, batch, extrapolation=0.0)
    assert own.loss == pytest.approx((exp(-0.5) - exp(-1.5)) / 2, rel=1e-12)
    np.testing.assert_allclose(own.grad, [[0, *[-exp(-1.5) / 4] * 2], [0, exp(-0.5) / 2, 0]], rtol=1e-12)
    beyond = objectives.evaluate("fpa", logp, batch, streams={"future": future})
    np.testing.assert_allclose(beyond.grad, [[0, *[-exp(-2.0) / 4] * 2], [0, exp(-4.0) / 2, 0]], rtol=1e-12)
