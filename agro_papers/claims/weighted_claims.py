"""Claims about agro_papers.methods.weighted: policy gradients with weights and masks of tokens.

For the symbols see `agro.proof.formulas`. Formulas take their objectives' options.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agro.proof.claim import BEHAVIOR, DESCENT, OLD, Claims, of_options, of_ratios, preset
from agro.proof.formulas import (
    Situation,
    Weight,
    advantage_of_first,
    in_responses,
    mean_tokens,
    per_token,
    weighed,
)

GROUPS = ("reward", "groups")
Limits = tuple[float, float]


def opmd(tau: float = 1.0, form: str = "simple") -> Weight:
    """A constant factor (OPMD)."""
    factor = 1 / (1 + tau) if form == "simple" else 2 * tau / max(1.0, tau)
    return lambda w, A: factor * torch.ones_like(w)


def masked(
    mask: str = "none", token_weight: str = "none", clip: Limits = (0.2, 0.2), ring: Limits = (0.6, 2.0)
) -> Weight:
    """1 or the ratio for the tokens that REC keeps, else 0."""
    low, high = 1 - clip[0], 1 + clip[1]

    def weight(w: Tensor, A: Tensor) -> Tensor:
        one = ~(((A > 0) & (w > high)) | ((A < 0) & (w < low)))
        two = (w >= low) & (w <= high)
        back = ((A >= 0) & (w <= 1 - ring[0])) | ((A <= 0) & (w >= 1 + ring[1]))
        selected = {"none": torch.ones_like(one), "one_side": one, "two_side": two, "ring": two | back}[mask]
        return selected * (w if token_weight == "is" else torch.ones_like(w))

    return weight


def exponential(temperature: float = 1.0) -> Weight:
    """e^(A/T) (RED-Weight)."""
    return lambda w, A: (A / temperature).exp()


def clamped(clip: Limits = (1.0, 0.28)) -> Weight:
    """The ratio, limited (CISPO, AIPO)."""
    return lambda w, A: w.clamp(1 - clip[0], 1 + clip[1])


def times_prefix_minimum(clip: Limits = (1.0, 0.28), cap_at_one: bool = False) -> Weight:
    """The ratio times the minimum of the previous ones, limited (MinPRO)."""

    def weight(w: Tensor, A: Tensor) -> Tensor:
        columns = []
        for t in range(w.shape[-1]):
            prefix_minimum = w[..., :t].amin(-1) if t else torch.ones_like(w[..., 0])
            columns.append(w[..., t] * prefix_minimum.clamp(max=1.0 if cap_at_one else math.inf))
        return torch.stack(columns, -1).clamp(1 - clip[0], 1 + clip[1])

    return weight


def gamma(positive: Limits = (2.0, 3.0), negative: Limits = (3.0, 2.0)) -> Weight:
    """e^λ W^k e^(−λW) of the product of the ratios (VESPO)."""

    def weight(w: Tensor, A: Tensor) -> Tensor:
        W = w.prod(-1, keepdim=True)
        up, down = (rate * (1 - W) + k * W.log() for k, rate in (positive, negative))
        return torch.where(A >= 0, up, down).exp()

    return weight


def over_tokens(
    weight: Callable[..., Weight], default: str = "mean", *, episodes: bool = True
) -> Callable[..., Claims]:
    """Claims by options about −k A log π, mean over all tokens, k = `weight` of the options.

    Larger groups count more, but all groups have one size. `default`: the advantage if the options have none.
    """

    def claim(
        needs: tuple[str, ...] = BEHAVIOR, updates: int = 0, *, noise: bool = False, **options: Any
    ) -> Claims:
        kind = options.get("advantage", default)
        settings = {key: value for key, value in options.items() if key not in ("advantage", "ratio")}
        return Claims(
            lambda s: weighed(s, kind, weight(**settings)),
            "elsewhere",
            needs,
            options,
            noise=noise,
            shift=kind not in ("maxrl", "reinforce_pp"),
            n={"reinforce_pp": (1, 2), "red_drop": (3,)}.get(kind, (2,)),
            episodes=episodes,
            updates=updates,
        )

    return claim


def soft(s: Situation, tau: float) -> Tensor:
    """−E[(r − τ log mean exp(r/τ)) log π]/(1 + τ) over the mean number of tokens (OPMD)."""
    r_XKn = s.reward[:, s.groups]
    value_XK = tau * (r_XKn / tau).exp().mean(-1).log()
    gain_XK = (r_XKn[..., 0] - value_XK) * s.first_logp
    return -s.mean_groups(gain_XK) / (1 + tau) / mean_tokens(s)


def quadratic(s: Situation, pull: float = 0.1) -> Tensor:
    """−A log π + ½ c e² (the "dro" of tinker and verl)."""
    squares = per_token(s, s.e_tokens.square())
    return weighed(s, "mean", masked()) + 0.5 * pull * squares


def mirrored(s: Situation, step_size: float = 1.0, kl: str = "weighted") -> Tensor:
    """−w A + KL/t, the KL as w e or ½ e² (MDPO)."""
    e_XYT = s.e_tokens
    kl_XYT = e_XYT.exp() * e_XYT if kl == "weighted" else e_XYT.square() / 2
    return weighed(s, "mean", lambda w, A: w) + per_token(s, kl_XYT) / step_size


def within_budget(s: Situation, budget: float = 0.04, tokens: str = "all") -> Tensor:
    """−E[Σ_t M w A] over the mean number of tokens; M masks squared log-ratios from some value on (M2PO)."""
    first_K = s.groups[:, 0]
    A_XK1 = advantage_of_first(s, "standardized")[..., None]
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


def best_clipped(s: Situation, clip: Limits = (0.2, 0.2), least_reward: float | None = None) -> Tensor:
    """−E of the mean over tokens of the limited ratio of positive responses (RAFT++)."""
    r_XKn, first_K = s.reward[:, s.groups], s.groups[:, 0]
    positive_XK = (r_XKn[..., 0] == r_XKn.amax(-1)) & (r_XKn.amax(-1) > r_XKn.amin(-1))
    if least_reward is not None:
        positive_XK = r_XKn[..., 0] >= least_reward
    gain_XYT = torch.where(s.policy.space.mask, s.e_tokens.exp().clamp(max=1 + clip[1]), 0.0)
    gain_XY = gain_XYT.sum(2) / s.policy.space.lengths
    return -s.mean_groups(positive_XK * gain_XY[:, first_K])


def nested(s: Situation, mismatch: str = "is", retrace: float = 1.0) -> Tensor:
    """−w A log π, mean over the tokens of a response, or with λ min(1, w) for w (Nested-ReFT)."""
    by_retrace = mismatch == "retrace"
    return in_responses(s, "standardized", lambda w, A: retrace * w.clamp(max=1.0) if by_retrace else w)


of_opmd, rec, red_weight = over_tokens(opmd), over_tokens(masked), over_tokens(exponential)
cispo, vespo = over_tokens(clamped, "standardized"), over_tokens(gamma, "standardized")
minpro = over_tokens(times_prefix_minimum, "standardized", episodes=False)
token_quadratic = of_options(quadratic, BEHAVIOR, "unknown", n=(2,))
mdpo = of_options(mirrored, BEHAVIOR, "unknown", n=(2,))
m2po = of_options(within_budget, BEHAVIOR, noise=False, n=(2,))
raft = of_options(best_clipped, BEHAVIOR, noise=False)
nested_reft = of_ratios(nested)
CLIPPED: dict[str, Any] = {"mask": "one_side", "token_weight": "is"}
PARTS = ("reward_parts", "part_weights", "groups")

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "opmd": (
        of_opmd(GROUPS, DESCENT, noise=True),
        of_opmd(GROUPS, form="pairwise", tau=0.5, noise=True),
        of_options(soft, GROUPS, noise=False, n=(2,))(baseline="soft", tau=0.5),
    ),
    "token_quadratic": (token_quadratic(updates=DESCENT), token_quadratic(OLD, pull=0.5, ratio="old")),
    "opmd_token": (preset(token_quadratic(updates=DESCENT, pull=0.2)),),
    "mdpo": (mdpo(updates=DESCENT), mdpo(OLD, step_size=0.4, kl="square", ratio="old")),
    "rec": (
        rec(GROUPS, DESCENT, noise=True),
        rec(token_weight="is", noise=True),
        rec(mask="one_side", token_weight="is"),
        rec(mask="two_side", token_weight="is", noise=True),
        rec(mask="ring", clip=(0.1, 0.4), ring=(0.3, 0.7), advantage="standardized"),
        rec(GROUPS, advantage="others", noise=True),
        rec(GROUPS, advantage="maxrl"),
        rec(GROUPS, advantage="opo", noise=True),
        rec(GROUPS, advantage="red_drop"),
        rec(("reward",), advantage="reinforce_pp"),
        rec(GROUPS, advantage="reinforce_pp_baseline"),
        rec(PARTS, advantage="gdpo"),
    ),
    "rec_one_side": (preset(rec(updates=DESCENT, mask="one_side")),),
    "rec_two_side": (preset(rec(updates=DESCENT, mask="two_side", noise=True)),),
    "rec_ring": (preset(rec(updates=DESCENT, mask="ring")),),
    "red_weight": (red_weight(GROUPS, DESCENT), red_weight(GROUPS, temperature=0.5)),
    "red_drop": (preset(rec(GROUPS, DESCENT, advantage="red_drop")),),
    "gdpo": (preset(rec((*PARTS, "behavior_logp"), DESCENT, **CLIPPED, advantage="gdpo")),),
    "reinforce_pp": (preset(rec(("reward", "behavior_logp"), DESCENT, **CLIPPED, advantage="reinforce_pp")),),
    "cispo": (
        cispo(updates=DESCENT),
        cispo(OLD, ratio="old", clip=(0.1, 0.4), advantage="mean", noise=True),
    ),
    "aipo": (preset(cispo(updates=DESCENT, clip=(1.0, 3.0), advantage="mean", noise=True)),),
    "minpro": (
        minpro(updates=DESCENT),
        minpro(OLD, cap_at_one=True, ratio="old", clip=(0.1, 0.4)),
    ),
    "vespo": (
        vespo(updates=DESCENT),
        vespo(OLD, ratio="old", positive=(1.5, 1.0), negative=(1.0, 2.5)),
    ),
    "m2po": (
        m2po(updates=DESCENT, budget=0.5),
        m2po(budget=0.5, tokens="harmful"),
        m2po(OLD, budget=0.5, ratio="old"),
    ),
    "raft_pp": (
        raft(updates=DESCENT, least_reward=None),
        replace(raft(("reward", "behavior_logp"), least_reward=0.5), shift=False, n=(1, 2)),
        raft(OLD, least_reward=None, ratio="old", clip=(0.1, 0.4)),
    ),
    "nested_reft": (
        nested_reft(updates=DESCENT),
        nested_reft(OLD, mismatch="ignore"),
        nested_reft(mismatch="retrace", retrace=0.8),
    ),
}
