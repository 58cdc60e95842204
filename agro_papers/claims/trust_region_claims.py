"""Claims about agro_papers.methods.trust_region.

The formulas use those of `agro.proof.claims.clipped_claims`, and take their objectives' options. BAPO's sums
over the step are sums over its groups, which all have the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from agro.proof.claim import BEHAVIOR, DESCENT, OLD, Claims, of_options, of_ratios, preset
from agro.proof.claims import clipped_claims
from agro.proof.claims.clipped_claims import Limits, clipped_surrogate, first_response_loss, log_ratio
from agro.proof.formulas import Situation, per_token

Average = float | str
Bound = tuple[float, float, float]  # start, maximum and step


def deepseek(s: Situation, clip: Limits = (0.2, 0.2), off_policy: float = 0.5) -> Tensor:
    """PPO's clip without responses with A < 0 whose mean log μ/π is above a limit (DeepSeek-V3.2)."""
    plain = clipped_surrogate(log_ratio(s), 1 - clip[0], 1 + clip[1])
    far_XY = -s.e / s.policy.space.lengths > off_policy

    def term(A: Tensor, first_K: Tensor) -> Tensor:
        return plain(A, first_K) * ~((A < 0) & far_XY[:, first_K, None])

    return first_response_loss(s, term, std=False)


def pulled(s: Situation, pull: float = 1e-3) -> Tensor:
    """−w A + τ e² (Kimi K2.5)."""
    e = s.e_tokens

    def term(A: Tensor, first_K: Tensor) -> Tensor:
        return pull * e[:, first_K].square() - A * e[:, first_K].exp()

    return first_response_loss(s, term, std=False, average="token")


def gated(s: Situation, temperature: Limits = (1.0, 1.05), average: Average = "response") -> Tensor:
    """−A (4/τ) / (1 + exp(−τ (w − 1))) (SAPO)."""
    w_XYT = log_ratio(s).exp()

    def term(A: Tensor, first_K: Tensor) -> Tensor:
        w = w_XYT[:, first_K]
        up, down = (4 / tau / (1 + (-tau * (w - 1)).exp()) for tau in temperature)
        return -A * torch.where(A > 0, up, down)

    return first_response_loss(s, term, average=average)


def divergent(
    s: Situation,
    divergence: Literal["tv", "kl"] = "tv",
    limit: float = 0.2,
    average: Average = "token",
) -> Tensor:
    """−w A, or 0 if π − μ has the sign of A and the divergence is above the limit (DPPO)."""
    w_XYT = s.e_tokens.exp()
    q = s.policy.logp_tokens().detach().exp()
    p = q / w_XYT.detach()
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()  # NaN beyond the length
    far_XYT = ((q - p).abs() if divergence == "tv" else kl) > limit

    def term(A: Tensor, first_K: Tensor) -> Tensor:
        away = (A * (q - p)[:, first_K] > 0) & far_XYT[:, first_K]
        return -w_XYT[:, first_K] * A * ~away

    return first_response_loss(s, term, std=False, average=average)


def mixed(s: Situation, clip: Limits = (0.2, 0.2)) -> Tensor:
    """−min(w A, clamp(w, κ − ε_low, κ + ε_high) A), κ = π_old/μ (ReMix)."""
    w_XYT, kappa_XYT = s.e_tokens.exp(), (s.e_tokens - s.drawn_tokens).exp().detach()

    def term(A: Tensor, first_K: Tensor) -> Tensor:
        w, kappa = w_XYT[:, first_K], kappa_XYT[:, first_K]
        return -torch.minimum(w * A, w.clamp(kappa - clip[0], kappa + clip[1]) * A)

    return first_response_loss(s, term, average="token")


def convex_kl(s: Situation, share: float) -> Tensor:
    """E_μ of λ k3 to f and (1 − λ) k3 to π_old, the mean over all tokens."""
    base_k3, old_k3 = ((-d).exp() - 1 + d for d in (s.d_tokens, s.drawn_tokens))
    return per_token(s, share * base_k3 + (1 - share) * old_k3)


def props(s: Situation, clip: float = 0.3) -> Tensor:
    """The mean over tokens of max(π/f, 1 − ε) (PROPS)."""
    return per_token(s, s.d_tokens.exp().clamp(min=1 - clip))


def bapo(
    s: Situation,
    target: float = 0.4,
    low: Bound = (0.6, 0.9, 0.02),
    high: Bound = (1.2, 3.0, 0.05),
    criterion: str = "value",
) -> Tensor:
    """PPO's gain within bounds: while P is below its share of P + N, c_high is raised, then c_low. Tokens
    count by their probability (BAPO, the paper)."""
    short = _shortage(s, target / (1 - target), s.behavior.logp_tokens().detach().exp(), criterion)
    c_high = _raised(high, lambda c: short(low[0], c))
    c_low = _raised(low, lambda c: short(c, c_high))
    return first_response_loss(s, clipped_surrogate(log_ratio(s), c_low, c_high), average="token")


