"""Remedies of the trap of on-policy AGRO, and the random problems on which they are compared.

The gradient of all of them except the mixtures is the paper's, with a share c of its likelihood-ratio part:
E_π[(−(R − E R) + c ½ (R − E R)²) ∇log π]. Here β is 1 and rewards are r/β. That is the same problem in units
of β, so that problems of different β stand in one table. KL(π ‖ π*) in nats is then the regret too (Lemma 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from agro.proof.descent import DescentSettings, Path, descend, follow
from agro.proof.enumerable import Enumerable, Network, Space, TabularValues, multisets, optimum
from agro.proof.expectation import DataDistribution

KINDS = ("sparse", "uniform", "heavy")
LOOKS = 160  # of a descent
Weights = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Problems:
    """X prompts, `size` of which in turn are one instance: they share parameters, kind and β."""

    make: Callable[[], Enumerable]  # the reference, anew
    reward: Tensor  # [X,Y] r/β
    size: int = 1
    lr: float = 0.1

    def of_instance(self, per_prompt: Tensor) -> Tensor:
        """[...,X] -> [...,I] means; instance i is of kind i mod 3."""
        return per_prompt.unflatten(-1, (-1, self.size)).mean(-1)


def rewards(instances: int, prompts: int, responses: int, seed: int) -> Tensor:
    """r/β, [I·prompts,Y] (three kinds of rewards).

    Sparse: 1 for one or two responses, else 0. Uniform in 0 … 1. Heavy: log-normal (σ = 2) over its maximum.
    β is log-uniform in 0.05 … 0.5.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (instances, prompts, responses)
    drawn, twice = (torch.rand(s, generator=generator, dtype=torch.float64) for s in (shape, shape[:2]))
    place = drawn.argsort(-1).argsort(-1)  # a random order
    heavy = (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).exp()
    kinds = ((place <= (twice < 0.5)[..., None]).double(), drawn, heavy / heavy.amax(-1, keepdim=True))
    reward = torch.stack([kinds[i % 3][i] for i in range(instances)])
    beta = 0.05 * 10 ** torch.rand(instances, 1, 1, generator=generator, dtype=torch.float64)
    return (reward / beta).flatten(0, 1)


def tables(vocabulary: int, instances: int, seed: int = 11) -> Problems:
    """Two tokens; logits of the reference are normal, σ = 1.5."""
    space = Space(vocabulary, 2, instances)
    return Problems(lambda: Enumerable.table(space, seed, 1.5), rewards(instances, 1, vocabulary**2, seed))


class Several(nn.Module):
    """Networks that share nothing with each other, as one over all their prompts: logits [X,C,V]."""

    def __init__(self, networks: list[Network]) -> None:
        super().__init__()
        self.stacked = nn.ParameterDict(stack_module_state(networks)[0])
        self.one = networks[:1]  # in a list, so that its parameters aren't this module's

    def forward(self) -> Tensor:
        out: Tensor = vmap(lambda weights: functional_call(self.one[0], weights, ()))(dict(self.stacked))
        return out.flatten(0, 1)


def networks(instances: int, prompts: int = 4, seed: int = 100) -> Problems:
    """Two tokens of a vocabulary of two, four prompts, two layers that prompts and contexts share."""
    space = Space(2, 2, prompts)

    def make() -> Enumerable:
        made = [Network(space, 0.7, torch.Generator().manual_seed(seed + i)) for i in range(instances)]
        whole = replace(space, prompts=prompts * instances)
        return Enumerable(whole, Several(made), TabularValues(whole, 0.0, torch.Generator()))

    return Problems(make, rewards(instances, prompts, 4, seed), prompts, lr=0.02)


def shared(c: Callable[[Tensor, Tensor, float], Tensor | float]) -> Weights:
    """The paper's gradient with a share c(p, R − E R, progress) [X,1] of the likelihood-ratio part.

    `progress` is the part of the run that is done.
    """

    def weights(p: Tensor, anchor: Tensor, R: Tensor, done: float) -> Tensor:
        a = R - (p * R).sum(1, keepdim=True)
        return p * (c(p, a, done) * a.square() / 2 - a)

    return weights


def moments(scale: float) -> Weights:
    """c = scale · 2β Var R/μ₃(R) of the prompt, at most 1; 1 where μ₃ ≤ 0."""
    return shared(lambda p, a, done: _bounded(scale * 2 * (p * a**2).sum(1), (p * a**3).sum(1))[:, None])


def _bounded(above: Tensor, below: Tensor) -> Tensor:
    """above/below, at most 1; 1 where below ≤ 0."""
    return torch.where(below > above, above / below.clamp(min=1e-300), 1.0)


