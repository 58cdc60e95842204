"""What all logged responses share, under sampled groups: does training on the log sink it?

Each prompt has K responses that the log may show, and one that it doesn't, which stands for all other text.
The former share one logit over all prompts. Their mass is what no comparison of a group sees: all R of a
group rise alike when it falls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reproductions.baselines.enumerated import BASELINES, mean_by, other_group


@dataclass(frozen=True)
class Log:
    """S runs at once, each of its own log of X prompts with n responses of K possible ones."""

    seeds: int = 24
    prompts: int = 32
    responses: int = 8
    n: int = 4
    start_mass: float = 0.5
    noise: float = 0.5
    beta: float = 0.05


def mass_kept(name: str, power: float, log: Log, lr: float, updates: int) -> tuple[Tensor, Tensor]:
    """[S] mean log-mass of the logged responses after training, in nats, and the mean share of right ones."""
    generator = torch.Generator().manual_seed(1)
    shape = (log.seeds, log.prompts, log.responses)
    reference = torch.randn(shape, generator=generator, dtype=torch.float64)
    # The probability of everything else: such that the logged ones have `start_mass`.
    rest = reference.logsumexp(-1) + torch.tensor(1 / log.start_mass - 1, dtype=torch.float64).log()
    right = (torch.rand(shape, generator=generator, dtype=torch.float64) < 0.3).double()
    drawn = torch.multinomial(
        reference.softmax(-1).flatten(0, 1), log.n, replacement=True, generator=generator
    ).view(log.seeds, log.prompts, log.n)
    sign = 2.0 * (torch.rand(drawn.shape, generator=generator) < 0.5) - 1
    reward = right.gather(-1, drawn) + log.noise * sign  # as it was logged, once
    own = torch.zeros(shape, dtype=torch.float64)
    common = torch.zeros(log.seeds, 1, 1, dtype=torch.float64)
    ref_logp = log_probs(reference, rest).gather(-1, drawn)
    adam = Adam([own, common], lr)
    for _ in range(updates):
        logp = log_probs(reference + own + common, rest)
        at = logp.gather(-1, drawn)
        force = forces(name, power, at, ref_logp, reward - log.beta * (at - ref_logp)) / log.n
        each = torch.zeros(shape, dtype=torch.float64).scatter_add_(-1, drawn, force)
        gradient = each - logp.exp() * force.sum(-1, keepdim=True)
        adam.step([gradient, gradient.sum((1, 2), keepdim=True)])
    logp = log_probs(reference + own + common, rest)
    return logp.logsumexp(-1).mean(1), (logp.exp() * right).sum(-1).mean(1)


def log_probs(logits: Tensor, rest: Tensor) -> Tensor:
    """[S,X,K] of the logged responses."""
    total = torch.logaddexp(logits.logsumexp(-1), rest)
    return logits - total[..., None]


def forces(name: str, power: float, logp: Tensor, ref_logp: Tensor, R: Tensor) -> Tensor:
    """[S,X,n] w (R − b), of groups with unequal R alone as the recipes draw them."""
    w = (power * (logp - ref_logp)).clamp(max=0).exp()
    wg = w * (1 - logp.exp()).square() + 1e-300
    baseline, added = BASELINES[name]
    if baseline is other_group:
        push = (w * (R - mean_by(wg, R)[..., None])).sum(-1)
        kept = (push.sum(1, keepdim=True) - push >= 0).double()  # of the step's other groups
        b = torch.lerp(mean_by(w, R), mean_by(wg, R), kept)
    else:
        b = baseline(torch.ones_like(R[..., 0]), w, wg, R)
    return w * (R - b[..., None]) + added


class Adam:
    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        self.parameters, self.lr, self.steps = parameters, lr, 0
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    def step(self, gradients: list[Tensor]) -> None:
        """Ascend."""
        self.steps += 1
        for p, g, (first, second) in zip(self.parameters, gradients, self.moments, strict=True):
            first.mul_(0.9).add_(g, alpha=0.1)
            second.mul_(0.999).addcmul_(g, g, value=0.001)
            scale = (second / (1 - 0.999**self.steps)).sqrt() + 1e-8
            p.add_(self.lr * first / (1 - 0.9**self.steps) / scale)
