"""Identities of the objectives that mix own responses with an expert's, or learn from a teacher.

Of an expert (sections 1 and 11.0 to 11.4): two own responses of one token, with rewards 1 and 0, and an
expert's with the reward 1: the group's mean is 2/3, its advantages 1/3, -2/3 and 1/3. Of a teacher: sections
10, 11.5 and 11.12.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from agro import Batch, objectives
from agro.errors import Refused
from agro.train.phases import options_at
from agro_papers.methods.experts import shape_reward

ROLES = ["policy", "policy", "expert"]


def batch(role: list[str], reward: list[float], logp: list[float], **more: Any) -> tuple[Any, Batch]:
    """One token a response, own ones at the behavior policy; an expert's log-probs are unknown."""
    rows = [[0.0, x] for x in logp]
    known = [None if r == "expert" else row for r, row in zip(role, rows)]
    B = len(role)
    return rows, Batch.of(
        mask=[[False, True]] * B,
        reward=reward,
        role=role,
        **{"group": [0] * B, "behavior_logp": known, "old_logp": known, **more},
    )


def grad(name: str, rows: Any, given: Batch, **options: Any) -> list[float]:
    return objectives.evaluate(name, rows, given, **options).grad[:, 1].tolist()


@pytest.mark.parametrize(("p", "phi"), [(0.5, 0.25), (0.01, 0.0099), (0.99, 0.0099)])
def test_chord_weighs_a_token_of_the_expert_by_p_times_1_minus_p(p: float, phi: float) -> None:
    """N = 1 token of the expert: -μ φ(p). Most at p = 1/2, nothing at 0 and 1."""
    rows, given = batch(ROLES, [1, 0, math.nan], [-1, -1, math.log(p)])
    assert grad("chord", rows, given, mu=0.4)[2] == pytest.approx(-0.4 * phi, rel=1e-12)


def test_chord_at_mu_0_is_grpo_and_at_1_sft() -> None:
    rows, given = batch(ROLES, [1, 0, math.nan], [-1, -2, -3])
    own = given.rows(torch.tensor([0, 1]))
    assert grad("chord", rows, given, mu=0.0) == [*grad("grpo", rows[:2], own), 0.0]
    assert grad("chord", rows, given, mu=1.0, expert_weight="none") == [0.0, 0.0, -1.0]


def test_each_term_of_chord_has_its_own_count() -> None:
    """The expert's rows twice change nothing, also not in groups of their own; without any its term is 0."""
    rows, given = batch([*ROLES, "expert"], [1, 0, math.nan, math.nan], [-1, -2, -3, -3], group=[0, 0, 0, 1])
    one, two = grad("chord", rows[:3], given.rows(torch.arange(3))), grad("chord", rows, given)
    assert two == pytest.approx([*one[:2], one[2] / 2, one[2] / 2], rel=1e-14)
    own = given.rows(torch.arange(2))
    assert grad("chord", rows[:2], own) == pytest.approx(one[:2], rel=1e-14)
    alone = given.rows(torch.tensor([3]))
    assert grad("chord", rows[3:], alone, mu=1.0, expert_weight="none") == [-1.0]


def test_what_is_unknown_of_own_rows_is_refused() -> None:
    rows, given = batch(ROLES, [1, 0, math.nan], [-1, -2, -3])
    for changes in ({"behavior_logp": None}, {"reward": torch.full((3,), math.nan)}):
        with pytest.raises(Refused, match="1 of 3 rows have it, 2 don't"):
            objectives.evaluate("chord", rows, given.replace(**changes))
    with pytest.raises(Refused, match="groups of at least 2 responses: 0 of 1 groups"):
        objectives.evaluate("chord", rows[1:], given.rows(torch.tensor([1, 2])))
    same = given.replace(response=torch.tensor([0, 1, 1]), reward=torch.zeros(3))
    with pytest.raises(Refused, match=r"role: .*rows of one response have different values"):
        objectives.evaluate("chord", rows, same)


