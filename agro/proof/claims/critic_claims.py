"""Claims of agro.objectives.methods.critic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agro.proof.claim import Claims
from agro.proof.formulas import Situation


def advantages(s: Situation, gamma: float, share: float) -> Tensor:
    """[X,Y,T] Σ_{k≥t} (γλ)^(k−t) (r_k + γ V(y_≤k) − V(y_<k)), V that of the behavior; λ: `share`."""
    space, found = s.policy.space, torch.zeros_like(s.e_tokens.detach())
    for y, T in enumerate(space.lengths.tolist()):
        value = [s.behavior.value.prefix.detach()[:, space.places[y, t]] for t in range(T)]
        value += [torch.zeros_like(s.reward[:, y])]
        error = [gamma * value[k + 1] - value[k] for k in range(T)]
        error[-1] = error[-1] + s.reward[:, y]
        for t in range(T):
            found[:, y, t] = sum(((gamma * share) ** (k - t) * error[k] for k in range(t, T)), start=0.0)
    return found


def ppo(
    s: Situation,
    gae_lambda: tuple[float, float] = (0.95, 0.95),
    gamma: float = 1.0,
    clip: tuple[float, float] = (0.2, 0.2),
    value_clip: float | None = 0.2,
    average: str | float = "token",
) -> Tensor:
    """E of the clipped gain and of the value's error, over the tokens of responses of μ."""
    space = s.policy.space
    old, value = s.behavior.value.prefix.detach()[:, space.places], s.policy.value.prefix[:, space.places]
    A, w = advantages(s, gamma, gae_lambda[0]), s.e_tokens.exp()
    gain = torch.where(A > 0, w.clamp(max=1 + clip[1]) * A, w.clamp(min=1 - clip[0]) * A)
    target = old + advantages(s, gamma, gae_lambda[1])
    error = (value - target).square()
    if value_clip is not None:
        within = old + (value - old).clamp(-value_clip, value_clip)
        error = torch.maximum(error, (within - target).square())
    sum_XY = torch.where(space.mask, error / 2 - gain, 0.0).sum(2)
    lengths_Y = space.lengths.double()
    if average == "token":
        return s.mean(sum_XY) / s.mean(lengths_Y.expand_as(s.p))
    return s.mean(sum_XY / (lengths_Y if average == "response" else float(average)))


def ppo_claims(policy_gradient: Callable[[float], float] | None = None, **options: Any) -> Claims:
    return Claims(
        lambda s: ppo(s, **options),
        "unknown",
        ("reward", "behavior_logp", "prefix_value", "old_value"),
        {"beta": 0.0, **options},
        shift=False,
        policy_gradient=policy_gradient,
        noise=False,
        n=(1, 2),
        episodes=False,
        updates=0,
    )


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "ppo": (
        ppo_claims(),
        # With λ = 1 it is the policy gradient; each of the two tokens of a response has half of it.
        ppo_claims(lambda beta: 0.5, gae_lambda=(1.0, 0.95), average="response"),
        ppo_claims(gae_lambda=(0.6, 1.0), gamma=0.8),
        ppo_claims(clip=(0.1, 0.3), value_clip=None, average=4.0),
        ppo_claims(value_clip=0.5),
    )
}
