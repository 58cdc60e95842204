"""Where the expected gradient vanishes for a policy that isn't a table: by enumeration."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from agro.config import RunConfig
from agro.proof.enumerable import Enumerable, Space, TabularValues
from agro.proof.expectation import DataDistribution, all_groups, gradient

BETA = 0.01  # of any size: r is a multiple of it


class Problem(NamedTuple):
    """π ∝ π_ref e^{θφ} on data of μ, with r = β θ* φ, so that π* is the policy of θ*."""

    shape: list[float]  # φ of each response
    reference: list[float]
    behavior: list[float]
    star: float


ISSUE = Problem(
    [-1.396, -0.561, 0.785, 1.602], [0.81, 0.047, 0.14, 0.004], [0.643, 0.032, 0.316, 0.009], 4.03
)
NEAR_REFERENCE = Problem([-1.489, -1.336, 0.63], [0.2993, 0.6998, 0.0009], [0.2138, 0.7844, 0.0017], 3.253)
WEIGHTED = {"weight": "reference", "weight_power": 0.5, "weight_baseline": "optimal"}
RECIPE = WEIGHTED | {"weight_normalize": "group"}


class Tilted(nn.Module):
    """Logits [X,1,V] of π ∝ π_ref e^{θφ}: one parameter of each prompt, θ [X]."""

    def __init__(self, reference: Tensor, shape: Tensor, theta: Tensor) -> None:
        super().__init__()
        self.reference, self.shape, self.theta = reference, shape, nn.Parameter(theta)

    def forward(self) -> Tensor:
        return (self.reference + self.theta[:, None] * self.shape)[:, None]


def table_of(space: Space, logp: Tensor) -> Enumerable:
    """The table with these log-probs [X,V] of responses of one token."""
    policy = Enumerable.table(space, scale=0.0)
    with torch.no_grad():
        policy.weights()["logits"][:, 0] = logp
    return policy


def roots(problem: Problem, **options: object) -> list[tuple[float, bool]]:
    """θ where the expected gradient of AGRO, over all pairs, changes its sign; whether descent ends there."""
    theta = torch.arange(-6, 10, 0.02).double() + 0.003
    space, shape = Space(len(problem.shape), 1, len(theta)), torch.tensor(problem.shape).double()
    reference, behavior = (
        torch.tensor(p).double().log().log_softmax(0).expand(len(theta), -1)
        for p in (problem.reference, problem.behavior)
    )
    policy = Enumerable(space, Tilted(reference, shape, theta), TabularValues(space, 0.0, torch.Generator()))
    reward = (BETA * problem.star * shape).expand(len(theta), -1)
    data, start = DataDistribution(table_of(space, behavior), reward), table_of(space, reference)
    batch = all_groups(data, start, 2)
    slope = gradient(policy, start, batch, "agro", {"beta": BETA, **options})[: len(theta)]
    at = (slope[:-1] * slope[1:] < 0).nonzero()[:, 0]
    return [(float(theta[i]) + 0.01, bool(slope[i] < 0)) for i in at]


@pytest.mark.parametrize(
    ("problem", "options", "expected"),
    [
        (ISSUE, {}, [(4.03, True)]),
        (ISSUE, WEIGHTED, [(2.86, True), (3.11, False), (4.03, True)]),
        (ISSUE, RECIPE, [(4.03, True)]),
        (NEAR_REFERENCE, {}, [(3.253, True)]),
        (NEAR_REFERENCE, RECIPE, [(2.16, True), (3.253, False), (4.72, True)]),
    ],
)
def test_a_weight_may_add_an_end_where_the_policy_isnt_a_table(
    problem: Problem, options: dict[str, object], expected: list[tuple[float, bool]]
) -> None:
    """Without a weight the expected gradient is β²(θ − θ*) Var φ, which has one root. With one, descent from
    the reference, θ = 0, may end before θ*; in the last case it leaves θ* for either side. A table has π* as
    its only root, whatever the weight."""
    assert roots(problem, **options) == [(pytest.approx(at, abs=0.03), stable) for at, stable in expected]


def test_the_weight_is_that_of_the_recipe() -> None:
    log = RunConfig.load("log").objective.options
    assert {name: value for name, value in log.items() if name.startswith("weight")} == RECIPE


def test_a_lower_baseline_ends_where_the_reward_above_the_optimum_is_what_pulls_to_the_author() -> None:
    """A table of four responses, groups of two on data of μ: where R = c + s π/μ, found by bisection of each
    log π and of c, the expected gradient is 0; there without s it isn't, and with s it isn't at π*. At most
    s/β times the range of π/μ from π*, so that a shift that falls to 0 ends there."""
    reference, behavior = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]).double()
    reward, beta, shift = torch.tensor([0.0, 1.0, 0.5, 0.2]).double(), 0.5, 0.3

    def end(c: float, s: float) -> Tensor:
        """π with β log π/π_ref + s π/μ = r − c."""
        low, high = torch.full((4,), -40.0).double(), torch.full((4,), 10.0).double()
        for _ in range(80):
            middle = (low + high) / 2
            above = beta * (middle - reference.log()) + s * middle.exp() / behavior > reward - c
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return low.exp()

    def normalized(s: float) -> Tensor:
        low, high = -10.0, 10.0
        for _ in range(80):
            c = (low + high) / 2
            low, high = (c, high) if end(c, s).sum() > 1 else (low, c)
        return end(low, s)

    def slope(policy: Tensor, s: float) -> float:
        space = Space(4, 1, 1)
        logp, ref, mu = (table_of(space, p.log()[None]) for p in (policy, reference, behavior))
        batch = all_groups(DataDistribution(mu, reward[None]), ref, 2)
        found = gradient(logp, ref, batch, "agro", {"beta": beta, "baseline_shift": s})
        return float(found.abs().max())

    star, moved = normalized(0.0), normalized(shift)
    assert star.sum() == pytest.approx(1.0, abs=1e-12)
    assert star.log() == pytest.approx(((reference * (reward / beta).exp()).log().log_softmax(0)), abs=1e-10)
    assert slope(star, 0.0) < 1e-8  # rewards are float32
    assert slope(moved, shift) < 1e-8
    assert min(slope(star, shift), slope(moved, 0.0)) > 1e-2
    ratio = moved / behavior
    assert (moved / star).log().abs().max() <= shift / beta * (ratio.max() - ratio.min())


@pytest.mark.parametrize("n", [2, 3])
def test_leaving_out_groups_of_equal_noisy_rewards_weakens_the_regularizer_alone(n: int) -> None:
    """Two responses that are right by chance, p = .2 and .7. The rewards' part of the expected gradient, that
    at β = 0, is the one of all groups, as equal rewards cancel; the regularizer's, what β adds, has the
    chance that the rewards of a group with both responses differ. So the end is where
    β (ρ_1 − ρ_2) P = p_1 − p_2, with n = 2 P = .2 · .3 + .7 · .8 = .62; of all groups P is 1."""
    space, reference, beta = Space(2, 1, 1), torch.tensor([[0.4, 0.6]]).double(), 0.5
    right = torch.tensor([0.2, 0.7]).double()
    binary, twice = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).double(), torch.arange(2).repeat(2)
    behavior, start = table_of(space, torch.zeros(1, 2).double()), table_of(space, reference.log())

    def slope(gap: float, spread: bool, beta: float) -> float:
        """In the direction of the log-ratio between the two, times the share of groups that are drawn."""
        logits = reference.log() + torch.tensor([[0.0, gap]]).double()
        chance = torch.cat([1 - right, right])[None]
        data = DataDistribution(behavior, binary, twice, chance, spread=spread)
        batch = all_groups(data, start, n)
        share = float(1 - ((0.5 * right).sum()) ** n - ((0.5 * (1 - right)).sum()) ** n) if spread else 1.0
        return share * float(gradient(table_of(space, logits), start, batch, "agro", {"beta": beta})[1])

    assert slope(1.0, True, 0.0) == pytest.approx(slope(1.0, False, 0.0), rel=1e-6)
    if n == 2:
        differ = float(right[0] * (1 - right[1]) + right[1] * (1 - right[0]))
        assert differ == pytest.approx(0.62)
        assert slope(0.5 / (beta * differ), True, beta) == pytest.approx(0.0, abs=1e-7)
        assert abs(slope(0.5 / beta, True, beta)) > 1e-2
    assert slope(0.5 / beta, False, beta) == pytest.approx(0.0, abs=1e-7)
