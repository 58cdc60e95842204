"""Claims about agro_papers.methods.experts: an expert's responses with the policy's, and chosen texts.

q [X,Y] are the expert's probabilities. A group has n responses of the policy and one of the expert. For the
other symbols see `agro.proof.formulas`. Formulas take their objectives' options.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from agro.objectives.needs import PROPOSAL, changed
from agro.objectives.reduce import quantile
from agro.proof import formulas
from agro.proof.claim import BEHAVIOR, DESCENT, OLD, Claims, of_options, preset, weighted
from agro.proof.claims import clipped_claims
from agro.proof.claims.clipped_claims import centered, standardized
from agro.proof.claims.teaching_claims import of_texts
from agro.proof.formulas import Situation, per_token

Clip = tuple[float, float]
Advantage = Callable[[Tensor], Tensor]  # from rewards [...,n+1], the expert's last


def anchored(r: Tensor, factor: float = 1.2) -> Tensor:
    """The advantage among own responses; the expert's is the best of these times `factor`."""
    sampled = standardized(r[..., :-1])
    return torch.cat([sampled, factor * sampled.amax(-1, keepdim=True)], -1)


def capped(r: Tensor, share: float = 0.8) -> Tensor:
    """The advantage with the expert's reward at most a share of the group's highest."""
    expert = torch.minimum(r[..., -1:], share * r.amax(-1, keepdim=True))
    return standardized(torch.cat([r[..., :-1], expert], -1))


def reshaped(r: Tensor, threshold: float = 0.8) -> Tensor:
    """The advantage with all rewards shaped (TempSamp-R1)."""
    over, under = r - threshold, threshold - r
    low = threshold - (under.exp() - 1) / (math.e - 1)
    return standardized(torch.where(over >= 0, threshold + 0.01 * (over.clamp(min=0) + 1).log(), low))


def gain(w: Tensor, A: Tensor, clip: Clip | None, dual: float | None = None) -> Tensor:
    """min(w A, clamp(w) A), and for A < 0 at least dual · A."""
    low, high = (-math.inf, math.inf) if clip is None else (1 - clip[0], 1 + clip[1])
    return clipped_claims.gain(w, A, low, high, dual)


def q_of(s: Situation) -> Tensor:
    assert s.expert is not None
    return s.expert.logp().detach().exp()


def hybrid(s: Situation, offline: float = 1.0) -> Tensor:
    """−E_μ (r − V) log π, V a constant, and ½ (r − V)² on own and on the expert's responses (HNPG)."""
    off_XY = s.reward - s.value
    on_policy = s.mean(0.5 * off_XY.square() - off_XY.detach() * s.policy.logp())
    return on_policy + offline * (q_of(s) * 0.5 * off_XY.square()).sum(1).mean()


def mixed(
    s: Situation,
    advantage: Advantage,
    expert_XYT: Tensor,
    term: Callable[[Tensor, Tensor], Tensor],
    average: Literal["sum", "token"] = "sum",
) -> Tensor:
    """−E of the mean over a group's n + 1 responses of Σ_t term(w_t, A) and Σ_t A · expert_t.

    With `average` "token" each sum is a mean over the response's tokens.
    """
    space, first_K = s.policy.space, s.groups[:, 0]
    lengths_Y = space.lengths if average == "token" else torch.ones_like(space.lengths)
    share_YT = space.mask.double() / lengths_Y[:, None]
    Y = len(space.responses)
    r_XKYn = s.reward[:, s.groups][:, :, None].expand(-1, -1, Y, -1)
    r_XKYN = torch.cat([r_XKYn, s.reward[:, None, :, None].expand(*r_XKYn.shape[:3], 1)], -1)
    A = advantage(r_XKYN)
    w = s.e_tokens.exp()[:, first_K][:, :, None]
    sampled_gain = (term(w, A[..., :1]) * share_YT[first_K][None, :, None]).sum(-1)
    expert_gain = (A[..., -1:] * (expert_XYT * share_YT)[:, None]).sum(-1)
    p_XKY = s.p[:, s.groups].prod(-1)[..., None] * q_of(s)[:, None]
    return -(p_XKY * (s.n * sampled_gain + expert_gain)).sum((1, 2)).mean() / (s.n + 1)


def chord(
    s: Situation,
    mu: float = 0.1,
    expert_weight: str = "phi",
    clip: Clip = (0.2, 0.2),
) -> Tensor:
    """(1 − μ) times the clipped gains over the mean length of own responses, plus μ times −φ log π over that
    of the expert's (CHORD)."""
    space, first_K = s.policy.space, s.groups[:, 0]
    r_XKn = s.reward[:, s.groups]
    A = standardized(r_XKn)[..., :1]
    gains = gain(s.e_tokens.exp()[:, first_K], A, clip) * space.mask[first_K]
    T_XY = space.lengths.double().expand_as(s.p)
    sampled = -s.mean_groups(gains.sum(-1)) / s.mean(T_XY)
    l_XYT, q = s.policy.logp_tokens(), q_of(s)
    p = l_XYT.detach().exp()
    phi = {"phi": p * (1 - p), "probability": p, "none": torch.ones_like(p)}[expert_weight]
    expert = -(q * (phi * l_XYT).sum(2)).sum() / (q * T_XY).sum()
    return (1 - mu) * sampled + mu * expert


def luffy(
    s: Situation, gamma: float = 0.1, clip: Clip | None = None, dual_clip: float | None = None
) -> Tensor:
    """The expert's tokens with p/(p + γ) (LUFFY)."""
    p = s.policy.logp_tokens().exp()
    return mixed(s, centered, p / (p + gamma), lambda w, A: gain(w, A, clip, dual_clip))


