"""Claims of agro_papers.methods.truncated: policy gradients with weights and masks of tokens.

The letters are those of `agro.proof.claims.advantages`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from agro.proof.claim import DESCENT, Claims
from agro.proof.claims.advantages import Weight, advantage_of_first, in_responses, mean_tokens, weighed
from agro.proof.families import BEHAVIOR, OLD, ratio_claims
from agro.proof.formulas import Situation


def clamped(low: float, high: float) -> Weight:
    """The ratio, limited (CISPO, AIPO)."""
    return lambda w, A: w.clamp(low, high)


def times_prefix_minimum(low: float, high: float, maximum: float = math.inf) -> Weight:
    """The ratio times the minimum of those before it, limited (MinPRO)."""

    def weight(w: Tensor, A: Tensor) -> Tensor:
        columns = []
        for t in range(w.shape[-1]):
            prefix_minimum = w[..., :t].amin(-1) if t else torch.ones_like(w[..., 0])
            columns.append(w[..., t] * prefix_minimum.clamp(max=maximum))
        return torch.stack(columns, -1).clamp(low, high)

    return weight


def gamma(positive: tuple[float, float], negative: tuple[float, float]) -> Weight:
    """e^λ W^k e^(−λW) of the product of the ratios (VESPO)."""

    def weight(w: Tensor, A: Tensor) -> Tensor:
        W = w.prod(-1, keepdim=True)
        up, down = (rate * (1 - W) + k * W.log() for k, rate in (positive, negative))
        return torch.where(A >= 0, up, down).exp()

    return weight


def masked(mask: str, weight: str, low: float, high: float, ring: tuple[float, float] = (0.6, 2.0)) -> Weight:
    """1 or the ratio, of the tokens that REC keeps."""

    def token_weight(w: Tensor, A: Tensor) -> Tensor:
        one = ~(((A > 0) & (w > high)) | ((A < 0) & (w < low)))
        two = (w >= low) & (w <= high)
        back = ((A >= 0) & (w <= 1 - ring[0])) | ((A <= 0) & (w >= 1 + ring[1]))
        selected = {"none": torch.ones_like(one), "one_side": one, "two_side": two, "ring": two | back}[mask]
        return selected * (w if weight == "is" else torch.ones_like(w))

    return token_weight


def within_budget(s: Situation, kind: str, budget: float, tokens: str) -> Tensor:
    """−E[Σ_t M w A] over the mean number of tokens; the squared log-ratios from some value on are masked
    (M2PO)."""
    first_K = s.groups[:, 0]
    A_XK1 = advantage_of_first(s, kind)[..., None]
    e_XKT = s.e_tokens.detach()[:, first_K]
    counts = s.policy.space.mask[first_K].expand_as(e_XKT)
    if tokens == "harmful":
        counts = counts & (e_XKT * A_XK1 > 0)
    chance_XKT = torch.where(counts, s.p[:, s.groups].prod(-1)[..., None], 0.0)
    square_XKT = e_XKT.square()
    threshold = math.inf
    for v in square_XKT[counts & (chance_XKT > 0)].unique().tolist():
        below = chance_XKT * (square_XKT <= v) if tokens == "all" else chance_XKT
        if (below * square_XKT.clamp(max=v)).sum() > budget * below.sum():
            threshold = v
            break
    within = ~(counts & (square_XKT >= threshold * (1 - 1e-12)))
    w_XKT = s.e_tokens[:, first_K].exp()
    gain_XK = torch.where(within & s.policy.space.mask[first_K], w_XKT * A_XK1, 0.0).sum(-1)
    return -s.mean_groups(gain_XK) / mean_tokens(s)


def best_clipped(s: Situation, high: float, min_reward: float | None = None) -> Tensor:
    """−E of the mean over tokens of min(w, high) of positive responses (RAFT++)."""
    r_XKn, first_K = s.reward[:, s.groups], s.groups[:, 0]
    positive_XK = (r_XKn[..., 0] == r_XKn.amax(-1)) & (r_XKn.amax(-1) > r_XKn.amin(-1))
    if min_reward is not None:
        positive_XK = r_XKn[..., 0] >= min_reward
    gain_XYT = torch.where(s.policy.space.mask, s.e_tokens.exp().clamp(max=high), 0.0)
    gain_XY = gain_XYT.sum(2) / s.policy.space.lengths
    return -s.mean_groups(positive_XK * gain_XY[:, first_K])


SIZES = {"reinforce_pp": (1, 2), "red_drop": (3,)}  # groups of an advantage's claims, else pairs


def over_tokens(
    kind: str,
    weight: Weight,
    options: Mapping[str, Any] = MappingProxyType({}),
    needs: tuple[str, ...] = BEHAVIOR,
    *,
    noise: bool = False,
    updates: int = 0,
) -> Claims:
    """Means over all tokens, in which larger groups count more: groups of one size."""
    return Claims(
        lambda s: weighed(s, kind, weight),
        "elsewhere",
        needs,
        options,
        noise=noise,
        shift=kind not in ("maxrl", "reinforce_pp"),
        n=SIZES.get(kind, (2,)),
        updates=updates,
    )


def _m2po(kind: str, tokens: str, updates: int) -> Claims:
    options: dict[str, Any] = {"budget": 0.5, "tokens": tokens, "advantage": kind}
    return ratio_claims(lambda s: within_budget(s, kind, 0.5, tokens), updates=updates, n=(2,), **options)


def _raft(min_reward: float | None, updates: int = 0) -> Claims:
    return Claims(
        lambda s: best_clipped(s, 1.2, min_reward),
        "elsewhere",
        BEHAVIOR if min_reward is None else ("reward", "behavior_logp"),
        {"least_reward": min_reward},
        noise=False,
        shift=min_reward is None,
        n=(2, 3) if min_reward is None else (1, 2),
        updates=updates,
    )


def _to_old(claims: Claims, **options: Any) -> Claims:
    """The same with ratios to the trainer's log-probs when the batch was drawn."""
    return replace(claims, needs=OLD, options={**claims.options, **options})