def test_the_schedule_of_mu() -> None:
    """W = 4, D = 8, P = 0.9, U = 0.1: 0, P/2 at W/2, P at W, the middle at W + D/2, U from W + D on."""
    mu = {"start": 0.9, "end": 0.1, "steps": 8, "shape": "cosine", "warmup": 4}
    found = [options_at({"x": mu}, step)["x"] for step in (0, 2, 4, 8, 12, 99)]
    assert found == pytest.approx([0.0, 0.45, 0.9, 0.5, 0.1, 0.1], rel=1e-12)
    assert options_at({"x": {"start": 0.9, "end": 0.1, "steps": 0, "warmup": 0}}, 0)["x"] == pytest.approx(
        0.1
    )


def test_luffy_counts_a_token_most_at_gamma() -> None:
    """A γ p/(p + γ)²/3: A/4 at p = γ. A teacher's wrong response is pushed down with the same weight."""
    for reward, A in (([1, 0, 1], 1 / 3), ([1, 1, 0], -2 / 3)):
        found = {}
        for p in (0.05, 0.1, 0.2):
            rows, given = batch(ROLES, reward, [-1, -1, math.log(p)])
            found[p] = grad("luffy", rows, given)[2]
            assert found[p] == pytest.approx(-A * 0.1 * p / (p + 0.1) ** 2 / 3, rel=1e-12)
        assert found[0.1] == pytest.approx(-A / 4 / 3, rel=1e-12)
        assert max(found, key=lambda p: abs(found[p])) == 0.1


def test_luffy_with_a_large_gamma_is_the_plain_probability() -> None:
    rows, given = batch(ROLES, [1, 0, 1], [-1, -1, -2])
    assert 1e9 * grad("luffy", rows, given, gamma=1e9)[2] == pytest.approx(-math.exp(-2) / 9, rel=1e-8)


@pytest.mark.parametrize("name", ["luffy", "ampo", "guide"])
def test_a_group_without_a_wrong_response_stands_still(name: str) -> None:
    rows, given = batch(ROLES, [1, 1, 1], [-1, -2, -3], extra={"hinted": [0, 1, 0]})
    given = given.replace(behavior_logp=torch.tensor(rows, dtype=torch.float64))
    assert grad(name, rows, given) == [0, 0, 0]


def test_ampo_clips_own_tokens_on_both_sides() -> None:
    """A = -2/3 at the second: w = 0.7 is clamped, 4 is held at 3; A = 1/3 at the first: 1.3 stops."""
    for place, w, moves in ((1, 0.7, 0), (1, 2.9, 2.9), (1, 4, 0), (0, 1.3, 0), (0, 0.5, 0.5)):
        rows, given = batch(ROLES, [1, 0, 1], [-1, -1, -1])
        old = given.behavior_logp.clone()
        old[place, 1] -= math.log(w)
        A = (1 / 3, -2 / 3)[place]
        found = grad("ampo", rows, given.replace(behavior_logp=old))[place]
        assert found == pytest.approx(-moves * A / 3, abs=1e-15)


def test_guide_without_hints_is_ppo_and_its_gamma_has_no_scale() -> None:
    """Multiplying the ratios of all hinted tokens by e leaves w/(w + q90(w)) as it is."""
    rows, given = batch(["policy"] * 3, [1, 0, 1], [-1, -2, -3], extra={"hinted": [0.0] * 3})
    assert grad("guide", rows, given) == pytest.approx(grad("grpo", rows, given), rel=1e-14)
    hinted = given.replace(extra={"hinted": torch.tensor([0.0, 1.0, 1.0])})
    plain = grad("guide", rows, hinted)
    other = hinted.behavior_logp.clone()
    other[1:, 1] -= 1
    assert grad("guide", rows, hinted.replace(behavior_logp=other)) == pytest.approx(plain, rel=1e-12)
    # both ratios are 1 and so is γ: f = 1/2, and f (1 - f) = 1/4 of the advantage
    assert plain[1:] == pytest.approx([x / 4 for x in grad("grpo", rows, given)[1:]], rel=1e-12)
    fixed = grad("guide", rows, hinted.replace(behavior_logp=other), gamma=1.0)
    assert abs(fixed[1] - plain[1]) > 1e-3


def test_tempsamps_shape() -> None:
    """0.8 - (e^(0.8 - r) - 1)/(e - 1), and 0.8 + 0.01 log(r + 0.2): the specification's numbers."""
    found = shape_reward(torch.tensor([0, 0.2, 0.5, 0.8, 1], dtype=torch.float64), 0.8)
    assert found.tolist() == pytest.approx([0.087, 0.322, 0.596, 0.8, 0.802], abs=5e-4)
    around = shape_reward(torch.tensor([0.8 - 1e-9, 0.8 + 1e-9], dtype=torch.float64), 0.8)
    assert 0 < float(around.diff()) < 1e-8


