"""Ratios of the trained policy to what the samples were drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from agro.objectives.needs import BEHAVIOR_LOGP, OLD_LOGP, Need
from agro.objectives.options import Option
from agro.objectives.reduce import Groups
from agro.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

Ratio = Annotated[
    Literal["behavior", "old"],
    Option("the ratio's denominator: recorded log-probs, or the trainer's when the batch was drawn"),
]
Level = Annotated[
    Literal["token", "sequence", "mean"],
    Option("the ratio of a token, of its response, or the geometric mean of those of its response"),
]


def needed(options: Mapping[str, Any]) -> Need:
    """What the option `ratio` needs."""
    return OLD_LOGP if options["ratio"] == "old" else BEHAVIOR_LOGP


def log_ratio(streams: Mapping[str, Tensor], batch: Batch, ratio: str) -> Tensor:
    """[B,T] log π − log μ of each token, 0 outside the mask."""
    anchor_BT = batch.behavior_logp if ratio == "behavior" else batch.old_logp
    assert anchor_BT is not None
    return torch.where(batch.mask, streams["logp"] - anchor_BT, 0.0)


def of_level(groups: Groups, log_ratio_BT: Tensor, level: str) -> Tensor:
    """[B,T] the same for "token"; for "sequence" and "mean" that of the token's response."""
    if level == "token":
        return log_ratio_BT
    average = "sum" if level == "sequence" else "token"
    of_response = groups.over_tokens(log_ratio_BT, average)[groups.batch.response]
    return of_response[:, None].expand_as(log_ratio_BT)
