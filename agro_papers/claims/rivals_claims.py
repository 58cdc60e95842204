"""Claims of agro_papers.methods.rivals, on pairs."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from agro.proof.claim import DESCENT, Claims, End
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
from agro.proof.families import JUDGED, moved
from agro.proof.formulas import Situation, wins
from agro.proof.measuring import BETA


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
}
