"""Claims of agro.objectives.methods.clipped: objectives with importance ratios; see `agro.proof.formulas`.

A is the advantage of the first response of an ordered group, which by symmetry represents all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agro.proof.claim import BEHAVIOR, DESCENT, OLD, Claims, of_options, of_ratios, preset
from agro.proof.formulas import EPS, CorrectionWeight, Situation, mean_tokens, per_token

# (A [X,K,1], the first responses [K]) -> [X,K,T] the loss of their tokens
Term = Callable[[Tensor, Tensor], Tensor]


def first_response_loss(
    s: Situation, term: Term, std: bool = True, average: str | float = "response"
) -> Tensor:
    """E of the loss of the first response over all ordered groups: the mean over its tokens, the mean over
    all responses' tokens, or the sum divided by a number."""
    space, first_K = s.policy.space, s.groups[:, 0]
    A = (standardized if std else centered)(s.reward[:, s.groups])[..., :1]
    loss_XK = torch.where(space.mask[first_K], term(A, first_K), 0.0).sum(-1)
    if average == "response":
        return s.mean_groups(loss_XK / space.lengths[first_K])
    return s.mean_groups(loss_XK) / (mean_tokens(s) if average == "token" else float(average))


def centered(r: Tensor) -> Tensor:
    """[…,n] r − r̄."""
    below = r - r.amax(-1, keepdim=True)  # so that equal rewards give exactly 0
    return below - below.mean(-1, keepdim=True)


def standardized(r: Tensor) -> Tensor:
    """[…,n] (r − r̄)/(std + 1e-6)."""
    return centered(r) / (r.std(-1, keepdim=True) + EPS)


def gain(w: Tensor, A: Tensor, low: float, high: float, dual_clip: float | None = None) -> Tensor:
    """min(w A, clamp(w, low, high) A), at least `dual_clip` A where A < 0."""
    clipped = torch.minimum(w * A, w.clamp(low, high) * A)
    return clipped if dual_clip is None else torch.where(A < 0, clipped.maximum(dual_clip * A), clipped)


def clipped_surrogate(log_ratio_XYT: Tensor, low: float, high: float, dual_clip: float | None = None) -> Term:
    """−`gain` of each token."""
    return lambda A, first_K: -gain(log_ratio_XYT.exp()[:, first_K], A, low, high, dual_clip)


Limits = tuple[float, float]


def log_ratio(s: Situation) -> Tensor:
    """[X,Y,T] to the policy when the batch was drawn, or to the behavior if they are the same."""
    return s.e_tokens if s.old is None else s.drawn_tokens


def grpo(
    s: Situation,
    clip: Limits = (0.2, 0.2),
    std: bool = True,
    average: str | float = "response",
    dual_clip: float | None = None,
) -> Tensor:
    """Ratios per token to the policy when the batch was drawn, or to the behavior (GRPO)."""
    term = clipped_surrogate(log_ratio(s), 1 - clip[0], 1 + clip[1], dual_clip)
    return first_response_loss(s, term, std, average)


def gspo(
    s: Situation, clip: Limits = (3e-4, 4e-4), std: bool = True, average: str | float = "response"
) -> Tensor:
    """One ratio per response, the geometric mean of its tokens' (GSPO)."""
    mean_XY1 = (s.e / s.policy.space.lengths)[..., None]
    term = clipped_surrogate(mean_XY1.expand_as(s.e_tokens), 1 - clip[0], 1 + clip[1])
    return first_response_loss(s, term, std, average)


def gmpo(s: Situation, clip: Limits = (0.4, 0.4), std: bool = True) -> Tensor:
    """−A exp of the mean of log w, clamped from above if A > 0, from below if A < 0 (GMPO)."""
    tokens_Y = s.policy.space.lengths
    above, below = s.e_tokens.clamp(max=clip[1]), s.e_tokens.clamp(min=-clip[0])
    s_XY = [x.sum(2).div(tokens_Y).exp() for x in (above, below)]

    def term(A: Tensor, first_K: Tensor) -> Tensor:
        up, down = (x[:, first_K, None] for x in s_XY)
        return (-A * torch.where(A > 0, up, down)).expand(-1, -1, s.policy.space.length)

    return first_response_loss(s, term, std)


def k3(s: Situation) -> Tensor:
    """E_μ of the mean over tokens of f/π − log(f/π) − 1."""
    return _mean_tokens(s, (-s.d_tokens).exp() + s.d_tokens - 1)


def k2(s: Situation) -> Tensor:
    """E_μ of the mean over tokens of ½ log²(π/f)."""
    return _mean_tokens(s, s.d_tokens.square() / 2)


def unbiased_k3(s: Situation) -> Tensor:
    """E_μ of the mean over tokens of w (f/π − log(f/π) − 1)."""
    return _mean_tokens(s, s.e_tokens.exp() * ((-s.d_tokens).exp() + s.d_tokens - 1))


def _mean_tokens(s: Situation, x_XYT: Tensor) -> Tensor:
    """E_μ of the mean over a response's tokens."""
    return s.mean(torch.where(s.policy.space.mask, x_XYT, 0.0).sum(2) / s.policy.space.lengths)


