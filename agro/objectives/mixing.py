"""What objectives share that mix own responses with those of an expert (role "expert")."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agro.objectives.advantage import EPS
from agro.objectives.clipped import clipped_gain, floored_gain
from agro.objectives.core import Streams
from agro.objectives.needs import BEHAVIOR_LOGP, OLD_LOGP
from agro.objectives.reduce import Groups
from agro.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


def own_advantage(groups: Groups, std: bool) -> Tensor:
    """[N] r − r̄ among the group's own responses, over (std + 1e-6) with `std`; 0 for an expert's."""
    own_N = ~groups.by_expert
    n_G = groups.sum(own_N.double())
    best_G = groups.largest(torch.where(own_N, groups.reward, -torch.inf))
    below_N = torch.where(own_N, groups.reward - best_G[groups.group], 0.0)  # equal ones are exactly 0
    mean_G = groups.sum(below_N) / n_G.clamp(min=1)
    off_N = torch.where(own_N, below_N - mean_G[groups.group], 0.0)
    if not std:
        return off_N
    variance_G = groups.sum(off_N.square()) / (n_G - 1).clamp(min=1)
    return off_N / (variance_G.sqrt()[groups.group] + EPS)


def own_log_ratio(streams: Streams, batch: Batch, ratio: str, own_BT: Tensor) -> Tensor:
    """[B,T] log π − log μ of own tokens, 0 elsewhere."""
    anchor_BT = (OLD_LOGP if ratio == "old" else BEHAVIOR_LOGP).of(batch)
    if anchor_BT is None:  # no row is the policy's own
        return torch.zeros_like(streams["logp"])
    return torch.where(own_BT, streams["logp"] - anchor_BT, 0.0)


def own_gain(
    w_BT: Tensor, advantage_B1: Tensor, clip: tuple[float, float] | None, dual_clip: float | None = None
) -> Tensor:
    """[B,T] min(w A, clamp(w, 1−ε_low, 1+ε_high) A), and where A < 0 at least c A."""
    gain_BT = w_BT * advantage_B1
    if clip is not None:
        gain_BT = clipped_gain(w_BT, advantage_B1, 1 - clip[0], 1 + clip[1])
    return gain_BT if dual_clip is None else floored_gain(gain_BT, advantage_B1, dual_clip)


def shaped(log_ratio_BT: Tensor, log_gamma: float | Tensor) -> Tensor:
    """[B,T] w/(w + γ) of log w."""
    return (log_ratio_BT - log_gamma).sigmoid()
