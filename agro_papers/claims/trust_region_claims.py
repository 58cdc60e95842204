"""Claims of agro_papers.methods.trust_region.

Their formulas are built on those of `agro.proof.claims.clipped_claims`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from agro.proof.claim import DESCENT, Claims
from agro.proof.claims import clipped_claims
from agro.proof.claims.advantages import per_token
from agro.proof.claims.clipped_claims import clipped_surrogate, first_response_loss
from agro.proof.families import BEHAVIOR, OLD, ratio_claims
from agro.proof.formulas import Situation

Average = float | str


def deepseek(s: Situation, low: float, high: float, limit: float, std: bool, average: Average) -> Tensor:
    """Without responses with A < 0 whose mean log μ/π is above `limit`."""
    plain = clipped_surrogate(log_ratio(s), low, high)
    far_XY = -s.e_tokens.sum(2) / s.policy.space.lengths > limit

    def term(A: Tensor, first_K: Tensor) -> Tensor:
        return plain(A, first_K) * ~((A < 0) & far_XY[:, first_K, None])

    return first_response_loss(s, term, std, average)


def log_ratio(s: Situation) -> Tensor:
    """[X,Y,T] to the policy when the batch was drawn, where that is another one than the behavior."""
    return s.e_tokens if s.old is None else s.drawn_tokens


def pulled(s: Situation, pull: float, std: bool = False, average: Average = "token") -> Tensor:
    """−w A + τ e² (Kimi K2.5)."""
    e = s.e_tokens
    return first_response_loss(
        s, lambda A, first_K: pull * e[:, first_K].square() - A * e[:, first_K].exp(), std, average
    )


def gated(
    s: Situation, up: float = 1.0, down: float = 1.05, std: bool = True, average: Average = "response"
) -> Tensor:
    """−A (4/τ) / (1 + exp(−τ (w − 1))) (SAPO)."""
    w_XYT = log_ratio(s).exp()

    def term(A: Tensor, first_K: Tensor) -> Tensor:
        w = w_XYT[:, first_K]
        return -A * torch.where(A > 0, _gate(w, up), _gate(w, down))

    return first_response_loss(s, term, std, average)


def _gate(w: Tensor, tau: float) -> Tensor:
    return 4 / tau / (1 + (-tau * (w - 1)).exp())


def divergent(
    s: Situation,
    divergence: Literal["tv", "kl"] = "tv",
    limit: float = 0.2,
    std: bool = False,
    average: Average = "token",
) -> Tensor:
    """−w A, and 0 where π − μ has the sign of A and the divergence is above the limit (DPPO)."""
    w_XYT = s.e_tokens.exp()
    q = s.policy.logp_tokens().detach().exp()
    p = q / w_XYT.detach()
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()  # NaN beyond the length
    far_XYT = ((q - p).abs() if divergence == "tv" else kl) > limit

    def term(A: Tensor, first_K: Tensor) -> Tensor:
        away = (A * (q - p)[:, first_K] > 0) & far_XYT[:, first_K]
        return -w_XYT[:, first_K] * A * ~away

    return first_response_loss(s, term, std, average)


def mixed(
    s: Situation, low: float = 0.2, high: float = 0.2, std: bool = True, average: Average = "token"
) -> Tensor:
    """−min(w A, clamp(w, κ − low, κ + high) A), κ = π_old/μ (ReMix)."""
    w_XYT, kappa_XYT = s.e_tokens.exp(), (s.e_tokens - s.drawn_tokens).exp().detach()

    def term(A: Tensor, first_K: Tensor) -> Tensor:
        w, kappa = w_XYT[:, first_K], kappa_XYT[:, first_K]
        return -torch.minimum(w * A, w.clamp(kappa - low, kappa + high) * A)

    return first_response_loss(s, term, std, average)


def convex_kl(s: Situation, share: float) -> Tensor:
    """E_μ of λ k3 to f and (1 − λ) k3 to π_old, the mean over all tokens."""
    base_k3, old_k3 = ((-d).exp() - 1 + d for d in (s.d_tokens, s.drawn_tokens))
    return per_token(s, share * base_k3 + (1 - share) * old_k3)


DRAWN = (*BEHAVIOR, "old_logp")


def _deepseek(s: Situation, average: float | str = "response") -> Tensor:
    return deepseek(s, 0.8, 1.2, 0.5, False, average)


def _linear(claims: Claims) -> Claims:
    """In the advantage, so that rewards count with their mean unless they are standardized."""
    return replace(claims, noise=True)


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "deepseek_v32": (
        ratio_claims(_deepseek, updates=DESCENT, beta=0.0),
        ratio_claims(
            lambda s: _deepseek(s) + s.beta * clipped_claims.unbiased_k3(s), (*BEHAVIOR, "ref_logp")
        ),
        ratio_claims(
            lambda s: deepseek(s, 0.9, 1.4, 0.2, True, 1.5),
            DRAWN,
            drifted=True,
            beta=0.0,
            ratio="old",
            clip=(0.1, 0.4),
            off_policy=0.2,
            std=True,
            average=1.5,
        ),
        ratio_claims(lambda s: _deepseek(s, "token"), n=(2,), beta=0.0, average="token"),
    ),
    "kimi_k25": (
        _linear(ratio_claims(lambda s: pulled(s, 1e-3), updates=DESCENT, n=(2,))),
        ratio_claims(lambda s: pulled(s, 0.3, True, "response"), pull=0.3, std=True, average="response"),
        _linear(ratio_claims(lambda s: pulled(s, 0.3, average=1.5), pull=0.3, average=1.5)),
    ),
    "sapo": (
        ratio_claims(gated, updates=DESCENT, beta=0.0),
        ratio_claims(
            lambda s: gated(s, 0.5, 2.0, False, 1.5),
            OLD,
            **clipped_claims.PLAIN,
            temperature=(0.5, 2.0),
            average=1.5,
        ),
        ratio_claims(lambda s: gated(s, average="token"), n=(2,), beta=0.0, average="token"),
    ),
    "dppo": (
        ratio_claims(divergent, updates=DESCENT, n=(2,), beta=0.0),
        ratio_claims(lambda s: divergent(s, "kl", 0.05), n=(2,), beta=0.0, divergence="kl", limit=0.05),
        ratio_claims(
            lambda s: divergent(s, "tv", 0.1, True, "response"),
            beta=0.0,
            limit=0.1,
            std=True,
            average="response",
        ),
        ratio_claims(lambda s: divergent(s, average=1.5), beta=0.0, average=1.5),
    ),
    "dppo_kl": (ratio_claims(lambda s: divergent(s, "kl", 0.05), updates=DESCENT, n=(2,), beta=0.0),),
    "remix": (
        ratio_claims(mixed, DRAWN, DESCENT, n=(2,), drifted=True, beta=0.0),
        ratio_claims(
            lambda s: mixed(s) + s.beta * convex_kl(s, 0.7),
            (*DRAWN, "ref_logp"),
            n=(2,),
            drifted=True,
            base_share=0.7,
        ),
        ratio_claims(
            lambda s: mixed(s, 0.1, 0.4, False, "response"),
            DRAWN,
            drifted=True,
            beta=0.0,
            clip=(0.1, 0.4),
            std=False,
            average="response",
        ),
        ratio_claims(lambda s: mixed(s, average=1.5), DRAWN, drifted=True, beta=0.0, average=1.5),
    ),
}
