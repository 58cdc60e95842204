"""REINFORCE in groups with a mask or a weight of the tokens (REC and RED, arXiv 2509.24203)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch

from agro.objectives import advantage as advantages
from agro.objectives.advantage import Advantage
from agro.objectives.core import SINGLETONS, Objective, Options, Streams, Terms, always
from agro.objectives.imitation import IMITATION
from agro.objectives.methods.clipped import limited
from agro.objectives.needs import BEHAVIOR_LOGP, GROUPS, REWARD, Need
from agro.objectives.options import Option
from agro.objectives.reduce import Groups, token_mean
from agro.objectives.weights import log_ratio
from agro.types import Batch, Tensor

Mask = Annotated[
    Literal["none", "one_side", "two_side", "ring"], Option("which tokens are masked, by their ratio")
]
Limits = tuple[float, float]
Clip = Annotated[Limits, Option("how far below and above 1 the ratio of a kept token may be", "ratio", ge=0)]
Ring = Annotated[
    Limits, Option("how far a ratio has to go back to be kept again, below and above 1", "ratio", ge=0)
]


def rec(
    streams: Streams,
    batch: Batch,
    *,
    mask: Mask = "none",
    token_weight: Annotated[Literal["none", "is"], Option("the weight of a token: 1, or its ratio")] = "none",
    clip: Clip = (0.2, 0.2),
    ring: Ring = (0.6, 2.0),
    advantage: Advantage = "mean",
) -> Terms:
    """REC (arXiv 2509.24203): −sg[M ω] A log π, mean over all tokens of the step, w = π/μ token by token.

    M is 1 for "none"; for "one_side" where A ≥ 0 and w ≤ 1+ε_high, or A ≤ 0 and w ≥ 1−ε_low; for "two_side"
    where 1−ε_low ≤ w ≤ 1+ε_high; for "ring" there, and where A ≥ 0 and w ≤ 1−`ring`[0], or A ≤ 0 and w ≥
    1+`ring`[1]. ω is 1 (NoIS) or w. One-sided and weighed by w the gradient is that of PPO's clip. The ring's
    limits are 0.6 and 2.0 in Trinity's default_args, 0.4 and 0.4 in its constructor.
    """
    advantage_B1 = advantages.of_tokens(Groups.of(batch), advantage)
    logp_BT = streams["logp"]
    if mask == "none" and token_weight == "none":
        return Terms(token_mean(batch, -advantage_B1 * logp_BT))
    w_BT = log_ratio(streams, batch, "behavior").detach().exp()
    unmasked_BT = _unmasked(mask, w_BT, advantage_B1, clip, ring)
    weight_BT = torch.where(unmasked_BT, w_BT if token_weight == "is" else 1.0, 0.0)
    return limited(token_mean(batch, -weight_BT * advantage_B1 * logp_BT), batch, ~unmasked_BT, w_BT)


def _unmasked(mask: str, w_BT: Tensor, advantage_B1: Tensor, clip: Limits, ring: Limits) -> Tensor:
    """[B,T] the tokens that aren't masked."""
    up_B1, down_B1 = advantage_B1 >= 0, advantage_B1 <= 0
    above_low_BT, below_high_BT = w_BT >= 1 - clip[0], w_BT <= 1 + clip[1]
    if mask == "none":
        return torch.ones_like(w_BT, dtype=torch.bool)
    if mask == "one_side":
        return (up_B1 & below_high_BT) | (down_B1 & above_low_BT)
    band_BT = above_low_BT & below_high_BT
    if mask == "two_side":
        return band_BT
    return band_BT | (up_B1 & (w_BT <= 1 - ring[0])) | (down_B1 & (w_BT >= 1 + ring[1]))


def red_weight(
    streams: Streams,
    batch: Batch,
    *,
    temperature: Annotated[float, Option("T of the weight exp(A/T)", "reward", gt=0)] = 1.0,
) -> Terms:
    """RED-Weight (arXiv 2509.24203): −exp(A/T) A log π, A = r − r̄, mean over all tokens of the step.

    REINFORCE without ratios in which better responses weigh more: with r̄_w the mean of the rewards under
    these weights it is −exp(A/T) (r − r̄_w) log π, and imitation of the weighted responses times r̄_w − r̄ ≥ 0.
    """
    advantage_B1 = advantages.of_tokens(Groups.of(batch), "mean")
    weight_B1 = (advantage_B1 / temperature).exp()
    return Terms(token_mean(batch, -weight_B1 * advantage_B1 * streams["logp"]))


def _needs(options: Options) -> set[Need]:
    uses_ratio = options["mask"] != "none" or options["token_weight"] == "is"
    return advantages.needs(options) | ({BEHAVIOR_LOGP} if uses_ratio else set())


ENTRIES: dict[str, Objective] = {
    "rec": Objective(
        rec,
        "REC, arXiv 2509.24203",
        _needs,
        ingredients=(IMITATION, SINGLETONS),
        metrics=("clipped_share", "ratio_max"),
    ),
    "red_weight": Objective(
        red_weight,
        "RED-Weight, arXiv 2509.24203",
        always(REWARD, GROUPS),
        ingredients=(IMITATION, SINGLETONS),
    ),
}
