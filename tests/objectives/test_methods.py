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
from cases import batch_of, change, draw, evaluate

from agro import Batch, objectives
from agro.errors import Refused
from agro.objectives import advantage
from agro.objectives.ingredients import log_ratio
from agro.objectives.methods import consistency
from agro.objectives.methods.clipped import explained_variance
from agro.objectives.reduce import Groups
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
        batch = Batch.of(mask=[[0, 1]] * 3, reward=[r] * 3, group=[0] * 3)
        out = objectives.evaluate("reinforce", [[0, -1.0]] * 3, batch, baseline=kind)
        assert (np.asarray(out.grad) == 0).all()


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
