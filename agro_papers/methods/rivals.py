"""Pairs that a run makes itself, a demonstration over a sample of an earlier version or two turns of a
search; and pairs with votes."""

from __future__ import annotations

from typing import Annotated, Literal

import torch

from agro.objectives.core import Objective, Streams, Terms
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


ENTRIES: dict[str, Objective] = {"seppo": judged(seppo, "SePPO, arXiv 2410.05255", ORDERED)}
