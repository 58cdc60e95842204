"""Claims of agro_papers.methods.experts: the policy's responses mixed with those of an expert.

q [X,Y] are the expert's probabilities. A group has n responses of the policy and one of the expert. The other
letters are those of `agro.proof.formulas`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from agro.objectives.reduce import quantile
from agro.proof.claim import Claims
from agro.proof.families import BEHAVIOR, OLD
from agro.proof.formulas import EPS, Situation

Clip = tuple[float, float]
Advantage = Callable[[Tensor], Tensor]  # of rewards [...,n+1], those of the expert last
CLIP = (0.8, 1.2)


def centered(r: Tensor) -> Tensor:
    below = r - r.amax(-1, keepdim=True)  # so that equal rewards give exactly 0
    return below - below.mean(-1, keepdim=True)


def standardized(r: Tensor) -> Tensor:
    return centered(r) / (r.std(-1, keepdim=True) + EPS)


def anchored(factor: float) -> Advantage:
    """Of own responses among themselves; the expert's is that of the best of them, times `factor`."""

    def advantage(r: Tensor) -> Tensor:
        sampled = standardized(r[..., :-1])
        return torch.cat([sampled, factor * sampled.amax(-1, keepdim=True)], -1)

    return advantage


def capped(share: float) -> Advantage:
    """With the expert's reward at most a share of the group's highest."""

    def advantage(r: Tensor) -> Tensor:
        expert = torch.minimum(r[..., -1:], share * r.amax(-1, keepdim=True))
        return standardized(torch.cat([r[..., :-1], expert], -1))

    return advantage


def reshaped(threshold: float) -> Advantage:
    """With all rewards shaped (TempSamp-R1)."""

    def advantage(r: Tensor) -> Tensor:
        over, under = r - threshold, threshold - r
        low = threshold - (under.exp() - 1) / (math.e - 1)
        return standardized(torch.where(over >= 0, threshold + 0.01 * (over.clamp(min=0) + 1).log(), low))

    return advantage


def gain(w: Tensor, A: Tensor, clip: Clip | None, dual: float | None = None) -> Tensor:
    """min(w A, clamp(w) A), and where A < 0 at least dual · A."""
    result = w * A
    if clip is not None:
        result = torch.minimum(result, w.clamp(*clip) * A)
    if dual is not None:
        result = torch.where(A < 0, torch.maximum(result, dual * A), result)
    return result


def q_of(s: Situation) -> Tensor:
    assert s.expert is not None
    return s.expert.logp().detach().exp()


def hybrid(s: Situation, offline: float = 1.0) -> Tensor:
    """−E_μ (r − V) log π, V a constant, and ½ (r − V)² of own responses and of the expert's (HNPG)."""
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

    With `average` "token" it is the mean over the tokens of each.
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


def chord(s: Situation, mu: float = 0.1, weight: str = "phi", clip: Clip = CLIP, std: bool = True) -> Tensor:
    """(1 − μ) of clipped gains over the mean length of own responses, μ of −φ log π over that of the
    expert's (CHORD)."""
    space, first_K = s.policy.space, s.groups[:, 0]
    r_XKn = s.reward[:, s.groups]
    A = (standardized if std else centered)(r_XKn)[..., :1]
    gains = gain(s.e_tokens.exp()[:, first_K], A, clip) * space.mask[first_K]
    T_XY = space.lengths.double().expand_as(s.p)
    sampled = -s.mean_groups(gains.sum(-1)) / s.mean(T_XY)
    l_XYT, q = s.policy.logp_tokens(), q_of(s)
    p = l_XYT.detach().exp()
    phi = {"phi": p * (1 - p), "probability": p, "none": torch.ones_like(p)}[weight]
    expert = -(q * (phi * l_XYT).sum(2)).sum() / (q * T_XY).sum()
    return (1 - mu) * sampled + mu * expert


def luffy(
    s: Situation, gamma: float = 0.1, clip: Clip | None = None, dual: float | None = None, std: bool = False
) -> Tensor:
    """The expert's tokens with p/(p + γ) (LUFFY)."""
    p = s.policy.logp_tokens().exp()
    advantage = standardized if std else centered
    return mixed(s, advantage, p / (p + gamma), lambda w, A: gain(w, A, clip, dual))


