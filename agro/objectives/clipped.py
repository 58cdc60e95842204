"""Objectives with a clipped importance ratio."""

from __future__ import annotations

import torch

from agro.objectives.core import Streams, Terms
from agro.objectives.reduce import Groups
from agro.types import Batch

EPS = 1e-6  # in the denominator of a standardised advantage


def grpo(
    streams: Streams, batch: Batch, *, ratio: str, clip: tuple[float, float], std: bool, beta: float
) -> Terms:
    """GRPO (arXiv 2402.03300, eq. 3): −min(w A, clamp(w, 1−ε_low, 1+ε_high) A) + β k3, w = π/μ token by token.

    A = (r − r̄)/(std + 1e-6) in the group, std with n − 1, or r − r̄ without `std`. Token mean in a response, mean in
    a group, mean over groups. k3 = π_ref/π − log(π_ref/π) − 1.
    """
    groups = Groups.of(batch)
    logp = streams["logp"]
    anchor = batch.behavior_logp if ratio == "behavior" else batch.old_logp
    assert anchor is not None
    A = groups.reward - groups.mean(groups.reward)
    if std:
        A = A / (groups.variance(groups.reward).sqrt()[groups.group] + EPS)
    advantage = A[batch.response][:, None]
    w = torch.where(batch.mask, logp - anchor, 0.0).exp()
    clipped = w.clamp(1 - clip[0], 1 + clip[1])
    gain = torch.minimum(w * advantage, clipped * advantage)
    per_token = -gain
    if beta > 0:
        assert batch.ref_logp is not None
        d = batch.ref_logp - logp
        per_token = per_token + beta * (d.exp() - d - 1)
    active = ((w * advantage > gain) & batch.mask).sum() / batch.mask.sum()
    return Terms(
        groups.average_responses(groups.mean_tokens(per_token)),
        metrics={"clipped_share": active, "ratio_max": w.max()},
    )