def _nested(weight: Weight, needs: tuple[str, ...] = BEHAVIOR, updates: int = 0, **options: Any) -> Claims:
    return ratio_claims(lambda s: in_responses(s, "standardized", weight), needs, updates, **options)


_OLD_MEAN = {"ratio": "old", "clip": (0.1, 0.4), "advantage": "mean"}
_RATIO = clamped(0.0, float("inf"))

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "cispo": (
        over_tokens("standardized", clamped(0.0, 1.28), updates=DESCENT),
        over_tokens("mean", clamped(0.9, 1.4), _OLD_MEAN, OLD, noise=True),
    ),
    "aipo": (over_tokens("mean", clamped(0.0, 4.0), noise=True, updates=DESCENT),),
    "minpro": (
        replace(
            over_tokens("standardized", times_prefix_minimum(0.0, 1.28), updates=DESCENT), episodes=False
        ),
        replace(
            over_tokens(
                "mean",
                times_prefix_minimum(0.9, 1.4, maximum=1.0),
                {"cap_at_one": True, **_OLD_MEAN},
                OLD,
                noise=True,
            ),
            episodes=False,
        ),
    ),
    "vespo": (
        over_tokens("standardized", gamma((2.0, 3.0), (3.0, 2.0)), updates=DESCENT),
        over_tokens(
            "mean",
            gamma((1.5, 1.0), (1.0, 2.5)),
            {"ratio": "old", "positive": (1.5, 1.0), "negative": (1.0, 2.5), "advantage": "mean"},
            OLD,
        ),
    ),
    "m2po": (
        _m2po("standardized", "all", DESCENT),
        _m2po("mean", "harmful", 0),
        _to_old(_m2po("standardized", "all", 0), ratio="old"),
    ),
    "raft_pp": (
        _raft(None, DESCENT),
        _raft(0.5),
        replace(
            _to_old(_raft(None), ratio="old", clip=(0.1, 0.4)), expects=lambda s: best_clipped(s, 1.4, None)
        ),
    ),
    "nested_reft": (
        _nested(_RATIO, updates=DESCENT),
        _nested(_RATIO, OLD, mismatch="ignore"),
        _nested(lambda w, A: 0.8 * w.clamp(max=1.0), mismatch="retrace", retrace=0.8),
    ),
}