def guide(s: Situation, gamma: float | None = None, clip: Clip = CLIP, std: bool = True) -> Tensor:
    """Hinted tokens with w/(w + γ), γ the 0.9 quantile of w (Guide)."""
    assert s.expert is not None
    w = (s.policy.logp_tokens() - s.expert.logp_tokens().detach()).exp()
    if gamma is None:
        here = s.policy.space.mask.expand_as(w)
        gamma = float(quantile(w.detach()[here], q_of(s)[..., None].expand_as(w)[here], 0.9))
    advantage = standardized if std else centered
    return mixed(s, advantage, w / (w + gamma), lambda w, A: gain(w, A, clip))


def tempsamp(s: Situation, advantage: Advantage, clip: Clip = CLIP) -> Tensor:
    """−A log π of the expert's responses (TempSamp-R1)."""
    return mixed(s, advantage, s.policy.logp_tokens(), lambda w, A: gain(w, A, clip), "token")


def k3(s: Situation) -> Tensor:
    """E over a group of the mean over tokens of f/π − log(f/π) − 1."""
    d = s.d_tokens
    k3_XYT = torch.where(s.policy.space.mask, (-d).exp() + d - 1, 0.0)
    p_XY = (s.n * s.p + q_of(s)) / (s.n + 1)
    return (p_XY * k3_XYT.sum(2) / s.policy.space.lengths).sum(1).mean()


Expert = Literal["apart", "member", "hinted"]


def mixing(
    expects: Callable[[Situation], Tensor],
    expert: Expert,
    needs: tuple[str, ...] = BEHAVIOR,
    updates: int = 0,
    **options: Any,
) -> Claims:
    """Own responses and one of an expert; standardized or clipped, so that noise in rewards matters."""
    return Claims(expects, "elsewhere", needs, options, noise=False, n=(2,), updates=updates, expert=expert)


def fix_claims(fix: str, fix_at: float | None = None, **options: Any) -> Claims:
    number = {"shape": 0.8, "cap": 0.8, "anchor": 1.2}[fix] if fix_at is None else fix_at
    make = {"shape": reshaped, "cap": capped, "anchor": anchored}[fix]
    clip = (1 - options["clip"][0], 1 + options["clip"][1]) if "clip" in options else CLIP
    claims = mixing(
        lambda s: tempsamp(s, make(number), clip),
        "apart" if fix == "anchor" else "member",
        OLD if options.get("ratio") == "old" else BEHAVIOR,
        beta=0.0,
        fix=fix,
        **options,
    )
    if fix_at is not None:
        claims = replace(claims, options={**claims.options, "fix_at": fix_at})
    return replace(claims, shift=fix == "anchor")


_OLD: dict[str, Any] = {"clip": (0.1, 0.4), "ratio": "old"}
HINTED = ("reward", "behavior_logp", "groups", "hinted")

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "chord": (
        mixing(chord, "apart", updates=100),
        mixing(
            lambda s: chord(s, 0.4, "probability", (0.9, 1.4), std=False),
            "apart",
            OLD,
            **_OLD,
            mu=0.4,
            expert_weight="probability",
            std=False,
        ),
        mixing(lambda s: chord(s, 0.7, "none"), "apart", mu=0.7, expert_weight="none"),
    ),
    "luffy": (
        replace(mixing(luffy, "member", updates=100), noise=True),
        mixing(
            lambda s: luffy(s, 0.3, (0.9, 1.4), 1.5, std=True),
            "member",
            OLD,
            **_OLD,
            gamma=0.3,
            dual_clip=1.5,
            std=True,
        ),
    ),
    "ampo": (mixing(lambda s: luffy(s, 0.1, (0.8, 1.2), 3.0), "member"),),
    "guide": (
        mixing(guide, "hinted", HINTED, updates=100),
        mixing(
            lambda s: guide(s, 0.4, (0.9, 1.4), std=False),
            "hinted",
            (*OLD, "hinted"),
            **_OLD,
            gamma=0.4,
            std=False,
        ),
    ),
    "tempsamp_r1": (
        replace(fix_claims("shape"), updates=100),
        fix_claims("shape", 0.9, clip=(0.1, 0.4), ratio="old"),
        fix_claims("cap"),
        fix_claims("anchor"),
        replace(
            fix_claims("anchor", 0.9),
            expects=lambda s: tempsamp(s, anchored(0.9)) + s.beta * k3(s),
            needs=(*BEHAVIOR, "ref_logp"),
            options={"fix": "anchor", "fix_at": 0.9},
            reference_shift=False,
        ),
    ),
}
