"""What test_agreement.py can't see of methods: metrics, edges, expectations, and what on-policy AGRO says of
its trap.

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
from cases import at, batch_of, change, column, draw, evaluate, of_one_token

from agro import Batch, objectives
from agro.errors import Refused
from agro.objectives import advantage
from agro.objectives.ingredients import log_ratio
from agro.objectives.methods import consistency
from agro.objectives.methods.clipped import explained_variance
from agro.objectives.reduce import Groups
from agro.train.phases import options_at
from agro_papers.methods.experts import shape_reward
from agro_papers.methods.trust_region import searched_bounds


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
    case = draw(3, spread=1.0)
    out = evaluate(change(case, logp=np.where(case.mask, case.old_logp, 0.0)), "remix", {})
    assert out.metrics["clipped_share"] == 0
    assert out.metrics["ratio_max"] > 3


@pytest.mark.parametrize("odds", [0.0, 0.8, 1.0, 1.2, 1e6])
@pytest.mark.parametrize("criterion", ["value", "gradient"])
def test_the_bounds_of_bapo_stay_in_their_ranges(odds: float, criterion: str) -> None:
    """Those that it finds in one step, c_high first; all tokens count alike."""
    low, high = (0.6, 0.9, 0.02), (1.2, 3.0, 0.05)
    case = draw(6, groups=20, spread=0.6)
    batch, logp = batch_of(case), torch.as_tensor(case.logp)
    groups = Groups.of(batch)
    size = torch.where(batch.mask, groups.at_tokens(advantage.standardized(groups)), 0.0)
    w = log_ratio({"logp": logp}, batch, "behavior").exp()
    found = searched_bounds(w, size, odds, low, high, criterion, first="high")
    for bound, (start, end, _) in zip(found, (low, high), strict=True):
        assert start <= bound <= end
        assert odds != 0 or bound == start
        assert odds != 1e6 or bound == end


def test_m2po_without_a_kept_token_stands_still() -> None:
    case = draw(31, spread=0.0)
    case.behavior_logp = case.logp - 1.0
    assert (evaluate(case, "m2po", {}).grad == 0).all()


def test_a_small_ratio_counts_for_every_later_token_of_minpro() -> None:
    """Ratios 1, 0.01, 1 and 1.1, of which the bound holds all but the first at 0.8; A = 1/√2, of 5 tokens."""
    behavior = -60.0 - np.log([[1, 1, 0.01, 1, 1.1], [1] * 5])
    mask = [[0, 1, 1, 1, 1], [0, 1, 0, 0, 0]]
    batch = Batch.of(mask=mask, reward=[1.0, 0.0], group=[0, 0], behavior_logp=behavior)
    out = objectives.evaluate("minpro", np.full((2, 5), -60.0), batch, clip=(0.2, 0.28))
    A = 0.5 / (0.5**0.5 + 1e-6)
    np.testing.assert_allclose(out.grad[0, 1:] * -5 / A, [1, 0.8, 0.8, 0.8], rtol=1e-12)


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
    out = objectives.evaluate("rec", [[-1.0] * 4] * 4, batch, advantage=kind)  # a mean over 6 tokens
    np.testing.assert_allclose(np.asarray(out.grad)[:, 1] * -6, expected, rtol=1e-5)


def test_certain_tokens_have_no_baseline() -> None:
    """π = 1 of the first token in both: W = 0, so b = 0 there. After it π is ½ and ¼ with Σ π² = ½, so
    1 − 2π + Σ π² of ½ and 1: b = ⅓ (OTB). And π and q as float32 rounds them leave b between the rewards."""
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
        assert (at(-1.0, "rec", of_one_token([r] * 3), advantage=kind).grad == 0).all()


# Two own responses of one token, with rewards 1 and 0, and an expert's with the reward 1: the group's mean
# is 2/3, its advantages 1/3, -2/3 and 1/3.
ROLES = ["policy", "policy", "expert"]


def with_experts(role: list[str], reward: list[float], logp: list[float], **more: Any) -> tuple[Any, Batch]:
    """Of one token, own ones at the behavior policy; an expert's log-probs are unknown."""
    known = [math.nan if r == "expert" else x for r, x in zip(role, logp, strict=True)]
    batch = of_one_token(reward, role=role, **{"behavior_logp": known, "old_logp": known, **more})
    return column(logp, len(logp)), batch


def grad(name: str, rows: Any, given: Batch, **options: Any) -> list[float]:
    return objectives.evaluate(name, rows, given, **options).grad[:, 1].tolist()


def test_chord_without_own_or_without_experts_rows() -> None:
    """Each term has its own count: the expert's is 0 without any, and stays as it is alone."""
    roles, rewards = [*ROLES, "expert"], [1, 0, math.nan, math.nan]
    rows, given = with_experts(roles, rewards, [-1, -2, -3, -3], group=[0, 0, 0, 1])
    own, alone = given.rows(torch.arange(2)), given.rows(torch.tensor([3]))
    assert grad("chord", rows[:2], own) == pytest.approx(grad("chord", rows, given)[:2], rel=1e-14)
    assert grad("chord", rows[3:], alone, mu=1.0, expert_weight="none") == [-1.0]


