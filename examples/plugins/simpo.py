"""Your own objective, with claims that `agro prove` checks by enumeration: SimPO, on judged pairs.

    agro prove examples/plugins/simpo.py:SIMPO
    agro train pairs data.store=pairs.db policy.model=MODEL objective.name=examples/plugins/simpo.py:SIMPO

An installed package registers it in its pyproject.toml; then a run uses that name:

    [project.entry-points."agro.objectives"]
    simpo = "my_package.simpo:SIMPO"
"""

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from agro.objectives import Objective
from agro.objectives.core import SINGLETONS, Streams, Terms, always, coupling
from agro.objectives.needs import PAIRS
from agro.objectives.options import Option
from agro.objectives.reduce import Pairs
from agro.proof.claim import Claims
from agro.proof.claims.preference_claims import on_pairs
from agro.proof.formulas import Situation
from agro.types import Batch


def simpo(
    streams: Streams,
    batch: Batch,
    *,
    beta: Annotated[float, Option("scale of the margin", "logit of a judgment per nat a token", gt=0)] = 2.0,
    margin: Annotated[float, Option("γ: how far above 0 the margin is wanted", "logit", ge=0)] = 0.5,
) -> Terms:
    """−log σ(β h − γ), h the winner's mean token log-prob minus the loser's (arXiv 2405.14734, eq. 6)."""
    pairs = Pairs.of(batch)
    margin_P = beta * pairs.gap(pairs.groups.mean_tokens(streams["logp"]))
    return Terms(pairs.average(F.softplus(margin - margin_P)))


SIMPO = Objective(
    simpo,
    "SimPO, arXiv 2405.14734, eq. 6",
    always(PAIRS),
    coupling("group"),
    ingredients=(SINGLETONS,),
    certainty="code",
)


def expected(s: Situation) -> Tensor:
    """E −log σ(β h − γ) over all pairs of responses, by the definition."""
    mean_XY = s.policy.logp() / s.policy.space.lengths
    return on_pairs(s, lambda w, x: F.softplus(0.5 - s.beta * (w - x)), mean_XY)


# Without a reference, its optimum differs from AGRO's: "elsewhere".
CLAIMS = {"SIMPO": (Claims(expected, "elsewhere", ("pairs",), n=(2,), noise=False, updates=200),)}
