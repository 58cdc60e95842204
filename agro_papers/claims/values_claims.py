"""Claims about agro_papers.methods.values."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
from torch import Tensor

from agro.proof.claim import DESCENT, REGULARIZED, Claims, of_options, preset
from agro.proof.claims.policy_gradient_claims import advantage_claims
from agro.proof.formulas import Situation, sloped
from agro_papers.claims.experts_claims import hybrid


def half_square_with_normalizer(s: Situation) -> Tensor:
    """½β E_μ (d + V − r/β)², V = log Σ exp of the logits at the first token (TBRM)."""
    start_XY = s.policy.normalizer()[:, s.policy.space.places[:, 0]]
    return 0.5 * s.beta * s.mean((s.d + start_XY - s.reward / s.beta).square())


def prefix_residuals(s: Situation) -> Tensor:
    """E_μ of the mean of ½ (V(y_<i) − Σ_{i≤u<j} (r_u − βd_u) − V(y_<j))² over all i < j, r at the last
    token, V = 0 after it; the policy's part of the gradient is divided by β."""
    space, total_XY = s.policy.space, torch.zeros_like(s.reward)
    d_XYT = sloped(s.d_tokens, 1 / s.beta)
    for y, T in enumerate(space.lengths.tolist()):
        none_X = torch.zeros_like(s.reward[:, 0])
        values = [s.policy.value.prefix[:, space.places[y, t]] for t in range(T)] + [none_X]
        pairs = list(itertools.combinations(range(T + 1), 2))
        for i, j in pairs:
            gained_X = -s.beta * d_XYT[:, y, i:j].sum(1)
            if j == T:
                gained_X = gained_X + s.reward[:, y]
            total_XY[:, y] += 0.5 * (values[i] - gained_X - values[j]).square() / len(pairs)
    return s.mean(total_XY)


def residuals_to_end(s: Situation) -> Tensor:
    """E_μ of the mean over t of ½ (r − β Σ_{u≥t} d_u − V(y_<t))², later d without gradient (OREO); the
    policy's part of the gradient is divided by β."""
    space, total_XY = s.policy.space, torch.zeros_like(s.reward)
    d_XYT, place = s.d_tokens, space.places
    for y, T in enumerate(space.lengths.tolist()):
        for t in range(T):
            d_X = sloped(d_XYT[:, y, t], 1 / s.beta) + d_XYT[:, y, t + 1 : T].detach().sum(1)
            value_X = s.policy.value.prefix[:, place[y, t]]
            total_XY[:, y] += 0.5 * (s.reward[:, y] - s.beta * d_X - value_X).square() / T
    return s.mean(total_XY)


def consistent(s: Situation, compared: str = "pairs") -> Tensor:
    return prefix_residuals(s) if compared == "pairs" else residuals_to_end(s)


def tapered(
    s: Situation,
    ratio: Literal["sequence", "mean", "token"] = "sequence",
    positive: tuple[float, float] = (1.0, 1.0),
    negative: tuple[float, float] = (0.0, 1.0),
) -> Tensor:
    """−E_μ[Σ_t k_t (r − ½) log π_t / T], k the ratio π/μ without gradient, clamped to `positive` if r > ½,
    else to `negative` (TOPR)."""
    e_XYT, T = s.e_tokens.detach(), s.policy.space.lengths
    total_XY1 = e_XYT.sum(2, keepdim=True)
    log_ratio = {"token": e_XYT, "mean": total_XY1 / T[:, None], "sequence": total_XY1}[ratio]
    good_XY1 = (s.reward > 0.5)[..., None]
    k = torch.where(good_XY1, log_ratio.exp().clamp(*positive), log_ratio.exp().clamp(*negative))
    return -s.mean((s.reward - 0.5) * (k * s.policy.logp_tokens()).sum(2) / T)


def token_baselines(s: Situation) -> Tensor:
    """−E Σ_t (r − b_t) log π of a group's first response, b_t the mean over those with a t-th token, weighted
    by the squared norm of the gradient in the logits up to it (OTB)."""
    space, first_K = s.policy.space, s.groups[:, 0]
    logits_XYTV = s.policy.logp_next().detach()[:, space.places]
    squares_XYT = logits_XYTV.exp().square().sum(-1)
    energy_XYT = (1 - 2 * s.policy.logp_tokens().detach().exp() + squares_XYT) * space.mask
    W_XKnT = (energy_XYT.cumsum(2) * space.mask)[:, s.groups]
    r_XKn1 = s.reward[:, s.groups][..., None]
    alone_KT = space.mask[s.groups].sum(1) == 1
    b_XKT = torch.where(alone_KT, 0.0, ((W_XKnT * r_XKn1).sum(2) / W_XKnT.sum(2)).nan_to_num())
    gain_XKT = (r_XKn1[:, :, 0] - b_XKT) * s.policy.logp_tokens()[:, first_K]
    return -s.mean_groups(torch.where(space.mask[first_K], gain_XKT, 0.0).sum(2))


RESIDUALS: dict[str, Any] = {"ends": "optimum", "shift": False, "reference_shift": False, "n": (1, 2)}
tbrm = of_options(half_square_with_normalizer, (*REGULARIZED, "normalizer"), episodes=False, **RESIDUALS)
prefix_consistency = of_options(consistent, (*REGULARIZED, "prefix_value"), episodes=False, **RESIDUALS)
# The policy's own samples are fresh; each group also has one response of any expert.
hnpg = of_options(hybrid, ("reward", "value", "fresh"), shift=False, n=(1, 2), expert="apart")
otb = of_options(token_baselines, ("reward", "groups", "proposal"), shift=False, episodes=False)
# A reward that crosses the baseline changes its response's weight, so a shift and noise matter.
topr = of_options(tapered, ("reward", "behavior_logp"), shift=False, noise=False, n=(1, 2))

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "tbrm": (tbrm(updates=600),),
    "hnpg": (hnpg(updates=DESCENT), hnpg(offline=0.4)),
    "prefix_consistency": (prefix_consistency(updates=1000), prefix_consistency(compared="end")),
    "oreo": (preset(prefix_consistency(updates=1000, compared="end")),),
    "otb": (otb(),),
    "maxrl": (advantage_claims("maxrl", updates=DESCENT),),
    "opo": (advantage_claims("opo", updates=DESCENT),),
    "asymre": (preset(advantage_claims("mean", shift=-0.1, updates=DESCENT)),),
    "topr": (
        topr(updates=600, baseline=0.5),
        topr(baseline=0.5, ratio="mean", positive=(0.8, 1.1), negative=(0.3, 0.9)),
        topr(baseline=0.5, ratio="token"),
    ),
}