def test_tempsamps_anchor_ignores_the_experts_reward() -> None:
    """Own advantages ±1/√2 of rewards 1 and 0; the expert's is 1.2 times the best."""
    for reward in (1.0, -5.0, math.nan):
        rows, given = batch(ROLES, [1, 0, reward], [-1, -2, -3])
        found = grad("tempsamp_r1", rows, given, fix="anchor")
        root = 0.5 / (math.sqrt(0.5) + 1e-6)
        assert found == pytest.approx([-root / 3, root / 3, -1.2 * root / 3], rel=1e-12)
    rows, given = batch(ROLES, [1, 1, 1], [-1, -2, -3])
    assert grad("tempsamp_r1", rows, given, fix="anchor") == [0, 0, 0]


def test_tempsamps_cap() -> None:
    """The expert's reward of 1 counts as 0.8: with own rewards 1 and 0 the mean is 0.6."""
    rows, given = batch(ROLES, [1, 0, 1], [-1, -2, -3])
    found = np.array(grad("tempsamp_r1", rows, given, fix="cap"))
    np.testing.assert_allclose(found / found[2], [2, -3, 1], rtol=1e-12)  # 0.4, -0.6 and 0.2


def test_hnpg_takes_old_responses_of_an_expert_for_its_value_alone() -> None:
    """V = 0.3: own r = 1, off by 0.7; the expert's r = 0, off by −0.3, and no gradient in its log-probs."""
    given: dict[str, Any] = {"mask": [[0, 1]] * 2, "reward": [1.0, 0.0], "group": "aa"}
    logp, values = [[0.0, -1.0]] * 2, {"value": [0.3, 0.3]}
    batch = Batch.of(role=["policy", "expert"], staleness=[0.0, math.nan], **given)
    out = objectives.evaluate("hnpg", logp, batch, streams=values, offline=0.5)
    np.testing.assert_allclose(out.grad[:, 1], [-0.7, 0.0], rtol=1e-13)
    np.testing.assert_allclose(out.grads["value"], [-0.7, 0.5 * 0.3], rtol=1e-13)
    stale = Batch.of(role=["policy", "policy"], staleness=[0.0, 3.0], **given)
    with pytest.raises(Refused, match=r"objective hnpg needs samples of staleness 0.*row 1"):
        objectives.evaluate("hnpg", logp, stale, streams=values)


P = np.array([0.5, 0.3, 0.15, 0.05])
F = np.array([0.1, 0.2, 0.3, 0.4])


def each_token(given: Any = P, **more: Any) -> tuple[Any, Batch]:
    """One row for each of four tokens, weighted by the probability that it is sampled with."""
    rows = [[0.0, math.log(p)] for p in P]
    B = len(P)
    return rows, Batch.of(
        mask=[[False, True]] * B, reward=[math.nan] * B, group=range(B), weight=list(given), **more
    )


def logps(p: Any) -> list[list[float]]:
    return [[0.0, math.log(x)] for x in p]


def in_logits(grad: Any) -> np.ndarray:
    """Σ_a g_a (1_a - π): the gradient in the logits of the four tokens."""
    g = np.asarray(grad)[:, 1]
    return g - P * g.sum()


@pytest.mark.parametrize("kappa", [1.0, 1.7])
def test_otr_is_the_expectation_of_its_draws(kappa: float) -> None:
    """200,000 tokens drawn from q ∝ p^(1/κ): 1/√K = 0.002, rewards of size 1, log-probs of 3."""
    q = P ** (1 / kappa) / (P ** (1 / kappa)).sum()
    draws = np.random.default_rng(0).multinomial(200_000, q) / 200_000
    rows, given = each_token()
    found = []
    for share in (q, draws):
        streams = {"proposal": [[0.0, x] for x in share]}
        streams["proposal_mean"] = [[0.0, float(share @ np.log(P))]] * 4
        out = objectives.evaluate("otr", rows, given, streams=streams, temperature=kappa)
        # g_mean · d Σ q log π = g_mean (q - π)
        by_mean = out.grads["proposal_mean"][:, 1].sum() * (share - P)
        found.append(in_logits(out.grad) + by_mean)
    np.testing.assert_allclose(found[0], found[1], atol=0.01)
    R = np.where(np.eye(4) == 1, 1.0, -0.1)  # of each given token and each drawn one
    # Σ_a R q (1_a - π), whose sum over a is Σ_a R q of π
    sampled = [-(R[x] * q - P * (R[x] * q).sum()) for x in range(4)]
    np.testing.assert_allclose(found[0], P @ np.array(sampled), rtol=1e-10, atol=1e-14)


