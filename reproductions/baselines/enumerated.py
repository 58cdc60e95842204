"""Where weighted updates with each baseline end, by enumeration of every group of a small table.

P problems at once, X prompts of K responses of one token. An outcome is a response of a prompt, with a noise
of its reward. The update of a step is Σ_i w_i (R_i − b) ∇log π(y_i), R = r − β log π/π_ref; w and b are
constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agro.proof.enumerable import multisets

POWER = 0.5  # of the weight min(1, (π/π_ref)^POWER)
DESCENT, NEWTON, NEAR = 400, 60, 1e-11  # updates of Adam, then of Newton; the residual that counts as 0


@dataclass(frozen=True)
class Problems:
    """What P tables of X prompts and K responses are trained on.

    `behavior` None: samples of the policy itself.
    """

    reference: Tensor  # [P,X,K] log-probs
    behavior: Tensor | None  # [P,X,K] log-probs
    reward: Tensor  # [P,X,K]
    beta: float = 0.25
    noise: float = 0.0  # r ± noise, each with probability one half

    @property
    def optimum(self) -> Tensor:
        """[P,X,K] log π*."""
        return (self.reference + self.reward / self.beta).log_softmax(-1)

    @property
    def value(self) -> Tensor:
        """[P,X] V* = β log E_{π_ref} exp(r/β)."""
        return self.beta * (self.reference + self.reward / self.beta).logsumexp(-1)


@dataclass(frozen=True)
class Outcomes:
    """All outcomes at a policy, O = X·K, times two where rewards are noisy."""

    chance: Tensor  # [P,O]
    weight: Tensor  # [P,O]
    norm: Tensor  # [P,O] (1 − π)²
    R: Tensor  # [P,O]


Baseline = Callable[[Tensor, Tensor, Tensor], Tensor]  # w, w·norm, R [P,G,n] -> [P,G]


def outcomes(problems: Problems, logp: Tensor) -> Outcomes:
    ratio = logp - problems.reference
    mu = logp if problems.behavior is None else problems.behavior
    R = (problems.reward - problems.beta * ratio).flatten(1)
    parts = [mu.exp().flatten(1) / logp.shape[1], (POWER * ratio).clamp(max=0).exp().flatten(1)]
    parts.append((1 - logp.exp()).square().flatten(1))
    if not problems.noise:
        return Outcomes(*parts, R)
    chance, weight, norm = (torch.cat([part, part], 1) for part in parts)
    return Outcomes(chance / 2, weight, norm, torch.cat([R + problems.noise, R - problems.noise], 1))


def mean_by(share: Tensor, R: Tensor) -> Tensor:
    return (share * R).sum(-1) / share.sum(-1)


BASELINES: dict[str, Baseline] = {
    "mean": lambda w, wg, R: R.mean(-1),
    "weighted": lambda w, wg, R: mean_by(w, R),
    "optimal": lambda w, wg, R: mean_by(wg, R),
    "lower": lambda w, wg, R: torch.minimum(R.mean(-1), mean_by(w, R)),
    "balanced": lambda w, wg, R: torch.minimum(mean_by(wg, R), mean_by(w, R)),
}


def gradient_of_groups(problems: Problems, name: str, n: int) -> Callable[[Tensor], Tensor]:
    """The expected update of logits [P,X,K] over all groups of n outcomes, as a function of them."""
    P, X, K = problems.reward.shape
    copies = 2 if problems.noise else 1
    groups, orders = multisets(X * K * copies, n)

    def update(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        all_ = outcomes(problems, logp)
        chance = orders * all_.chance[:, groups].prod(-1)
        w, R = all_.weight[:, groups], all_.R[:, groups]
        b = BASELINES[name](w, w * all_.norm[:, groups], R)
        force = chance[..., None] * w * (R - b[..., None])
        each = torch.zeros(P, X * K * copies, dtype=torch.float64)
        each.index_add_(1, groups.flatten(), force.flatten(1))
        return projected(each.view(P, copies, X, K).sum(1), logp)

    return update


def gradient_of_rows(
    problems: Problems, baseline: Callable[[Outcomes], Tensor]
) -> Callable[[Tensor], Tensor]:
    """The same where each row alone is compared with b [P,X] or [P,1], as of a batch without end."""
    P, X, K = problems.reward.shape

    def update(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        all_ = outcomes(problems, logp)
        b = baseline(all_).expand(P, X)[..., None]
        force = (all_.chance * all_.weight).view(P, X, K) * (all_.R.view(P, X, K) - b)
        return projected(force, logp)

    return update


def projected(force: Tensor, logp: Tensor) -> Tensor:
    """[P,X,K] Σ force ∇log π in logits."""
    return force - logp.exp() * force.sum(-1, keepdim=True)


def end(start: Tensor, update: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probs where Adam and then Newton's method end, and [P] whether each problem arrived."""
    logits, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, DESCENT + 1):
        g = update(logits)
        first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g.square()
        rate = 0.1 * 0.05 ** (step / DESCENT)
        logits = logits + rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-12)
    for _ in range(NEWTON):
        g = update(logits)
        size = g.flatten(1).norm(dim=1)
        if bool((size < NEAR).all()):
            break
        move = -(torch.linalg.pinv(jacobian(update, logits)) @ g.flatten(1)[..., None])[..., 0]
        logits = line_search(update, logits, move.view_as(logits).clamp(-1, 1), size)
    g = update(logits)
    return logits.log_softmax(-1), g.flatten(1).norm(dim=1) < 1e-8


def jacobian(update: Callable[[Tensor], Tensor], logits: Tensor, h: float = 1e-6) -> Tensor:
    """[P,D,D] by central differences."""
    flat = logits.flatten(1)
    columns = []
    for d in range(flat.shape[1]):
        ahead, behind = flat.clone(), flat.clone()
        ahead[:, d] += h
        behind[:, d] -= h
        gap = update(ahead.view_as(logits)) - update(behind.view_as(logits))
        columns.append(gap.flatten(1) / (2 * h))
    return torch.stack(columns, -1)


def line_search(update: Callable[[Tensor], Tensor], logits: Tensor, move: Tensor, size: Tensor) -> Tensor:
    """Half the move, for each problem, until the residual is smaller."""
    share = torch.ones_like(size)
    for _ in range(12):
        tried = logits + share[:, None, None] * move
        worse = update(tried).flatten(1).norm(dim=1) > size
        if not bool(worse.any()):
            break
        share = torch.where(worse, share / 2, share)
    return logits + share[:, None, None] * move
