"""Formulas of advantages, and means over tokens of what weighs them; see `agro.proof.formulas`.

They are expectations over all ordered groups. A is the advantage of a group's first response, which by
symmetry stands for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from agro.proof.expectation import PART_WEIGHTS, parts_of
from agro.proof.formulas import EPS, Situation

Weight = Callable[[Tensor, Tensor], Tensor]  # of (w [X,K,T], A [X,K,1])


def advantage_of_first(s: Situation, kind: str) -> Tensor:
    """[X,K] of the first response of each group, as `agro.objectives.advantage` names them."""
    r_XKn = s.reward[:, s.groups]
    r_XK, mean_XK = r_XKn[..., 0], r_XKn.mean(-1)
    if kind == "reinforce_pp":
        return _over_all_tokens(s, r_XK)
    if kind == "reinforce_pp_baseline":
        return _over_all_tokens(s, r_XK - mean_XK)
    if kind == "gdpo":
        return _over_all_tokens(s, _by_part(s))
    if kind == "others":
        return r_XK - r_XKn[..., 1:].mean(-1)
    if kind == "opo":
        T_Kn = s.policy.space.lengths[s.groups].double()
        return r_XK - (T_Kn * r_XKn).sum(-1) / T_Kn.sum(-1)
    if kind == "red_drop":
        return _after_drops(r_XKn)
    equal_XK = r_XKn.amax(-1) == r_XKn.amin(-1)
    off_XK = torch.where(equal_XK, 0.0, r_XK - mean_XK)
    if kind == "standardized":
        return off_XK / (r_XKn.std(-1) + EPS)
    return off_XK / mean_XK.abs() if kind == "maxrl" else off_XK


def _by_part(s: Situation) -> Tensor:
    """[X,K] the sum over the parts of rewards, with their weights, of r − r̄ over the standard deviation."""
    total_XK = torch.zeros_like(s.reward[:, s.groups[:, 0]])
    for part_XY, weight in zip(parts_of(s.reward).unbind(2), PART_WEIGHTS, strict=True):
        r_XKn = part_XY[:, s.groups]
        spread_XK = r_XKn.std(-1)
        total_XK = total_XK + weight * (r_XKn[..., 0] - r_XKn.mean(-1)) / (spread_XK + EPS)
    return total_XK


def _over_all_tokens(s: Situation, v_XK: Tensor) -> Tensor:
    """[X,K] v minus its mean over all tokens, divided by their standard deviation (REINFORCE++)."""
    share_XK = s.p[:, s.groups].prod(-1) * s.policy.space.lengths[s.groups[:, 0]]
    share_XK = share_XK / share_XK.sum()
    off_XK = v_XK - (share_XK * v_XK).sum()
    return off_XK / (share_XK * off_XK.square()).sum().clamp(min=1e-8).sqrt()


def _after_drops(r_XKn: Tensor) -> Tensor:
    """[X,K] of groups of three: with two negatives one of them is dropped, each with probability ½."""
    below_XKn = r_XKn < r_XKn.mean(-1, keepdim=True) - 1e-12
    halves = []
    for dropped in itertools.combinations(range(3), 1):
        left_XKn = torch.ones_like(r_XKn)
        left_XKn[..., dropped] = 0.0
        center_XK = (left_XKn * r_XKn).sum(-1) / 2
        chance_XK = 0.5 * below_XKn[..., dropped[0]]
        halves.append(chance_XK * left_XKn[..., 0] * (r_XKn[..., 0] - center_XK))
    plain_XK = r_XKn[..., 0] - r_XKn.mean(-1)
    return torch.where(below_XKn.sum(-1) == 2, torch.stack(halves).sum(0), plain_XK)


def summed(s: Situation, kind: str, shift: float = 0.0) -> Tensor:
    """−E[(A − shift) log π]."""
    return -s.mean_groups((advantage_of_first(s, kind) - shift) * s.policy.logp()[:, s.groups[:, 0]])


def weighed(s: Situation, kind: str, weight: Weight, factor: float = 1.0) -> Tensor:
    """−E[Σ_t k_t A log π_t] over the mean number of tokens, k = `weight` without gradient."""
    return -factor * s.mean_groups(gain(s, kind, weight)) / mean_tokens(s)


def in_responses(s: Situation, kind: str, weight: Weight) -> Tensor:
    """The same with the mean over a response's tokens, then over responses."""
    return -s.mean_groups(gain(s, kind, weight) / s.policy.space.lengths[s.groups[:, 0]])


def gain(s: Situation, kind: str, weight: Weight) -> Tensor:
    """[X,K]"""
    first_K = s.groups[:, 0]
    A_XK1 = advantage_of_first(s, kind)[..., None]
    k_XKT = weight(s.e_tokens.detach().exp()[:, first_K], A_XK1)
    return (k_XKT * A_XK1 * s.policy.logp_tokens()[:, first_K]).sum(-1)


def mean_tokens(s: Situation) -> Tensor:
    """E_μ of a response's number of tokens."""
    return s.mean(s.policy.space.lengths.double().expand_as(s.p))


def per_token(s: Situation, v_XYT: Tensor) -> Tensor:
    """E_μ of the sum over tokens, over their mean number."""
    return s.mean(torch.where(s.policy.space.mask, v_XYT, 0.0).sum(2)) / mean_tokens(s)