def over_groups(n: int, responses: int, c: Callable[[Tensor], Tensor]) -> Weights:
    """The expectation over all groups of n; c(R_i − R̄_{-i}) of [X,G,n], a share for a group or a response."""
    groups, orders = multisets(responses, n)

    def weights(p: Tensor, anchor: Tensor, R: Tensor, done: float) -> Tensor:
        each = R[:, groups]  # [X,G,n]
        advantage = (each - each.mean(-1, keepdim=True)) * n / (n - 1)
        chance = orders * p[:, groups].prod(-1) / n
        pull = (c(advantage) * advantage.square() / 2 - advantage) * chance[..., None]
        return torch.zeros_like(p).index_add(1, groups.flatten(), pull.flatten(1))

    return weights


def group_moments(advantage: Tensor) -> Tensor:
    """c = β m₂/m₃ with the group's own moments, at most 1."""
    off = advantage * (1 - 1 / advantage.shape[-1])  # R_i − R̄
    return _bounded(off.square().mean(-1), (off**3).mean(-1))[..., None]


def per_response(advantage: Tensor) -> Tensor:
    """c_i = min(1, β/|R_i − R̄_{-i}|): the weight of a response falls with its R, whatever the others' are."""
    return 1 / advantage.abs().clamp(min=1)


def falling() -> Weights:
    """c = 1 − ½ Var R/(½ Var R at the start), at least 0."""
    start: list[Tensor] = []

    def c(p: Tensor, a: Tensor, done: float) -> Tensor:
        variance = (p * a.square()).sum(1, keepdim=True)
        if not start:
            start.append(variance)
        return (1 - variance / start[0]).clamp(min=0)

    return shared(c)


def mixture(alpha: float) -> Weights:
    """The gradient of ½ Var_m[R], m = (1 − α) π + α π_ref.

    Pathwise on all samples, likelihood-ratio on the fresh ones alone.
    m has π_ref's support whatever π does, so π* is the only policy at which this loss is 0.
    """

    def weights(p: Tensor, anchor: Tensor, R: Tensor, done: float) -> Tensor:
        m = (1 - alpha) * p + alpha * anchor
        a = R - (m * R).sum(1, keepdim=True)
        return (1 - alpha) * p * a.square() / 2 - m * a

    return weights


def reference_groups(p: Tensor, anchor: Tensor, R: Tensor, done: float) -> Tensor:
    """Off-policy AGRO on groups half of which are fresh and half of the reference's.

    This is data.replay = 0.5 with a store of its samples.
    """
    parts = (d * (R - (d * R).sum(1, keepdim=True)) for d in (p, anchor))
    return -sum(parts, torch.zeros_like(p)) / 2


@dataclass(frozen=True, eq=False)
class Mixed(DataDistribution):
    """Half of the samples from the behavior as it is, half from what it was at the start."""

    anchor: Tensor | None = None  # [X,Y] log π_ref

    def probability(self) -> Tensor:
        assert self.anchor is not None
        return (super().probability() + self.anchor.exp()) / 2


MIXED = "c = 0, 1/2 reference"  # off-policy AGRO on the mixture
LIBRARY: Mapping[str, tuple[str, dict[str, Any]]] = {
    "c = 1": ("agro_onpolicy", {"likelihood_ratio": 1.0}),
    "c = 0": ("agro_onpolicy", {"likelihood_ratio": 0.0}),
    "adaptive": ("agro_onpolicy", {"likelihood_ratio": "adaptive"}),
    MIXED: ("agro", {}),
}
EXACT: Mapping[str, Callable[[], Weights]] = {
    "c = 0, 1/2 groups of reference": lambda: reference_groups,
    "bound": lambda: moments(1.0),
    "half the bound": lambda: moments(0.5),
    "schedule": lambda: shared(lambda p, a, done: min(1.0, 2 * done)),
    "falling": falling,
    "c = 1, 1/4 reference": lambda: mixture(0.25),
    "c = 1, 1/2 reference": lambda: mixture(0.5),
}


def by_library(problems: Problems, name: str, updates: int, n: int = 2, seed: int | None = None) -> Path:
    """Descent through the library's objective; with a `seed` on sampled groups, through its step."""
    reference, start = problems.make(), problems.make()
    anchor = reference.logp().detach()
    objective, options = LIBRARY[name]
    data = (
        Mixed(start, problems.reward, anchor=anchor)
        if name == MIXED
        else DataDistribution(start, problems.reward)
    )
    return descend(
        start,
        reference,
        data,
        optimum(anchor, problems.reward, 1.0),
        objective,
        {"beta": 1.0, **options},
        DescentSettings(n=n, seed=seed, updates=updates, lr=problems.lr, looks=LOOKS),
    )


def by_weights(problems: Problems, weights: Weights, updates: int) -> Path:
    """Descent on Σ_y w(y) ∇log π(y) with the remedy's weights."""
    policy, anchor = problems.make(), problems.make().logp().detach()
    star = optimum(anchor, problems.reward, 1.0)

    def pull(update: int) -> None:
        policy.zero_grad()
        logp = policy.logp()
        now = logp.detach()
        w = weights(now.exp(), anchor.exp(), problems.reward - (now - anchor), update / updates)
        (w * logp).sum(1).mean().backward()

    return follow(policy, star, pull, DescentSettings(updates=updates, lr=problems.lr, looks=LOOKS))
