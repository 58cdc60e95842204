"""Expected gradients over all groups, through the step, against derivatives of the exact losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agro.objectives import evaluate
from agro.proof.enumerable import Enumerable, Space, kl, multisets, optimum
from agro.proof.expectation import DataDistribution, all_groups, gradient

SPACES = [Space(3, 2, 2), Space(2, 3, 2, early_end=True)]
KINDS = [Enumerable.table, Enumerable.network]
BETA = 0.3


def rewards(space: Space) -> Tensor:
    random = torch.Generator().manual_seed(7)
    return torch.rand(space.prompts, len(space.responses), generator=random, dtype=torch.float64)


def derivative(loss: Tensor, policy: Enumerable) -> Tensor:
    # 0 for its values, not read here
    found = torch.autograd.grad(loss, policy.parameters(), materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def half_variance(policy: Enumerable, reference: Enumerable, reward: Tensor, p: Tensor) -> Tensor:
    """E_x ½ Var_p[R] (AGRO, the consistency loss); gradient flows through p where it has one."""
    R = reward - BETA * (policy.logp() - reference.logp().detach())
    mean = (p * R).sum(1, keepdim=True)
    return 0.5 * (p * (R - mean).square()).sum(1).mean()


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3])
def test_the_off_policy_estimator_is_unbiased_for_any_behavior(space: Space, kind, n: int) -> None:
    policy, reference, reward = kind(space, 1), kind(space, 2), rewards(space)
    for behavior in (reference, kind(space, 3), Enumerable.table(space, 0, 0.0)):
        batch = all_groups(DataDistribution(behavior, reward), reference, n)
        found = gradient(policy, reference, batch, "agro", {"beta": BETA, "scale": "loss"})
        exact = derivative(half_variance(policy, reference, reward, behavior.logp().detach().exp()), policy)
        assert exact.abs().max() > 1e-3
        torch.testing.assert_close(found, exact, atol=1e-12, rtol=0)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_on_policy_estimator_is_unbiased(space: Space, kind) -> None:
    policy, reference, reward = kind(space, 1), kind(space, 2), rewards(space)
    batch = all_groups(DataDistribution(policy, reward), reference, 3)
    found = gradient(policy, reference, batch, "agro_onpolicy", {"beta": BETA})
    exact = derivative(half_variance(policy, reference, reward, policy.logp().exp()), policy)
    torch.testing.assert_close(found, exact, atol=1e-12, rtol=0)


def test_the_trap_ratio_is_that_of_the_moments() -> None:
    """Over all groups of three, weighed by their probability, it is E_x μ₃(R) / (2β E_x Var R)."""
    space = SPACES[0]
    policy, reference, reward = *(Enumerable.table(space, s) for s in (1, 2)), 3 * rewards(space) ** 4
    batch = all_groups(DataDistribution(policy, reward), reference, 3)
    logp = policy.streams(batch.tokens, batch.lengths, batch.mask)["logp"].detach()
    found = evaluate("agro_onpolicy", logp, batch, beta=BETA).metrics["trap_ratio"]
    p, R = policy.logp().detach().exp(), reward - BETA * (policy.logp() - reference.logp()).detach()
    off = R - (p * R).sum(1, keepdim=True)
    exact = (p * off**3).sum() / (2 * BETA * (p * off**2).sum())
    assert abs(exact) > 0.1
    assert abs(found - exact) < 1e-12


def test_noise_and_weights_are_expectations() -> None:
    """Two rewards a response, of probability ¼ and ¾: the off-policy gradient is that of their mean."""
    space = SPACES[0]
    policy, reference, reward = (*(Enumerable.table(space, s) for s in (1, 2)), rewards(space))
    Y = len(space.responses)
    noisy = DataDistribution(
        reference,
        torch.cat([reward - 0.3, reward + 0.1], 1),
        torch.arange(Y).repeat(2),
        torch.tensor([0.25] * Y + [0.75] * Y, dtype=torch.float64).expand(2, -1),
    )
    found, plain = (
        gradient(policy, reference, all_groups(d, reference, 2), "agro", {"beta": BETA})
        for d in (noisy, DataDistribution(reference, reward))
    )
    torch.testing.assert_close(found, plain, atol=1e-12, rtol=0)


def test_the_space_holds_every_response_once() -> None:
    space = Space(3, 3, early_end=True)
    assert len(space.responses) == 1 + 2 + 4 * 3  # ends at once; after one; or not before the third
    assert Enumerable.table(space, 4).logp().exp().sum(1).tolist() == pytest.approx([1.0, 1.0])
    assert Enumerable.network(space, 4).logp().exp().sum(1).tolist() == pytest.approx([1.0, 1.0])
    groups, orders = multisets(4, 3)
    assert orders.sum() == 4**3
    assert len(groups) == 20  # C(4 + 3 − 1, 3)


def test_the_optimum_is_consistent() -> None:
    """r − β log π*/π_ref is the same for all responses (Theorem 1)."""
    space, reward = SPACES[0], rewards(SPACES[0])
    reference = Enumerable.table(space, 2).logp().detach()
    star = optimum(reference, reward, BETA)
    R = reward - BETA * (star - reference)
    assert (R.max(1).values - R.min(1).values).max() < 1e-12
    assert kl(star, star).abs().max() < 1e-15


def test_tables_are_joined() -> None:
    space = SPACES[1]
    both = Enumerable.joined([Enumerable.table(space, 1), Enumerable.table(space, 2)])
    torch.testing.assert_close(both.logp()[2:], Enumerable.table(space, 2).logp())