def guide(s: Situation, gamma: float | None = None, clip: Clip = (0.2, 0.2)) -> Tensor:
    """Hinted tokens with w/(w + γ), γ the 0.9 quantile of w (Guide)."""
    assert s.expert is not None
    w = (s.policy.logp_tokens() - s.expert.logp_tokens().detach()).exp()
    if gamma is None:
        here = s.policy.space.mask.expand_as(w)
        gamma = float(quantile(w.detach()[here], q_of(s)[..., None].expand_as(w)[here], 0.9))
    return mixed(s, standardized, w / (w + gamma), lambda w, A: gain(w, A, clip))


def tempsamp(s: Situation, fix: str, fix_at: float | None = None, clip: Clip = (0.2, 0.2)) -> Tensor:
    """−A log π on the expert's responses (TempSamp-R1)."""
    of_fix = {"shape": reshaped, "cap": capped, "anchor": anchored}[fix]
    advantage = of_fix if fix_at is None else lambda r: of_fix(r, fix_at)
    return mixed(s, advantage, s.policy.logp_tokens(), lambda w, A: gain(w, A, clip), "token")


def k3(s: Situation) -> Tensor:
    """E over a group of the mean over tokens of f/π − log(f/π) − 1."""
    d = s.d_tokens
    k3_XYT = torch.where(s.policy.space.mask, (-d).exp() + d - 1, 0.0)
    p_XY = (s.n * s.p + q_of(s)) / (s.n + 1)
    return (p_XY * k3_XYT.sum(2) / s.policy.space.lengths).sum(1).mean()


def one_token(s: Situation, negative: float = -0.1, temperature: float = 1.0, draws: float = 0.0) -> Tensor:
    """−Σ_a R(a) q(a) log π(a), R = 1 for the given token and β_o for the others, q ∝ π^(1/κ), or the shares
    of K draws from it (OTR)."""
    space, logp_XCV = s.policy.space, s.policy.logp_next()
    q_XCV = s.policy.proposal(changed(PROPOSAL, temperature=temperature, draws=int(draws), seed=3.0))
    given_YTV = torch.nn.functional.one_hot(space.tokens, space.vocabulary).bool()
    R = given_YTV + negative * (~given_YTV).double()
    return per_token(s, -(R * (q_XCV * logp_XCV)[:, space.places]).sum(-1))


def in_band(s: Situation, low: float, high: float) -> Tensor:
    """Imitation of responses whose mean −log π over tokens is between two quantiles over μ."""
    nll = -(s.policy.logp().detach() / s.policy.space.lengths)
    lower, upper = (quantile(nll.flatten(), s.p.flatten(), share) for share in (low, high))
    return formulas.imitation(s, ((nll >= lower) & (nll <= upper)).double())


Expert = Literal["apart", "member", "hinted"]


def mixing(formula: Callable[..., Tensor], expert: Expert, **fields: Any) -> Callable[..., Claims]:
    """Claims on own responses and one of an expert; standardized or clipped, so noise in rewards matters."""
    return of_options(formula, BEHAVIOR, noise=False, n=(2,), expert=expert, **fields)


of_chord, of_luffy, of_guide = mixing(chord, "apart"), mixing(luffy, "member"), mixing(guide, "hinted")
fixed, fixed_apart = mixing(tempsamp, "member", shift=False), mixing(tempsamp, "apart")
tempsamp_with_kl = mixing(
    lambda s: tempsamp(s, "anchor", 0.9) + s.beta * k3(s), "apart", reference_shift=False
)
_OLD: dict[str, Any] = {"clip": (0.1, 0.4), "ratio": "old"}
PROPOSALS = ("proposal", "proposal_mean")

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "chord": (
        of_chord(updates=100),
        of_chord(OLD, **_OLD, mu=0.4, expert_weight="probability"),
        of_chord(mu=0.7, expert_weight="none"),
    ),
    "luffy": (
        replace(of_luffy(updates=100), noise=True),
        of_luffy(OLD, **_OLD, gamma=0.3, dual_clip=1.5),
    ),
    "ampo": (preset(of_luffy(clip=(0.2, 0.2), dual_clip=3.0)),),
    "guide": (
        of_guide(("reward", "behavior_logp", "groups", "hinted"), 100),
        of_guide((*OLD, "hinted"), **_OLD, gamma=0.4),
    ),
    "tempsamp_r1": (
        fixed(updates=100, beta=0.0, fix="shape"),
        fixed(OLD, beta=0.0, fix="shape", **_OLD, fix_at=0.9),
        fixed(beta=0.0, fix="cap"),
        fixed_apart(beta=0.0, fix="anchor"),
        tempsamp_with_kl((*BEHAVIOR, "ref_logp"), fix="anchor", fix_at=0.9),
    ),
    "otr": (
        of_texts(one_token, PROPOSALS, DESCENT),
        of_texts(lambda s: one_token(s, -0.3, 1.5), PROPOSALS, negative=-0.3, temperature=1.5),
        # For given draws; the first claim is their mean.
        of_texts(lambda s: one_token(s, -0.1, 1.5, 4), PROPOSALS, temperature=1.5, draws=4.0, seed=3.0),
    ),
    "middle_band": (of_texts(lambda s: in_band(s, 0.2, 0.7), (), 100, low=0.2, high=0.7),),
    "sophia": (of_texts(formulas.imitation),),
    "pear": (preset(weighted(of_texts(formulas.imitation), "behavior", 2.0, updates=0)),),
    "reward_conditioned": (of_texts(formulas.imitation),),
}