def bapo_code(
    s: Situation,
    target: float = 0.5,
    low: Bound = (0.8, 0.95, 0.05),
    high: Bound = (1.2, 2.0, 0.1),
    criterion: str = "value",
) -> Tensor:
    """c_low first, tokens count equally, P/N is the target, and for A < 0 the gain is at least 3 A (BAPO, the
    code)."""
    short = _shortage(s, target, torch.ones_like(s.e_tokens), criterion)
    c_low = _raised(low, lambda c: short(c, high[0]))
    c_high = _raised(high, lambda c: short(c_low, c))
    return first_response_loss(s, clipped_surrogate(log_ratio(s), c_low, c_high, 3.0), average="token")


def _raised(bound: Bound, is_short: Callable[[float], bool]) -> float:
    value, maximum, step = bound
    while value < maximum and is_short(value):
        value = min(value + step, maximum)
    return value


def _shortage(
    s: Situation, odds: float, counts_XYT: Tensor, criterion: str
) -> Callable[[float, float], bool]:
    """Whether P < odds N at c_low, c_high: E of |A| w over tokens with A > 0, w at most c_high, and over
    those with A < 0, w at least c_low; with the criterion "gradient", without the tokens beyond."""
    w_XYT = log_ratio(s).detach().exp()

    def total(value_XYT: Tensor, sign: float) -> Tensor:
        def part(A: Tensor, first_K: Tensor) -> Tensor:
            return (sign * A).clamp(min=0.0) * (counts_XYT * value_XYT)[:, first_K]

        return first_response_loss(s, part, average=1.0)

    def short(c_low: float, c_high: float) -> bool:
        up, down = w_XYT.clamp(max=c_high), w_XYT.clamp(min=c_low)
        if criterion == "gradient":
            up, down = w_XYT * (w_XYT <= c_high), w_XYT * (w_XYT >= c_low)
        return bool(odds * total(down, -1.0) > total(up, 1.0))

    return short


DRAWN = (*BEHAVIOR, "old_logp")
OTHER: dict[str, Any] = {"criterion": "gradient", "low": (0.5, 0.7, 0.1), "high": (1.1, 1.9, 0.2)}
deepseek_v32, sapo, dppo = of_ratios(deepseek), of_ratios(gated), of_ratios(divergent, "token")
kimi_k25, remix = of_ratios(pulled, "token"), of_ratios(mixed, "token")
of_bapo, of_bapo_code = of_ratios(bapo, "token"), of_ratios(bapo_code, "token")
of_props = of_options(props, ("ref_logp",), reference_shift=False, n=(1, 2))


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "deepseek_v32": (
        deepseek_v32(updates=DESCENT, beta=0.0),
        deepseek_v32(clipped_claims.REGULARIZED, penalty=clipped_claims.unbiased_k3),
        deepseek_v32(DRAWN, beta=0.0, ratio="old", clip=(0.1, 0.4), off_policy=0.2, drifted=True),
    ),
    # Linear in an advantage that isn't standardized, so only the mean of rewards matters.
    "kimi_k25": (
        replace(kimi_k25(updates=DESCENT), noise=True),
        replace(kimi_k25(pull=0.3), noise=True),
    ),
    "sapo": (
        sapo(updates=DESCENT, beta=0.0),
        sapo(OLD, beta=0.0, ratio="old", temperature=(0.5, 2.0), average=1.5),
        sapo(beta=0.0, average="token"),
    ),
    "dppo": (
        dppo(updates=DESCENT, beta=0.0),
        dppo(beta=0.0, divergence="kl", limit=0.05),
        dppo(beta=0.0, limit=0.1, average="response"),
        dppo(beta=0.0, average=1.5),
    ),
    "dppo_kl": (preset(dppo(updates=DESCENT, divergence="kl", limit=0.05), beta=0.0),),
    "remix": (
        remix(DRAWN, DESCENT, beta=0.0, drifted=True),
        remix((*DRAWN, "ref_logp"), base_share=0.7, penalty=lambda s: convex_kl(s, 0.7), drifted=True),
        remix(DRAWN, beta=0.0, clip=(0.1, 0.4), drifted=True),
    ),
    "props": (of_props(updates=DESCENT), of_props(clip=0.1)),
    "bapo": (
        of_bapo(updates=200),
        of_bapo(target=0.6, **OTHER),
        of_bapo(DRAWN, ratio="old", drifted=True),
    ),
    "bapo_code": (
        of_bapo_code(updates=200),
        of_bapo_code(target=1.1, **OTHER),
        of_bapo_code(OLD, ratio="old", drifted=True),
    ),
}
