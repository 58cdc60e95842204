"""A reward that is learned from scored responses, on the policy's hidden states, with a bounded slope.

Learning off-policy from a learned reward is stable only where that reward is locally Lipschitz (arXiv
2006.16785), so its fit has a penalty on the gradient in its input:

    mean (D(h) − r)² + λ mean (‖∇D(ĥ)‖ − k)²        ĥ = u h_i + (1 − u) h_j, u uniform from 0 to 1

h [H] is the hidden state after a response's last token. The paper has the penalty for the discriminator of an
imitation learner; here D is a regression on given rewards. D is a network of two hidden layers, and hidden
states are standardized by mean and standard deviation of the scored ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agro.errors import Refused
from agro.models.policy import Policy
from agro.types import Sample
from agro_papers.flow import Scaled, hidden_states

ROWS = 64  # responses of an update


class ScoreNetwork(Scaled):
    """D, of two hidden layers."""

    def __init__(self, hidden: int, width: int = 64) -> None:
        super().__init__(hidden)
        self.layers = nn.Sequential(
            nn.Linear(hidden, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, scaled: Tensor) -> Tensor:
        """[N,H] standardized -> [N]"""
        values: Tensor = self.layers(scaled)[:, 0]
        return values

    def values(self, states: Tensor) -> Tensor:
        """[N,H] -> [N]"""
        return self.forward(self.scaled(states))


def slope_penalty(network: nn.Module, points: Tensor, slope: float) -> Tensor:
    """[] the mean of (‖∇D‖ − slope)² at points [N,H], differentiable in the network's weights."""
    inputs = points.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(network(inputs).sum(), inputs, create_graph=True)
    excess: Tensor = gradient.norm(dim=1) - slope
    return excess.square().mean()


@dataclass(frozen=True)
class SmoothReward:
    """A fitted reward; `fit` makes one."""

    policy: Policy
    layer: int
    network: ScoreNetwork

    @classmethod
    def fit(
        cls,
        policy: Policy,
        scored: Sequence[Sample],
        *,
        layer: int = -1,
        slope: float = 1.0,
        penalty: float = 1.0,
        steps: int = 500,
        seed: int = 0,
    ) -> SmoothReward:
        """Fit the rewards of `scored` by AdamW. Raises `Refused` where one has none, or where none is given.

        Args:
            layer: whose output; negative numbers count from the last layer.
            slope: k, reward per standard deviation of the hidden states.
            penalty: λ; 0 leaves the slope free.
            steps: updates, of 64 responses each.
            seed: of the network's weights and of the responses in an update.
        """
        rewards = [sample.reward for sample in scored if sample.reward is not None]
        if not scored or len(rewards) < len(scored):
            raise Refused(
                f"smooth reward: expected scored responses to fit, got {len(scored)}, of which "
                f"{len(rewards)} have a reward. What to do: score them (agro score), or leave the others out"
            )
        states = _ends(policy, [policy.encode(sample) for sample in scored], layer)
        target = torch.tensor(rewards, device=states.device)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = ScoreNetwork(states.shape[1]).to(states.device)
            network.rescale(states)
            states = network.scaled(states)
            optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
            for _ in range(steps):
                rows, partners = torch.randint(len(states), (2, ROWS), device=states.device)
                share = torch.rand(ROWS, 1, device=states.device)
                between = share * states[rows] + (1 - share) * states[partners]
                loss = (network(states[rows]) - target[rows]).square().mean()
                loss = loss + penalty * slope_penalty(network, between, slope)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return cls(policy, layer, network.requires_grad_(False))

    def reward(self, samples: Sequence[Sample]) -> list[Sample]:
        """The encoded samples with the learned reward in the place of theirs."""
        encoded = [self.policy.encode(sample) for sample in samples]
        values = self.network.values(_ends(self.policy, encoded, self.layer)).tolist()
        return [sample.replace(reward=value) for sample, value in zip(encoded, values, strict=True)]


def _ends(policy: Policy, samples: Sequence[Sample], layer: int) -> Tensor:
    """[N,H] the hidden state after the last token of each encoded response."""
    return torch.stack([states[-1] for states in hidden_states(policy, samples, layer)])
