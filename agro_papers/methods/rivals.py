"""Pairs that a run makes itself, a demonstration over a sample of an earlier version or two turns of a
search; and pairs with votes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch

from agro.objectives import get
from agro.objectives.core import Objective, Streams, Terms, preset
from agro.objectives.methods.preference import ORDERED, BetaOfJudgments, judged, log_ratio, ordered
from agro.objectives.options import Option
from agro.objectives.reduce import Pairs
from agro.types import Batch


def seppo(
    streams: Streams,
    batch: Batch,
    *,
    beta: BetaOfJudgments,
    doubt: Annotated[
        Literal["flip", "drop"],
        Option(
            "what to do with the sample where the reference fits the winner better: praise it, or drop it"
        ),
    ] = "flip",
) -> Terms:
    """−log σ(β (ρ_w − s ρ_0)), s = sign ρ_w without gradient, 1 at 0: SePPO (arXiv 2410.05255), for text.

    A pair is a winner from the data and, in the loser's place, a sample y_0 of the reference, which in the
    paper is a random earlier checkpoint. Where the policy already fits the winner better than the reference
    does, s = 1 and this is DPO; elsewhere the reference counts as the better one and its sample is praised (s
    = −1), or left out with doubt = "drop" (s = 0). The paper is on diffusion models; the loss is
    reconstructed from its description.
    """
    pairs = Pairs.of(batch)
    rho_N = log_ratio(streams, batch, pairs.groups)
    fits_P = rho_N[pairs.winner].detach() >= 0
    sign_P = torch.where(fits_P, 1.0, -1.0 if doubt == "flip" else 0.0)
    margin_P = beta * (pairs.gap(rho_N) + (1 - sign_P) * rho_N[pairs.loser])
    return Terms(pairs.average(-torch.nn.functional.logsigmoid(margin_P)), metrics=ordered(pairs, margin_P))


SEPPO = judged(
    seppo,
    "SePPO, arXiv 2410.05255",
    ORDERED,
)

ENTRIES: dict[str, Objective] = {
    "seppo": replace(SEPPO, certainty="reconstructed"),
    "agent_q": preset(
        get("dpo"),
        "Agent Q, arXiv 2408.07199",
        "DPO on pairs of actions tried in one state of a search tree (`step_pairs`), "
        "with the log-probs that were recorded when they were sampled for the reference's: −log σ(β ((l_w "
        "− b_w) − (l_l − b_l))). It needs no reference, and its anchor is as old as the tree.",
        certainty="notes",
        anchor="behavior",
    ),
    "vipo": preset(
        get("ipo"),
        "VIPO (votes), VPO, arXiv 2410.22891",
        "(h − (2p − 1)/(2β))², p = (v_w + 1)/(v_w + v_l + 2): p (h − 1/(2β))² + (1 − p) (h + 1/(2β))² less "
        "its least value. p is the posterior mean under a uniform prior.",
        certainty="reconstructed",
        votes="mean",
    ),
    "vdpo": preset(
        get("dpo"),
        "VDPO, VPO, arXiv 2410.22891",
        "−p log σ(βh) − (1 − p) log σ(−βh), p = (v_w + 1)/(v_w + v_l + 2): DPO with a label "
        "smoothing of each pair's own, by its votes. Without votes p is ½.",
        certainty="reconstructed",
        votes="mean",
    ),
    "opa_dpo": preset(
        get("dpo"),
        "OPA-DPO, arXiv 2501.09695",
        "DPO against a reference that was first fine-tuned on both sides of each pair (the "
        "recipe opa_dpo has the two phases), plus −log σ(β ρ) of the winner. The paper's terms on "
        "masked images aren't carried. Its code also pushes down the revised response; here both of "
        "its winners stay above the reference.",
        certainty="code",
        called="zhyang2226/OPA-DPO",
        beta=0.1,
        winner=1.0,
    ),
}
