"""A reward that tells demonstrations from the policy's own responses: the discriminator of imitation.

D(h) is a number for a response, h [H] the mean of the policy's hidden states at its tokens. It is fitted to
two responses to one prompt, a demonstration h_E and the policy's own h_π, by one of two losses, and a penalty
on its slope at points in between:

    logistic   −log σ(D(h_E)) − log σ(−D(h_π))      pairs   −log σ(D(h_E) − D(h_π))
    + λ mean (‖∇D(ĥ)‖ − k)²                         ĥ = u h_E + (1 − u) h_π, u uniform from 0 to 1

The logistic loss is least at D = log p_E/p_π, whose mean over the policy's responses is −KL(p_π ‖ p_E) (GAIL;
the reward of demonstrations in the view of arXiv 2310.06147). Pairs are Bradley and Terry's (GAD, arXiv
2511.10643). The penalty bounds the slope: without it off-policy imitation is unstable (arXiv 2006.16785).

The network is that of `agro_papers.smooth`, and goes on from its last fit. Hidden states are standardized by
mean and standard deviation of those of the fit, which change as the policy learns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agro.models.policy import Policy
from agro.types import Sample
from agro_papers.flow import hidden_states
from agro_papers.smooth import slope_penalty, small_network

ROWS = 64  # pairs of responses in an update


@dataclass(frozen=True)
class Pool:
    """Hidden states of responses, and the prompt of each, as a number."""

    states: Tensor  # [N,H]
    prompts: Tensor  # [N] integers

    @classmethod
    def of(cls, policy: Policy, samples: Sequence[Sample], layer: int, numbers: Mapping[str, int]) -> Pool:
        """Of encoded samples; `numbers`: of the prompts, by id."""
        prompts = [numbers[sample.prompt_id] for sample in samples]
        states = mean_states(policy, samples, layer)
        return cls(states, torch.tensor(prompts, device=states.device))

    def select(self, rows: Tensor) -> Pool:
        """Those of a mask [N] or of row numbers."""
        return Pool(self.states[rows], self.prompts[rows])


@dataclass(frozen=True)
class Fit:
    """How a discriminator is fitted; see `agro.config.sections.LearnedReward`."""

    loss: Literal["logistic", "pairs"]
    penalty: float
    slope: float
    steps: int
    seed: int  # of the rows of its updates


class Discriminator:
    """D, and the scale of its hidden states."""

    def __init__(self, hidden: int, seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.network = small_network(hidden)
        self.mean, self.std = torch.zeros(hidden), torch.ones(hidden)

    def fit(self, own: Pool, weight: Tensor, experts: Pool, fit: Fit) -> None:
        """Fit D by AdamW, to each of the policy's responses and a demonstration to its prompt.

        Args:
            own: of prompts that `experts` have too.
            weight: [N] how often each of these is drawn, in proportion.
        """
        both = torch.cat([own.states, experts.states])
        self.mean, self.std = both.mean(0), both.std(0, correction=0).clamp(min=1e-6)
        self.network.to(both.device).requires_grad_(True)
        demonstrations = [(experts.prompts == prompt).nonzero()[:, 0] for prompt in own.prompts.tolist()]
        counts = torch.tensor([len(rows) for rows in demonstrations])
        random = torch.Generator().manual_seed(fit.seed)
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=3e-3)
        for _ in range(fit.steps):
            rows = torch.multinomial(weight.cpu(), ROWS, replacement=True, generator=random)
            chosen = (torch.rand(ROWS, generator=random) * counts[rows]).long()
            partners = torch.stack(
                [demonstrations[row][i] for row, i in zip(rows.tolist(), chosen.tolist(), strict=True)]
            )
            h_own, h_expert = self._scaled(own.states[rows]), self._scaled(experts.states[partners])
            share = torch.rand(ROWS, 1, generator=random).to(h_own.device)
            expert, policy = self.network(h_expert), self.network(h_own)
            if fit.loss == "pairs":
                loss = -logsigmoid(expert - policy).mean()
            else:
                loss = -(logsigmoid(expert) + logsigmoid(-policy)).mean()
            between = share * h_expert + (1 - share) * h_own
            loss = loss + fit.penalty * slope_penalty(self.network, between, fit.slope)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.network.requires_grad_(False)

    def values(self, states: Tensor) -> Tensor:
        """[N,H] -> [N]"""
        values: Tensor = self.network(self._scaled(states))[:, 0]
        return values

    def auc(self, own: Pool, experts: Pool) -> float | None:
        """How often D ranks a demonstration above a response of the policy to the same prompt.

        Equal values count as ½. The mean over responses; None where no prompt has both.
        """
        values, of_experts = self.values(own.states), self.values(experts.states)
        shares = []
        for value, prompt in zip(values, own.prompts, strict=True):
            others = of_experts[experts.prompts == prompt]
            if len(others):
                shares.append(((others > value).double() + 0.5 * (others == value)).mean())
        return float(torch.stack(shares).mean()) if shares else None

    def tensors(self) -> dict[str, Tensor]:
        """All that it consists of, for checkpoints."""
        return {**self.network.state_dict(), "mean": self.mean, "std": self.std}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> Discriminator:
        network = {name: tensor for name, tensor in tensors.items() if name not in ("mean", "std")}
        made = cls(len(tensors["mean"]), 0)
        made.mean, made.std = tensors["mean"], tensors["std"]
        made.network.load_state_dict(network)
        made.network.requires_grad_(False)
        return made

    def to(self, device: torch.device) -> Discriminator:
        self.network.to(device)
        self.mean, self.std = self.mean.to(device), self.std.to(device)
        return self

    def _scaled(self, states: Tensor) -> Tensor:
        return (states - self.mean) / self.std


def mean_states(policy: Policy, samples: Sequence[Sample], layer: int) -> Tensor:
    """[N,H] the mean output of a layer at the tokens that the policy chose, of each encoded sample."""
    means = []
    for sample, states in zip(samples, hidden_states(policy, samples, layer), strict=True):
        assert sample.action is not None
        means.append(states[torch.tensor(sample.action, device=states.device)].mean(0))
    return torch.stack(means)