def test_at_temperature_1_otr_is_sft_weighted_by_p() -> None:
    """(1 - β_o) p times the gradient of sft; Σ q log π has none there."""
    rows, given = each_token()
    streams = {"proposal": [[0.0, p] for p in P], "proposal_mean": [[0.0, float(P @ np.log(P))]] * 4}
    out = objectives.evaluate("otr", rows, given, streams=streams, negative=-0.25)
    plain = objectives.evaluate("sft", rows, given)
    np.testing.assert_allclose(out.grad[:, 1], 1.25 * P * plain.grad[:, 1], rtol=1e-12)


def divergence(p: torch.Tensor, kind: str | float) -> torch.Tensor:
    f = torch.tensor(F)
    if kind == "reverse":
        return (p * (p / f).log()).sum()
    if kind == "forward":
        return (f * (f / p).log()).sum()
    beta = float(kind)
    m = beta * f + (1 - beta) * p
    return beta * (f * (f / m).log()).sum() + (1 - beta) * (p * (p / m).log()).sum()


@pytest.mark.parametrize("kind", ["reverse", "forward", 0.5, 0.1])
@pytest.mark.parametrize("behavior", [P, np.array([0.25, 0.25, 0.4, 0.1])], ids=["own", "other"])
def test_distillation_over_samples_is_the_divergence_over_the_vocabulary(
    kind: Any, behavior: np.ndarray
) -> None:
    """Value and gradient, in expectation over the tokens that the behavior policy samples."""
    rows, given = each_token(behavior, ref_logp=logps(F), behavior_logp=logps(behavior))
    out = objectives.evaluate("distill", rows, given, divergence=kind)
    z = torch.tensor(np.log(P), requires_grad=True)
    exact = divergence(z.softmax(0), kind)
    assert out.loss == pytest.approx(float(exact), rel=1e-12)
    [expected] = torch.autograd.grad(exact, z)
    np.testing.assert_allclose(in_logits(out.grad), expected, rtol=1e-10, atol=1e-14)


def test_a_policy_that_is_its_teacher_stands_still() -> None:
    rows, given = each_token(ref_logp=logps(P), behavior_logp=logps(P))
    for kind in ("reverse", "forward", 0.3):
        out = objectives.evaluate("distill", rows, given, divergence=kind)
        assert np.abs(in_logits(out.grad)).max() < 1e-15
        assert abs(out.loss) < 1e-15


def kept(nll: list[float], low: float, high: float) -> list[int]:
    B = len(nll)
    given = Batch.of(mask=[[False, True]] * B, reward=[math.nan] * B, group=range(B))
    out = objectives.evaluate("middle_band", [[0.0, -x] for x in nll], given, low=low, high=high)
    assert out.metrics["kept_share"] == pytest.approx((out.grad[:, 1] != 0).mean() if B else 0)
    return np.flatnonzero(out.grad[:, 1]).tolist()


def test_the_middle_band() -> None:
    """Of ten the second to the eighth; a constant more in all changes nothing, a wider band takes no one
    out."""
    nll = [5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 9.0, 7.0, 8.0, 10.0]
    assert [nll[i] for i in kept(nll, 0.2, 0.8)] == [5, 4, 2, 3, 6, 7, 8]
    assert kept([x + 3 for x in nll], 0.2, 0.8) == kept(nll, 0.2, 0.8)
    assert set(kept(nll, 0.2, 0.8)) < set(kept(nll, 0.1, 0.9))
    assert kept(nll, 0.0, 1.0) == list(range(10))
    assert kept([2.0] * 5, 0.4, 0.6) == list(range(5))
