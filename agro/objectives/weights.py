"""A weight of each response's part of the gradient, for responses that the policy didn't write.

Multiplied into what the objective's gradient is in the response's log-probs, and constant itself. AGRO's part
of response i is then −w_i (β/n) (R_i − R̄_{-i}) ∇log π(y_i). The derivation and measurements are in
docs/guide/weights.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from torch import Tensor

from agro.objectives.needs import BEHAVIOR_LOGP, REF_LOGP, Column, Need
from agro.objectives.options import Option
from agro.objectives.reduce import Groups
from agro.types import Batch

Weight = Annotated[
    Literal["none", "reference", "behavior"],
    Option(
        "of each response's part of the gradient, for stored samples: 1, or up to weight_max π/π_ref or π/μ "
        "of the response, μ being the recorded behavior"
    ),
]
WeightMax = Annotated[float, Option("largest weight of a response", "ratio", gt=0)]
ANCHORS: dict[str, Column] = {"reference": REF_LOGP, "behavior": BEHAVIOR_LOGP}
OPTIONS: dict[str, tuple[Any, Any]] = {"weight": (Weight, "none"), "weight_max": (WeightMax, 1.0)}


def needs(options: Mapping[str, Any]) -> set[Need]:
    """What the ratio is of, beside the policy."""
    return set() if options["weight"] == "none" else {ANCHORS[options["weight"]]}


def conflict(options: Mapping[str, Any]) -> str:
    """Why these options exclude each other, "" where they don't."""
    if options["weight"] != "none" or options["weight_max"] == 1.0:
        return ""
    return (
        f'weight_max = {options["weight_max"]} limits a weight, but weight = "none"; set weight = '
        '"reference", or leave weight_max out'
    )


def weights(options: Mapping[str, Any], logp_BT: Tensor, batch: Batch) -> Tensor | None:
    """[N] min(c, π/π_ref) or min(c, π/μ) of each complete response, c = `weight_max`; None without one."""
    if options["weight"] == "none":
        return None
    anchor_BT = ANCHORS[options["weight"]].of(batch)
    assert anchor_BT is not None
    ratio_N = Groups.of(batch).sum_tokens(logp_BT.detach() - anchor_BT)
    return ratio_N.clamp(max=math.log(options["weight_max"])).exp()
