"""SquaredPO (arXiv 2602.06788), a candidate for judged pairs: f-DPO with f(t) = ½ (log t)²."""

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F

from agro.objectives import Objective
from agro.objectives.core import SINGLETONS, Streams, Terms, always, coupling
from agro.objectives.needs import PAIRS, REF_LOGP
from agro.objectives.options import Option
from agro.objectives.reduce import Pairs
from agro.types import Batch

LEAST = -25.0  # nats of a loser, where the sigmoid was saturated long before


def squared_preference(
    streams: Streams,
    batch: Batch,
    *,
    beta: Annotated[float, Option("scale of the margin", "logit of a judgment", gt=0)] = 0.1,
) -> Terms:
    """−log σ(β f′(t_w) − β f′(t_l)), t = π/π_ref of a response and f′(t) = log t / t."""
    assert batch.ref_logp is not None
    pairs = Pairs.of(batch)
    rho_N = pairs.groups.sum_tokens(streams["logp"] - batch.ref_logp).clamp(min=LEAST)
    return Terms(pairs.average(F.softplus(-beta * pairs.gap(rho_N * (-rho_N).exp()))))


SQUARED = Objective(
    squared_preference,
    "SquaredPO, arXiv 2602.06788",
    always(PAIRS, REF_LOGP),
    coupling("group"),
    ingredients=(SINGLETONS,),
    certainty="notes",
)
