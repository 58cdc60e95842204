"""Claims of agro.objectives.methods.preference: on judged pairs, and on responses judged by their rewards.

The letters are those of `agro.proof.formulas`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from agro.proof import formulas
from agro.proof.claim import (
    DESCENT,
    GROUPED,
    JUDGED,
    REGULARIZED,
    Claims,
    End,
    imitating,
    itself,
    moved,
    of_options,
    weighted,
)
from agro.proof.ends import BY_WINS
from agro.proof.formulas import Situation, half_variance, wins


def on_pairs(s: Situation, loss: Callable[[Tensor, Tensor], Tensor], ratio_XY: Tensor) -> Tensor:
    """E loss(ratio of the better one, of the other) over two draws from μ; y is better than y' with
    probability σ(r(y) − r(y'))."""
    shape = (*s.p.shape, s.p.shape[1])
    return mean_pairs(s, loss(ratio_XY[:, :, None].expand(shape), ratio_XY[:, None].expand(shape)))


def mean_pairs(s: Situation, loss_XYY: Tensor) -> Tensor:
    """E over these pairs of a loss [X, better response, other response]."""
    p_XYY = s.p[:, :, None] * s.p[:, None]
    better_XYY = (s.reward[:, :, None] - s.reward[:, None]).sigmoid()
    return 2 * (p_XYY * better_XYY * loss_XYY).sum((1, 2)).mean()


def square(s: Situation, ratio_XY: Tensor, gap: float = 0.5) -> Tensor:
    """E (gap/β − h)²."""
    return on_pairs(s, lambda w, x: (gap / s.beta - (w - x)).square(), ratio_XY)


def quarter(s: Situation, ratio_XY: Tensor, gap: float = 0.5) -> Tensor:
    """E ¼ (gap − βh)²."""
    return s.beta**2 / 4 * square(s, ratio_XY, gap)


def square_from_baseline(s: Situation, gap: float = 0.5) -> Tensor:
    """Each response's part of β²/4 E (gap/β − h)² relative to the optimal baseline of its pair, times w =
    min(1, √(π/f)).

    See `agro.proof.formulas.optimal_baseline`; here the winner's R is gap − βh above the loser's.
    """
    w_XY = (0.5 * s.d.detach()).exp().clamp(max=1.0)
    wg_XY = w_XY * formulas.squared_norm(s)
    d_XY, l_XY = s.d.detach(), s.policy.logp()
    slope_XYY = (
        0.5 * s.beta * (gap - s.beta * (d_XY[:, :, None] - d_XY[:, None]))
    )  # of the loser; negated, of the winner

    won, lost = wg_XY[:, :, None], wg_XY[:, None]
    excess_XYY = slope_XYY * (lost - won) / (lost + won)
    won_XYY = w_XY[:, :, None] * (-slope_XYY - excess_XYY) * l_XY[:, :, None]
    lost_XYY = w_XY[:, None] * (slope_XYY - excess_XYY) * l_XY[:, None]
    return mean_pairs(s, won_XYY + lost_XYY)


def likelihood(s: Situation, ratio_XY: Tensor, p: float = 1.0) -> Tensor:
    """E of −p log σ(βh) − (1 − p) log σ(−βh)."""
    return on_pairs(
        s, lambda w, x: p * F.softplus(-s.beta * (w - x)) + (1 - p) * F.softplus(s.beta * (w - x)), ratio_XY
    )


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "exponential": lambda z: 1 / z.exp(),
    "truncated_square": lambda z: torch.where(z < 1, (z - 1) ** 2, 0.0),
    "savage": lambda z: 1 / (1 + z.exp()) ** 2,
}


def of_gpo(s: Situation, loss: str = "exponential") -> Tensor:
    """E f(βh), f one of GPO's losses."""
    return on_pairs(s, lambda w, x: LOSSES[loss](s.beta * (w - x)), s.d)


def winners(s: Situation) -> Tensor:
    """E −log σ(βρ) of the winner of two draws."""
    return 2 * s.mean(wins(s) * F.softplus(-s.beta * s.d))


def hinge(s: Situation, ratio_XY: Tensor, margin: float = 1.0) -> Tensor:
    """E max(0, δ − βh)."""
    return on_pairs(s, lambda w, x: F.relu(margin - s.beta * (w - x)), ratio_XY)


def labels(
    s: Situation, threshold: float, desirable: float = 1.0, undesirable: float = 1.0, kl: str = "step"
) -> Tensor:
    """E λ σ(∓β(ρ − z₀)), z₀ = max(0, E_μ ρ) without gradient (KTO)."""
    z = s.mean(s.d).detach().clamp(min=0) if kl == "step" else 0.0
    good, bad = (s.beta * (z - s.d)).sigmoid(), (s.beta * (s.d - z)).sigmoid()
    return s.mean(torch.where(s.reward > threshold, desirable * good, undesirable * bad))


def extremes(s: Situation, label_smoothing: float = 0.0) -> Tensor:
    """E of DPO's loss of the best over the worst response of a group; 0 if all rewards are equal."""
    r_XKn, d_XKn = s.reward[:, s.groups], s.d[:, s.groups]
    p, total_XK = 1 - label_smoothing, torch.zeros_like(r_XKn[..., 0])
    count_XK = torch.zeros_like(total_XK)
    best, worst = r_XKn.amax(-1), r_XKn.amin(-1)
    for i in range(s.n):
        for j in range(s.n):
            pair = (r_XKn[..., i] == best) & (r_XKn[..., j] == worst) & (best > worst)
            h = s.beta * (d_XKn[..., i] - d_XKn[..., j])
            total_XK = total_XK + pair * (p * F.softplus(-h) + (1 - p) * F.softplus(h))
            count_XK = count_XK + pair
    return s.mean_groups(total_XK / count_XK.clamp(min=1))


OF_BEHAVIOR = ("pairs", "behavior_logp")
VOTED = (*JUDGED, "votes")
OPTIMAL: dict[str, Any] = {"weight": "reference", "weight_power": 0.5, "weight_baseline": "optimal"}
Ends = Literal["optimum", "elsewhere", "unknown"]


def of_pairs(
    expects: Callable[[Situation], Tensor],
    ends: Ends,
    needs: tuple[str, ...] = JUDGED,
    updates: int = 0,
    end: End | None = None,
    **options: Any,
) -> Claims:
    """Claims for groups of two."""
    return Claims(expects, ends, needs, options, n=(2,), updates=updates, end=end)


RATED = of_pairs(half_variance, "optimum", (*JUDGED, "reward"), 400, gap="reward")
LIKELIHOOD = of_pairs(lambda s: likelihood(s, s.d), "optimum", updates=400)
kto = of_options(labels, REGULARIZED, shift=False, reference_shift=False, noise=False, n=(1, 2))
gpo = of_options(of_gpo, JUDGED, n=(2,))
online_dpo = of_options(extremes, GROUPED, noise=False)

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "pair_consistency": (
        replace(RATED, policy_gradient=itself),
        weighted(RATED, "reference"),
        # IPO: judgments sampled with σ(r − r') imply a gap of ½ (2σ − 1), not r − r'.
        of_pairs(lambda s: quarter(s, s.d), "elsewhere", JUDGED, 300, BY_WINS),
        # The optimal baseline doesn't read judgments, so it ends there too.
        moved(of_pairs(square_from_baseline, "elsewhere", JUDGED, 600, BY_WINS, **OPTIMAL)),
        # Three votes of four give ⅔ with the uniform prior.
        of_pairs(lambda s: quarter(s, s.d, 0.8 / 3), "elsewhere", VOTED, gap=0.8, votes="mean"),
        of_pairs(lambda s: quarter(s, s.e), "unknown", OF_BEHAVIOR, anchor="behavior"),
    ),
    "dpo": (
        LIKELIHOOD,
        weighted(LIKELIHOOD, "reference"),
        imitating(LIKELIHOOD, formulas.wins),
        of_pairs(lambda s: likelihood(s, s.d, 0.9), "unknown", label_smoothing=0.1),
        of_pairs(lambda s: likelihood(s, s.d, 2 / 3), "unknown", VOTED, votes="mean"),
        of_pairs(lambda s: likelihood(s, s.e), "unknown", OF_BEHAVIOR, anchor="behavior"),
        moved(of_pairs(lambda s: likelihood(s, s.d) + 0.7 * winners(s), "unknown", winner=0.7)),
    ),
    "gpo": (gpo(), gpo(loss="truncated_square"), gpo(loss="savage")),
    "ipo": (
        of_pairs(lambda s: square(s, s.d), "elsewhere", JUDGED, 300, BY_WINS),
        of_pairs(lambda s: square(s, s.d, 0.5 / 3), "elsewhere", VOTED, votes="mean"),
        of_pairs(lambda s: square(s, s.e), "unknown", OF_BEHAVIOR, anchor="behavior"),
        moved(of_pairs(lambda s: square(s, s.d / s.policy.space.lengths), "elsewhere", average="token")),
    ),
    "slic": (
        of_pairs(lambda s: hinge(s, s.d), "elsewhere", JUDGED, DESCENT),
        of_pairs(lambda s: hinge(s, s.d, 0.2), "elsewhere", margin=0.2),
        of_pairs(lambda s: hinge(s, s.e), "unknown", OF_BEHAVIOR, anchor="behavior"),
        of_pairs(lambda s: hinge(s, s.policy.logp()), "elsewhere", ("pairs",), anchor="none"),
    ),
    "kto": (
        kto(updates=DESCENT, threshold=0.5),
        kto(threshold=0.5, desirable=0.7, undesirable=1.3, kl="none"),
    ),
    "online_dpo": (online_dpo(updates=DESCENT), online_dpo(label_smoothing=0.1)),
}
