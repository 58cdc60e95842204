"""Consistency with other means of a group; see `agro.proof.formulas`."""

from __future__ import annotations

import torch
from torch import Tensor

from agro.proof.formulas import Situation


def square_to_reward(s: Situation, ratio_XY: Tensor) -> Tensor:
    """E (r_1 − β log ratio − r̄)², r̄ the mean reward of a group (Kimi)."""
    u_XY, r_XKn = s.reward - s.beta * ratio_XY, s.reward[:, s.groups]
    return s.mean_groups((u_XY[:, s.groups[:, 0]] - r_XKn.mean(-1)).square())


def lower_baseline(s: Situation, most: float) -> Tensor:
    """−n/(n−1) E w_1 (R_1 − min(R̄, R̄_w)) log π(y_1), w = min(most, π/f), R̄ and R̄_w the plain and the weighted
    mean of a group (statement 25 with the lower baseline)."""
    R_XKn = (s.reward - s.beta * s.d).detach()[:, s.groups]
    w_XKn = s.d.detach().exp().clamp(max=most)[:, s.groups]
    lower_XK = torch.minimum(R_XKn.mean(-1), (w_XKn * R_XKn).sum(-1) / w_XKn.sum(-1))
    part_XK = w_XKn[..., 0] * (R_XKn[..., 0] - lower_XK) * s.policy.logp()[:, s.groups[:, 0]]
    return -s.n / (s.n - 1) * s.mean_groups(part_XK)
