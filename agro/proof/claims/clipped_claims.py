"""Claims of agro.objectives.methods.clipped: objectives with importance ratios; see `agro.proof.formulas`.

A is the advantage of the first response of an ordered group; by symmetry it stands for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agro.proof.claim import DESCENT, Claims
from agro.proof.families import BEHAVIOR, OLD, ratio_claims
from agro.proof.formulas import EPS, CorrectionWeight, Situation

# (A [X,K,1], the first responses [K]) -> [X,K,T] the loss of their tokens
Term = Callable[[Tensor, Tensor], Tensor]


def first_response_loss(
    s: Situation, term: Term, std: bool = True, average: str | float = "response"
) -> Tensor:
    """E of the loss of the first response of all ordered groups: the mean over its tokens, the mean over the
    tokens of all responses, or the sum divided by a number."""
    mask_YT, first_K = s.policy.space.mask, s.groups[:, 0]
    # r_1 − r̄ [X,K,1], standardized with `std`
    r_XKn = s.reward[:, s.groups]
    below_XKn = r_XKn - r_XKn.amax(-1, keepdim=True)  # exactly 0 where all are equal
    A = (below_XKn[..., 0] - below_XKn.mean(-1))[..., None]
    loss_XK = torch.where(
        mask_YT[first_K], term((A / (r_XKn.std(-1)[..., None] + EPS) if std else A), first_K), 0.0
    ).sum(-1)
    T_Y = mask_YT.sum(1).double()
    if average == "response":
        return s.mean_groups(loss_XK / T_Y[first_K])
    if average == "token":
        return s.mean_groups(loss_XK) / s.mean(T_Y.expand_as(s.p))
    return s.mean_groups(loss_XK) / float(average)


def clipped_surrogate(log_ratio_XYT: Tensor, low: float, high: float, dual_clip: float | None = None) -> Term:
    """−min(w A, clamp(w, low, high) A), at least `dual_clip` A where A < 0 (dual clip)."""

    def term(A: Tensor, first_K: Tensor) -> Tensor:
        w = log_ratio_XYT.exp()[:, first_K]
        gain = torch.minimum(w * A, w.clamp(low, high) * A)
        if dual_clip is None:
            return -gain
        return -torch.where(A < 0, torch.maximum(gain, dual_clip * A), gain)

    return term


def grpo(
    s: Situation,
    low: float = 0.8,
    high: float = 1.2,
    std: bool = True,
    average: str | float = "response",
    dual_clip: float | None = None,
) -> Tensor:
    """Ratios token by token to the policy when the batch was drawn, or to the behavior (GRPO)."""
    log_ratio = s.e_tokens if s.old is None else s.drawn_tokens
    return first_response_loss(s, clipped_surrogate(log_ratio, low, high, dual_clip), std, average)


def gspo(
    s: Situation,
    low: float = 1 - 3e-4,
    high: float = 1 + 4e-4,
    std: bool = True,
    average: str | float = "response",
) -> Tensor:
    """One ratio a response, the geometric mean of its tokens' (GSPO)."""
    mean_XY = s.e_tokens.sum(2) / s.policy.space.mask.sum(1)
    return first_response_loss(
        s, clipped_surrogate(mean_XY[..., None].expand_as(s.e_tokens), low, high), std, average
    )


def gmpo(s: Situation, low: float = 0.4, high: float = 0.4, std: bool = True) -> Tensor:
    """−A exp of the mean of log w, at most `high` where A > 0, at least −`low` where A < 0 (GMPO)."""
    tokens_Y = s.policy.space.lengths
    s_XY = [x.sum(2).div(tokens_Y).exp() for x in (s.e_tokens.clamp(max=high), s.e_tokens.clamp(min=-low))]

    def term(A: Tensor, first_K: Tensor) -> Tensor:
        up, down = (x[:, first_K, None] for x in s_XY)
        return (-A * torch.where(A > 0, up, down)).expand(-1, -1, s.policy.space.length)

    return first_response_loss(s, term, std)


def k3(s: Situation) -> Tensor:
    """E_μ of the mean over tokens of f/π − log(f/π) − 1."""
    return _mean_tokens(s, (-s.d_tokens).exp() + s.d_tokens - 1)


def k2(s: Situation, average: str | float = "response") -> Tensor:
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

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "grpo": (
        ratio_claims(grpo, updates=DESCENT, beta=0.0),
        ratio_claims(lambda s: grpo(s) + s.beta * k3(s), REGULARIZED),
        ratio_claims(lambda s: grpo(s) + s.beta * k2(s), REGULARIZED, kl="k2"),
        ratio_claims(lambda s: grpo(s) + s.beta * unbiased_k3(s), REGULARIZED, unbiased_kl=True),
        ratio_claims(lambda s: grpo(s, 0.9, 1.4, std=False), OLD, **PLAIN, clip=(0.1, 0.4)),
        ratio_claims(lambda s: grpo(s, average="token"), n=(2,), beta=0.0, average="token"),
        ratio_claims(lambda s: grpo(s, average=1.5, dual_clip=1.3), beta=0.0, average=1.5, dual_clip=1.3),
    ),
    "gspo": (
        ratio_claims(gspo, updates=DESCENT, beta=0.0),
        ratio_claims(lambda s: gspo(s, 0.9, 1.4, std=False), OLD, **PLAIN, clip=(0.1, 0.4)),
        ratio_claims(lambda s: gspo(s, average="token"), n=(2,), beta=0.0, average="token"),
        ratio_claims(lambda s: gspo(s, average=1.5), beta=0.0, average=1.5),
    ),
    "gmpo": (
        ratio_claims(gmpo, updates=DESCENT, beta=0.0),
        ratio_claims(lambda s: gmpo(s, 0.1, 0.3, std=False), OLD, **PLAIN, clip=(0.1, 0.3)),
    ),
    "dr_grpo": (ratio_claims(lambda s: grpo(s, std=False, average=2.5), updates=DESCENT, average=2.5),),
    "dapo": (ratio_claims(lambda s: grpo(s, 0.8, 1.28, average="token"), updates=DESCENT, n=(2,)),),
    "ppo_dual_clip": (
        ratio_claims(lambda s: grpo(s, average="token", dual_clip=3.0), updates=DESCENT, n=(2,)),
    ),
    "luspo": (ratio_claims(lambda s: gspo(s, average=1.0), updates=DESCENT),),
}


def _corrected(level: str, rule: str, minimum: float, maximum: float | None) -> tuple[Claims, ...]:
    """Of a preset, whose options say the same. The policy when the batch was drawn isn't the sampler."""
    correction = CorrectionWeight("mismatch", maximum, minimum, level, rule)  # type: ignore[arg-type]
    return (ratio_claims(correction(grpo), (*BEHAVIOR, "old_logp"), updates=DESCENT, drifted=True),)


CORRECTION_CLAIMS: dict[str, tuple[Claims, ...]] = {
    "tis": _corrected("token", "truncate", 0.0, 2.0),
    "mis": _corrected("sequence", "mask", 0.0, 3.0),
    "icepop": _corrected("token", "mask", 0.5, 5.0),
    "decoupled_ppo": _corrected("token", "truncate", 0.0, None),
}