def test_what_is_unknown_of_own_rows_is_refused() -> None:
    rows, given = with_experts(ROLES, [1, 0, math.nan], [-1, -2, -3])
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
    at_once = {"start": 0.9, "end": 0.1, "steps": 0, "warmup": 0}
    assert options_at({"x": at_once}, 0)["x"] == pytest.approx(0.1)


def test_guide_without_hints_is_grpo() -> None:
    rows, given = with_experts(["policy"] * 3, [1, 0, 1], [-1, -2, -3], extra={"hinted": [0.0] * 3})
    assert grad("guide", rows, given) == pytest.approx(grad("grpo", rows, given), rel=1e-14)


def test_tempsamps_shape() -> None:
    """0.8 - (e^(0.8 - r) - 1)/(e - 1), and 0.8 + 0.01 log(r + 0.2): the specification's numbers."""
    found = shape_reward(torch.tensor([0, 0.2, 0.5, 0.8, 1], dtype=torch.float64), 0.8)
    assert found.tolist() == pytest.approx([0.087, 0.322, 0.596, 0.8, 0.802], abs=5e-4)
    around = shape_reward(torch.tensor([0.8 - 1e-9, 0.8 + 1e-9], dtype=torch.float64), 0.8)
    assert 0 < float(around.diff()) < 1e-8


def test_tempsamps_anchor_ignores_the_experts_reward() -> None:
    """Own advantages ±1/√2 of rewards 1 and 0; the expert's is 1.2 times the best."""
    for reward in (1.0, -5.0, math.nan):
        rows, given = with_experts(ROLES, [1, 0, reward], [-1, -2, -3])
        found = grad("tempsamp_r1", rows, given, fix="anchor")
        root = 0.5 / (math.sqrt(0.5) + 1e-6)
        assert found == pytest.approx([-root / 3, root / 3, -1.2 * root / 3], rel=1e-12)
    rows, given = with_experts(ROLES, [1, 1, 1], [-1, -2, -3])
    assert grad("tempsamp_r1", rows, given, fix="anchor") == [0, 0, 0]


def test_hnpg_takes_old_responses_of_an_expert_for_its_value_alone() -> None:
    """V = 0.3: own r = 1, off by 0.7; the expert's r = 0, off by −0.3, and no gradient in its log-probs."""
    values = {"value": [0.3, 0.3]}
    batch = of_one_token([1.0, 0.0], role=["policy", "expert"], staleness=[0.0, math.nan])
    out = at(-1.0, "hnpg", batch, streams=values, offline=0.5)
    np.testing.assert_allclose(out.grad[:, 1], [-0.7, 0.0], rtol=1e-13)
    np.testing.assert_allclose(out.grads["value"], [-0.7, 0.5 * 0.3], rtol=1e-13)
    stale = of_one_token([1.0, 0.0], role=["policy", "policy"], staleness=[0.0, 3.0])
    with pytest.raises(Refused, match=r"objective hnpg needs samples of staleness 0.*row 1"):
        at(-1.0, "hnpg", stale, streams=values)


def kept(nll: list[float], low: float, high: float) -> list[int]:
    given = of_one_token([math.nan] * len(nll), range(len(nll)))
    out = at([-x for x in nll], "middle_band", given, low=low, high=high)
    assert out.metrics["kept_share"] == pytest.approx((out.grad[:, 1] != 0).mean())
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


def evaluated(value: float, old: float, **options: float | None) -> objectives.Evaluation:
    """One token of reward 1, π = μ, whose value was `old` and is `value` now."""
    batch = of_one_token([1.0], behavior_logp=-1.0, old_value=old)
    return at(-1.0, "ppo", batch, streams={"prefix_value": [[0.0, value]]}, **options)


def test_a_value_that_went_far_toward_its_target_stays() -> None:
    """From .2 to .5 of 1: beyond .2 + .2 the larger error is the clipped one, ½ (.4 − 1)², without slope."""
    far = evaluated(0.5, 0.2)
    assert far.metrics["value_loss"] == pytest.approx(0.18)
    assert far.grads["prefix_value"].tolist() == [[0.0, 0.0]]
    free = evaluated(0.5, 0.2, value_clip=None)
    assert free.metrics["value_loss"] == pytest.approx(0.125)
    assert free.grads["prefix_value"].tolist() == [[0.0, pytest.approx(-0.5)]]


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
    rewards = [REWARD[row] + more for row, more in zip(rows, noise, strict=True)]
    reference, policy = ([math.log(p[row]) for row in rows] for p in (REFERENCE, POLICY))
    batch = of_one_token(rewards, [x for x, _ in rows], ref_logp=reference)
    found = at(policy, name, batch, beta=BETA, baseline="step").grad
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
    batch = of_one_token([1.0, 0.0], ["x"] * 2, ref_logp=-1.0)
    with pytest.raises(Refused, match="at least 2 groups, got 'x' alone"):
        at(-1.0, "agro", batch, beta=BETA, baseline="step")


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
