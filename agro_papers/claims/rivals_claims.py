"""Claims about agro_papers.methods.rivals, on pairs and on groups."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from agro.proof.claim import DESCENT, GROUPED, JUDGED, Claims, End, moved, of_options
from agro.proof.claims.preference_claims import (
    OF_BEHAVIOR,
    VOTED,
    likelihood,
    of_pairs,
    on_pairs,
    square,
    winners,
)
from agro.proof.expectation import meaning_of
from agro.proof.formulas import Situation, weighed, wins
from agro.proof.measuring import BETA
from agro_papers.claims.weighted_claims import masked


def flipping(s: Situation, doubt: str = "flip") -> Tensor:
    """E −log σ(β(ρ_w − s ρ_0)), s = 1 if ρ_w ≥ 0, else −1, or 0 (SePPO)."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        sign = torch.where(w.detach() >= 0, 1.0, -1.0 if doubt == "flip" else 0.0)
        return F.softplus(-s.beta * (w - sign * x))

    return on_pairs(s, loss, s.d)


# p̂ is the mean of the votes of each pair, 3 against 1 in the proof: ⅔.
BY_VOTED_WINS = End(
    "π_ref exp((2p̂ − 1) P(y ≻ y')/β)/Z, y' from μ",
    lambda s: (s.reference.logp() + wins(s) / (3 * s.beta)).log_softmax(1),
)


def by_meaning(s: Situation, variance: float, threshold: float) -> Tensor:
    """E of −log σ(β(ρ̄_W − ρ̄_L)) and of λ times the mean variance of ρ within a good meaning; ρ̄ are means
    over meanings of each meaning's mean (GEPO)."""
    meaning_Kn = meaning_of(s.groups)
    same_Knn = (meaning_Kn[:, :, None] == meaning_Kn[:, None, :]).double()
    size_Kn = same_Knn.sum(-1)
    d_XKn = s.d[:, s.groups]
    mean_XKn = (same_Knn * d_XKn[:, :, None, :]).sum(-1) / size_Kn
    reward_XKn = (same_Knn * s.reward[:, s.groups][:, :, None, :]).sum(-1) / size_Kn
    good_XKn = (reward_XKn > threshold).double()
    n_W, n_L = (good_XKn / size_Kn).sum(-1), ((1 - good_XKn) / size_Kn).sum(-1)
    mean_W = (mean_XKn * good_XKn / size_Kn).sum(-1) / n_W.clamp(min=0.5)
    mean_L = (mean_XKn * (1 - good_XKn) / size_Kn).sum(-1) / n_L.clamp(min=0.5)
    spread = ((d_XKn - mean_XKn).square() * good_XKn / size_Kn).sum(-1) / n_W.clamp(min=0.5)
    loss = torch.where((n_W > 0) & (n_L > 0), F.softplus(-s.beta * (mean_W - mean_L)), 0.0)
    return s.mean_groups(loss + variance * spread)


def by_reward(s: Situation, variance: float, threshold: float) -> Tensor:
    """E of −log σ(β(ρ̄_W − ρ̄_L)) if a group has both kinds, and of λ Var_W(ρ) (GEPO)."""
    d_XKn, good = s.d[:, s.groups], (s.reward[:, s.groups] > threshold).double()
    n_W, n_L = good.sum(-1), (1 - good).sum(-1)
    mean_W = (d_XKn * good).sum(-1) / n_W.clamp(min=1)
    mean_L = (d_XKn * (1 - good)).sum(-1) / n_L.clamp(min=1)
    spread = (d_XKn.square() * good).sum(-1) / n_W.clamp(min=1) - mean_W.square()
    loss = torch.where((n_W > 0) & (n_L > 0), F.softplus(-s.beta * (mean_W - mean_L)), 0.0)
    return s.mean_groups(loss + variance * spread)


def gepo(
    s: Situation,
    threshold: float,
    variance: float = 1.0,
    unit: str = "logit",
    equivalent: str = "reward",
) -> Tensor:
    kinds = by_meaning if equivalent == "meaning" else by_reward
    return kinds(s, variance * (s.beta**2 if unit == "logit" else 1.0), threshold)


def oorl(s: Situation, threshold: float, share: float = 0.01, equivalent: str = "reward") -> Tensor:
    """PPO's clip with the advantage of REINFORCE++, and a share of GEPO."""
    clipped = masked("one_side", "is")
    return weighed(s, "reinforce_pp", clipped) + share * gepo(s, threshold, equivalent=equivalent)


seppo = of_options(flipping, JUDGED, reference_shift=False, n=(2,))
of_gepo = of_options(gepo, GROUPED, shift=False, noise=False)
of_oorl = of_options(oorl, (*GROUPED, "behavior_logp"), shift=False, noise=False, n=(2,))

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "vipo": (of_pairs(lambda s: square(s, s.d, 0.5 / 3), "elsewhere", VOTED, 300, BY_VOTED_WINS),),
    "vdpo": (of_pairs(lambda s: likelihood(s, s.d, 2 / 3), "elsewhere", VOTED, DESCENT),),
    "seppo": (seppo(updates=DESCENT), seppo(doubt="drop")),
    "agent_q": (of_pairs(lambda s: likelihood(s, s.e), "unknown", OF_BEHAVIOR, DESCENT),),
    "opa_dpo": (
        moved(
            of_pairs(
                lambda s: likelihood(replace(s, beta=0.1), s.d) + winners(replace(s, beta=0.1)), "unknown"
            )
        ),
        moved(of_pairs(lambda s: likelihood(s, s.d) + winners(s), "elsewhere", JUDGED, DESCENT, beta=BETA)),
    ),
    "gepo": (
        of_gepo(updates=DESCENT, threshold=0.5),
        of_gepo(threshold=0.5, variance=0.3, unit="nat"),
        of_gepo((*GROUPED, "meaning"), DESCENT, threshold=0.5, equivalent="meaning"),
    ),
    "oorl": (
        of_oorl(updates=DESCENT, threshold=0.5),
        of_oorl(threshold=0.5, share=0.5),
        of_oorl((*GROUPED, "behavior_logp", "meaning"), threshold=0.5, equivalent="meaning"),
    ),
}