REGULARIZED = (*BEHAVIOR, "ref_logp")
PLAIN: dict[str, Any] = {"beta": 0.0, "std": False, "ratio": "old"}
of_grpo, of_gspo, of_gmpo = of_ratios(grpo), of_ratios(gspo), of_ratios(gmpo)


def _corrected(level: str, rule: str, minimum: float, maximum: float | None) -> tuple[Claims, ...]:
    """Claims of a preset with these options. The policy when the batch was drawn isn't the sampler."""
    correction = CorrectionWeight("mismatch", maximum, minimum, level, rule)  # type: ignore[arg-type]
    return (of_ratios(correction(grpo))((*BEHAVIOR, "old_logp"), DESCENT, drifted=True),)


def advantages(s: Situation, gamma: float, share: float) -> Tensor:
    """[X,Y,T] Σ_{k≥t} (γλ)^(k−t) (r_k + γ V(y_≤k) − V(y_<k)), V that of the behavior; λ: `share`."""
    space, A_XYT = s.policy.space, torch.zeros_like(s.e_tokens.detach())
    for y, T in enumerate(space.lengths.tolist()):
        value = [s.behavior.value.prefix.detach()[:, space.places[y, t]] for t in range(T)]
        value += [torch.zeros_like(s.reward[:, y])]
        error = [gamma * value[k + 1] - value[k] for k in range(T)]
        error[-1] = error[-1] + s.reward[:, y]
        for t in range(T):
            A_XYT[:, y, t] = sum(((gamma * share) ** (k - t) * error[k] for k in range(t, T)), start=0.0)
    return A_XYT


def ppo(
    s: Situation,
    gae_lambda: tuple[float, float] = (0.95, 0.95),
    gamma: float = 1.0,
    clip: tuple[float, float] = (0.2, 0.2),
    value_clip: float | None = 0.2,
    average: str | float = "token",
) -> Tensor:
    """E of the clipped gain and the value's error, over the tokens of μ's responses."""
    space = s.policy.space
    old, value = s.behavior.value.prefix.detach()[:, space.places], s.policy.value.prefix[:, space.places]
    A, w = advantages(s, gamma, gae_lambda[0]), s.e_tokens.exp()
    limited = torch.where(A > 0, w.clamp(max=1 + clip[1]) * A, w.clamp(min=1 - clip[0]) * A)
    target = old + advantages(s, gamma, gae_lambda[1])
    error = (value - target).square()
    if value_clip is not None:
        near = old + (value - old).clamp(-value_clip, value_clip)
        error = torch.maximum(error, (near - target).square())
    if average == "token":
        return per_token(s, error / 2 - limited)
    sum_XY = torch.where(space.mask, error / 2 - limited, 0.0).sum(2)
    return s.mean(sum_XY / (space.lengths if average == "response" else float(average)))


of_ppo = of_options(
    ppo,
    ("reward", "behavior_logp", "prefix_value", "old_value"),
    "unknown",
    shift=False,
    noise=False,
    n=(1, 2),
    episodes=False,
)
# With λ = 1 it is the policy gradient, halved by the mean over the two tokens of a response.
PPO_OF_REWARDS = of_ppo(beta=0.0, gae_lambda=(1.0, 0.95), average="response")

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "ppo": (
        of_ppo(beta=0.0),
        replace(PPO_OF_REWARDS, policy_gradient=lambda beta: 0.5),
        of_ppo(beta=0.0, gae_lambda=(0.6, 1.0), gamma=0.8),
        of_ppo(beta=0.0, clip=(0.1, 0.3), value_clip=None, average=4.0),
        of_ppo(beta=0.0, value_clip=0.5),
    ),
    "grpo": (
        of_grpo(updates=DESCENT, beta=0.0),
        of_grpo(REGULARIZED, penalty=k3),
        of_grpo(REGULARIZED, penalty=k2, kl="k2"),
        of_grpo(REGULARIZED, penalty=unbiased_k3, unbiased_kl=True),
        of_grpo(OLD, **PLAIN, clip=(0.1, 0.4)),
        of_grpo(beta=0.0, average="token"),
        of_grpo(beta=0.0, average=1.5, dual_clip=1.3),
    ),
    "gspo": (
        of_gspo(updates=DESCENT, beta=0.0),
        of_gspo(OLD, **PLAIN, clip=(0.1, 0.4)),
        of_gspo(beta=0.0, average="token"),
        of_gspo(beta=0.0, average=1.5),
    ),
    "gmpo": (of_gmpo(updates=DESCENT, beta=0.0), of_gmpo(OLD, **PLAIN, clip=(0.1, 0.3))),
    "dr_grpo": (preset(of_grpo(updates=DESCENT, std=False, average=2.5), average=2.5),),
    "dapo": (preset(of_grpo(updates=DESCENT, clip=(0.2, 0.28), average="token")),),
    "ppo_dual_clip": (preset(of_grpo(updates=DESCENT, average="token", dual_clip=3.0)),),
    "luspo": (preset(of_gspo(updates=DESCENT, average=1.0)),),
    "tis": _corrected("token", "truncate", 0.0, 2.0),
    "mis": _corrected("sequence", "mask", 0.0, 3.0),
    "icepop": _corrected("token", "mask", 0.5, 5.0),
    "decoupled_ppo": _corrected("token", "truncate", 0.0, None),
}
