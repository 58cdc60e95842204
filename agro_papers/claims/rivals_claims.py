"""Claims of agro_papers.methods.rivals: on pairs, and on groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agro.proof.claim import DESCENT, Claims, End
from agro.proof.claims import advantages
from agro.proof.claims.preference_claims import (
    OF_BEHAVIOR,
    VOTED,
    likelihood,
    of_pairs,
    on_pairs,
    square,
    to_behavior,
    winners,
)
from agro.proof.expectation import meaning_of
from agro.proof.families import GROUPED, JUDGED, moved
from agro.proof.formulas import Situation, wins
from agro.proof.measuring import BETA
from agro_papers.claims.truncated_claims import masked


def flipping(s: Situation, otherwise: float) -> Tensor:
    """E −log σ(β(ρ_w − s ρ_0)), s = 1 where ρ_w ≥ 0, else `otherwise` (SePPO)."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        sign = torch.where(w.detach() >= 0, 1.0, otherwise)
        return F.softplus(-s.beta * (w - sign * x))

    return on_pairs(s, loss, s.d)


# p̂ is the mean of the votes of each pair, 3 against 1 in the proof: ⅔.
BY_VOTED_WINS = End(
    "π_ref exp((2p̂ − 1) P(y ≻ y')/β)/Z, y' from μ",
    lambda s: (s.reference.logp() + wins(s) / (3 * s.beta)).log_softmax(1),
)


def equivalent_by_meaning(s: Situation, variance: float = 1.0, threshold: float = 0.5) -> Tensor:
    """E of −log σ(β(ρ̄_W − ρ̄_L)) and of λ times the mean variance of ρ within a good meaning, where ρ̄ are
    means over meanings of the mean of each (GEPO)."""
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


def equivalent(s: Situation, variance: float = 1.0, threshold: float = 0.5) -> Tensor:
    """E of −log σ(β(ρ̄_W − ρ̄_L)) where a group has both, and of λ Var_W(ρ) (GEPO)."""
    d_XKn, good = s.d[:, s.groups], (s.reward[:, s.groups] > threshold).double()
    n_W, n_L = good.sum(-1), (1 - good).sum(-1)
    mean_W = (d_XKn * good).sum(-1) / n_W.clamp(min=1)
    mean_L = (d_XKn * (1 - good)).sum(-1) / n_L.clamp(min=1)
    spread = (d_XKn.square() * good).sum(-1) / n_W.clamp(min=1) - mean_W.square()
    loss = torch.where((n_W > 0) & (n_L > 0), F.softplus(-s.beta * (mean_W - mean_L)), 0.0)
    return s.mean_groups(loss + variance * spread)


def gepo_claims(expects: Callable[[Situation], Tensor], updates: int = 0, **options: Any) -> Claims:
    chosen = {"threshold": 0.5, **options}
    needs = (*GROUPED, "meaning") if options.get("equivalent") == "meaning" else GROUPED
    return Claims(expects, "elsewhere", needs, chosen, shift=False, noise=False, updates=updates)


def oorl_claims(weight: float, updates: int = 0, **options: Any) -> Claims:
    clipped = masked("one_side", "is", 0.8, 1.2)
    by_meaning = options.get("equivalent") == "meaning"
    preference = equivalent_by_meaning if by_meaning else equivalent
    needs = (*GROUPED, "behavior_logp", "meaning") if by_meaning else (*GROUPED, "behavior_logp")
    return Claims(
        lambda s: advantages.weighed(s, "reinforce_pp", clipped) + weight * preference(s, s.beta**2),
        "elsewhere",
        needs,
        {"threshold": 0.5, **options},
        shift=False,
        noise=False,
        n=(2,),
        updates=updates,
    )


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "vipo": (of_pairs(lambda s: square(s, s.d, 0.5 / 3), "elsewhere", VOTED, 300, BY_VOTED_WINS),),
    "vdpo": (of_pairs(lambda s: likelihood(s, s.d, 2 / 3), "elsewhere", VOTED, DESCENT),),
    "seppo": (
        moved(of_pairs(lambda s: flipping(s, -1.0), "elsewhere", JUDGED, DESCENT)),
        moved(of_pairs(lambda s: flipping(s, 0.0), "elsewhere", doubt="drop")),
    ),
    "agent_q": (of_pairs(lambda s: likelihood(s, to_behavior(s)), "unknown", OF_BEHAVIOR, DESCENT),),
    "opa_dpo": (
        moved(
            of_pairs(
                lambda s: likelihood(replace(s, beta=0.1), s.d) + winners(replace(s, beta=0.1)), "unknown"
            )
        ),
        moved(of_pairs(lambda s: likelihood(s, s.d) + winners(s), "elsewhere", JUDGED, DESCENT, beta=BETA)),
    ),
    "gepo": (
        gepo_claims(lambda s: equivalent(s, s.beta**2), updates=DESCENT),
        gepo_claims(lambda s: equivalent(s, 0.3), variance=0.3, unit="nat"),
        gepo_claims(lambda s: equivalent_by_meaning(s, s.beta**2), updates=DESCENT, equivalent="meaning"),
    ),
    "oorl": (
        oorl_claims(0.01, updates=DESCENT),
        oorl_claims(0.5, share=0.5),
        oorl_claims(0.01, equivalent="meaning"),
    ),
}
