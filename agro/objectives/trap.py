"""What on-policy AGRO says of its own trap (`agro.objectives.consistency.agro_onpolicy`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from agro.objectives.core import Options
from agro.objectives.reduce import Groups

if TYPE_CHECKING:
    from torch import Tensor

WAY_OUT = 'likelihood_ratio = "adaptive" avoids it'


def of_options(options: Options) -> str | None:
    beta = options["beta"]
    if options["likelihood_ratio"] != 1.0 or beta >= 0.5:
        return None
    return (
        "agro_onpolicy falls where rewards are rare: with rewards of 0 and 1 the reward rises from the "
        f"reference only on prompts that it solves more often than ½ − β = {0.5 - beta:.3g} of the time (the "
        f"metric reversed_share counts the others); {WAY_OUT}"
    )


def of_rewards(rewards: NDArray[np.float64], options: Options) -> str | None:
    """From rewards [M,n] of M prompts at the start; None where there is no trap, or nothing is known of it.

    μ₃/(2β Var) of each prompt by the unbiased estimates of both moments, which need n ≥ 3.
    """
    c, beta, n = options["likelihood_ratio"], options["beta"], rewards.shape[1]
    if c == "adaptive" or not c * beta or n < 3:
        return None
    differ = rewards[rewards.max(1) > rewards.min(1)]  # without prompts that have an unknown reward, NaN
    if not len(differ):
        return None
    off = differ - differ.mean(1, keepdims=True)
    ratio = n / (n - 2) * (off**3).sum(1) / (off**2).sum(1) / (2 * beta)
    return (
        f"on {(c * ratio > 1).sum()} of {len(differ)} held-out prompts whose {n} rewards differ (of "
        f"{len(rewards)}) μ₃/(2β Var) of the rewards is above {1 / c:.3g} (median {np.median(ratio):.3g}): "
        f"there agro_onpolicy lowers the reward at first. {WAY_OUT}"
    )


def of_metrics(metrics: Mapping[str, float], options: Options) -> str | None:
    share = metrics["reversed_share"]
    if not share > 0.5:  # NaN where no rewards differ
        return None
    return (
        f"in {share:.0%} of the groups whose rewards differ the best response is pushed down. What to do: "
        'objective.likelihood_ratio = "adaptive", or the objective agro'
    )


def ratio(groups: Groups, R_N: Tensor, beta: float) -> Tensor:
    """[] Σ k₃ / (2β Σ k₂) over the groups of three or more; NaN where there are none that differ, and at β =
    0.

    k₂ and k₃ are a group's unbiased estimates of Var R and μ₃. Of few responses their ratio says little, and
    a pair is always symmetric; the sums over groups estimate E_x μ₃ and E_x Var. Groups of equal R belong to
    both and add nothing.
    """
    n_G, off_N = groups.n, R_N - groups.mean(R_N)
    third_G = n_G * groups.sum(off_N**3) / ((n_G - 1) * (n_G - 2)).clamp(min=1)
    weight_G = groups.weight * (n_G > 2)
    below = 2 * beta * (weight_G * groups.variance(R_N)).sum()
    return torch.where(below > 0, (weight_G * third_G).sum() / below, torch.nan)
