"""Objectives with a clipped importance ratio.

GRPO with a correction for what else than the trainer's policy generated the samples.

All of them clip the ratio to π_old, the trainer's policy when the batch was drawn, and weigh each token's
gradient by π_old/μ within bounds, μ being what the sampler recorded. The bounds, the level and what happens
outside them are options of `agro.objectives.weights`, which says what is averaged over. On samples of another
staleness too they estimate the gradient of GRPO at π_old, but for the bounds.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch

from agro.objectives.advantage import Std, relative
from agro.objectives.core import SINGLETONS, Objective, Options, Streams, Terms
from agro.objectives.imitation import IMITATION
from agro.objectives.kl_term import KL_TERM
from agro.objectives.needs import GROUPS, REWARD, Need
from agro.objectives.options import Average, Option
from agro.objectives.reduce import Groups, average_tokens
from agro.objectives.weights import WEIGHT, Ratio, log_ratio, needed
from agro.types import Batch, Tensor

Clip = Annotated[tuple[float, float], Option("how far below and above 1 the ratio may go", "ratio", ge=0)]
LogClip = Annotated[
    tuple[float, float], Option("how far below and above 0 a token's log-ratio may go", "nats", ge=0)
]
DualClip = Annotated[
    float | None,
    Option(
        "where the advantage is negative, the ratio at which the gradient ends; None: nowhere", "ratio", gt=1
    ),
]


def grpo(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    clip: Clip = (0.2, 0.2),
    dual_clip: DualClip = None,
    std: Std = True,
    average: Average = "response",
) -> Terms:
    """GRPO (arXiv 2402.03300, eq. 3): −min(w A, clamp(w, 1−ε_low, 1+ε_high) A) + β k3, w = π/μ token by
    token.

    A = (r − r̄)/(std + 1e-6) in the group, std with n − 1, or r − r̄ without `std`. Token mean in a response,
    mean in a group, mean over groups. k3 = π_ref/π − log(π_ref/π) − 1. `dual_clip` c bounds the gain from
    below by c A where A < 0 (arXiv 1912.09729, eq. 5).
    """
    groups = Groups.of(batch)
    advantage_BT = groups.at_tokens(relative(groups, std))
    w_BT = log_ratio(streams, batch, ratio).exp()
    gain_BT = clipped_gain(w_BT, advantage_BT, 1 - clip[0], 1 + clip[1])
    if dual_clip is not None:
        gain_BT = floored_gain(gain_BT, advantage_BT, dual_clip)
    return limited(average_tokens(groups, -gain_BT, average), batch, w_BT * advantage_BT != gain_BT, w_BT)


def gspo(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    clip: Clip = (3e-4, 4e-4),
    std: Std = True,
    average: Average = "response",
) -> Terms:
    """GSPO (arXiv 2507.18071, eqs. 5 to 7): −min(s A, clamp(s, 1−ε_low, 1+ε_high) A), one ratio a response.

    s = exp(mean_t log π/μ) is the geometric mean of the response's token ratios, A as in `grpo`. Mean in a
    group, mean over groups. All tokens of a response share one coefficient, −s A / (n T) where the ratio
    isn't clipped.
    """
    groups = Groups.of(batch)
    advantage_N = relative(groups, std)
    s_N = groups.mean_tokens(log_ratio(streams, batch, ratio)).exp()
    gain_N = clipped_gain(s_N, advantage_N, 1 - clip[0], 1 + clip[1])
    loss = average_tokens(groups, -groups.at_tokens(gain_N), average)
    clipped = (s_N * advantage_N > gain_N).double().mean()
    return Terms(loss, metrics={"clipped_share": clipped, "ratio_max": s_N.max()})


def gmpo(
    streams: Streams, batch: Batch, *, ratio: Ratio = "behavior", clip: LogClip = (0.4, 0.4), std: Std = True
) -> Terms:
    """GMPO (arXiv 2507.20673, eq. 4): −A (Π_t w_t)^(1/T), each token's ratio clipped before the mean.

    log w_t is clamped to −clip[0] … clip[1] where the clamp lowers the gain: above where A > 0, below where
    A < 0. A as in `grpo`. Mean in a group, mean over groups. A clipped token gets no gradient, the others of
    its response −s A / (n T), s the geometric mean.
    """
    groups = Groups.of(batch)
    advantage_N = relative(groups, std)
    log_w_BT = log_ratio(streams, batch, ratio)
    within_BT = log_w_BT.clamp(-clip[0], clip[1])
    lowered_BT = torch.where(
        groups.at_tokens(advantage_N) > 0, log_w_BT.minimum(within_BT), log_w_BT.maximum(within_BT)
    )
    s_N = groups.mean_tokens(lowered_BT).exp()
    loss = groups.average_responses(-advantage_N * s_N)
    return limited(loss, batch, lowered_BT != log_w_BT, log_w_BT.exp())


def clipped_gain(w: Tensor, A: Tensor, low: float, high: float) -> Tensor:
    """min(w A, clamp(w, low, high) A)."""
    return torch.minimum(w * A, w.clamp(low, high) * A)


def floored_gain(gain: Tensor, A: Tensor, dual_clip: float) -> Tensor:
    """max(gain, c A) where A < 0 (dual clip)."""
    return torch.where(A < 0, torch.maximum(gain, dual_clip * A), gain)


def limited(loss: Tensor, batch: Batch, stopped_BT: Tensor, w_BT: Tensor) -> Terms:
    """With the share of the tokens that are stopped, and the largest ratio."""
    stopped = (stopped_BT & batch.mask).sum() / batch.mask.sum()
    return Terms(loss, metrics={"clipped_share": stopped, "ratio_max": w_BT.max()})


def ratio_needs(options: Options) -> set[Need]:
    """Of groups with rewards, and ratios."""
    return {REWARD, GROUPS, needed(options)}


_entry = partial(
    Objective, ingredients=(WEIGHT, KL_TERM, IMITATION, SINGLETONS), metrics=("clipped_share", "ratio_max")
)
ENTRIES: dict[str, Objective] = {
    "grpo": _entry(grpo, "GRPO, arXiv 2402.03300, eq. 3", ratio_needs),
    "gspo": _entry(gspo, "GSPO, arXiv 2507.18071, eqs. 5 to 7", ratio_needs),
    "gmpo": _entry(gmpo, "GMPO, arXiv 2507.20673, eq. 4", ratio_needs),
}
