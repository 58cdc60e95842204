"""PPO's advantages by hand, and where its parts are cut off."""

from __future__ import annotations

import pytest
import torch

from agro import Batch, objectives
from agro.errors import Refused
from agro.objectives.methods.critic import explained_variance, gae

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
