"""Advantages: how much a response's reward exceeds those that it is compared with.

They depend only on rewards, their parts and lengths, so no row's gradient depends on another row's log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch

from agro.objectives.needs import GROUPS, PART_WEIGHTS, REWARD, REWARD_PARTS
from agro.objectives.options import Option
from agro.objectives.reduce import Groups, center, standardize, token_mean
from agro.types import Tensor

VARIANCE = 1e-8  # floor of a step's variance, whose root divides advantages
ROUNDING = 1e-9  # differences below this share of the range or size of rewards are rounding

Std = Annotated[bool, Option("divide the advantage by the group's standard deviation")]


def advantage(groups: Groups, kind: str) -> Tensor:
    """[N] the advantage of each response."""
    return KINDS[kind](groups)


def of_tokens(groups: Groups, kind: str) -> Tensor:
    """[B,1] the advantage of each row's response."""
    return advantage(groups, kind)[groups.batch.response][:, None]


def centered(groups: Groups) -> Tensor:
    """[N] r − r̄."""
    return center(groups.reward, groups.group)


def standardized(groups: Groups) -> Tensor:
    """[N] (r − r̄)/(std + 1e-6), std with n − 1 (GRPO)."""
    return standardize(groups.reward, groups.group)


def relative(groups: Groups, std: bool) -> Tensor:
    """[N] `standardized` with `std`, else `centered`."""
    return standardized(groups) if std else centered(groups)


def against_others(groups: Groups) -> Tensor:
    """[N] r − the mean of the others, n/(n−1) times r − r̄ (RLOO)."""
    return groups.reward - groups.mean_others(groups.reward)


def over_mean(groups: Groups) -> Tensor:
    """[N] (r − r̄)/|r̄| (MaxRL, arXiv 2602.02710), for rewards of 0 or more; 0 if all are 0.

    With rewards of 0 and 1 its gradient is that of the mean log π over the correct responses, minus that over
    all.
    """
    off_N = centered(groups)
    return torch.where(off_N == 0, 0.0, off_N / groups.mean(groups.reward).abs())


def against_length_weighted(groups: Groups) -> Tensor:
    """[N] r − Σ T r / Σ T over the group, T tokens: the baseline of least variance if the squared norm of a
    response's ∇log π is proportional to its length (OPO, arXiv 2505.23585)."""
    tokens_N = groups.sum_tokens(torch.ones_like(groups.batch.mask, dtype=torch.float64))
    baseline_G = groups.sum(tokens_N * groups.reward) / groups.sum(tokens_N)
    return groups.reward - baseline_G[groups.group]


def normalized_in_step(groups: Groups, v_N: Tensor) -> Tensor:
    """[N] v minus its mean over the step's tokens, divided by their standard deviation, at least 1e-4
    (REINFORCE++, arXiv 2501.03262; for v = r − r̄ REINFORCE++-baseline)."""
    v_BT = groups.at_tokens(v_N)
    mean = token_mean(groups.batch, v_BT)
    variance = token_mean(groups.batch, (v_BT - mean).square())
    off_N = torch.where(v_N.max() == v_N.min(), 0.0, v_N - mean)
    return off_N / variance.clamp(min=VARIANCE).sqrt()


def normalized_over_responses(groups: Groups, v_N: Tensor) -> Tensor:
    """[N] v minus its mean over the step's responses, divided by their standard deviation (n − 1), at least
    1e-4 (SPO, arXiv 2509.13232); 0 if they differ only by rounding. A response has its group's weight."""
    weight_N = groups.weight[groups.group]
    share_N = weight_N / weight_N.sum()
    n = (weight_N > 0).sum()
    off_N = v_N - (share_N * v_N).sum()
    variance = (share_N * off_N.square()).sum() * n / (n - 1).clamp(min=1)
    rounding = ROUNDING * groups.reward.abs().max().clamp(min=1.0)
    return torch.where(v_N.max() - v_N.min() <= rounding, 0.0, off_N / variance.clamp(min=VARIANCE).sqrt())


def normalized_by_part(groups: Groups) -> Tensor:
    """[N] Σ_k w_k (r_k − r̄_k)/(std r_k + 1e-6) over the parts of a reward with weights w, then
    `normalized_in_step` (GDPO, arXiv 2601.05242).

    Each part is standardized in the group alone, so that one with large values doesn't hide the others, and
    two responses with equal sums of different parts differ.
    """
    columns = [standardize(part_N, groups.group) for part_N in groups.extra("reward_parts").unbind(1)]
    return normalized_in_step(groups, (groups.extra("part_weights") * torch.stack(columns, 1)).sum(1))


def after_drops(groups: Groups) -> Tensor:
    """[N] RED-Drop's advantage (arXiv 2509.24203), the mean over its random drops.

    If more responses of a group are below r̄ (M) than not (P), it drops M − P of the former at random. The
    advantage is r minus the mean of the remaining 2P, and 0 for dropped responses. A response below r̄
    remains with probability P/M.
    """
    r_N, group = groups.reward, groups.group
    largest_G, smallest_G = groups.extremes(r_N)
    below_N = -centered(groups) > ROUNDING * (largest_G - smallest_G)[group]
    negative_N = below_N.double()
    M_N, P_N = groups.sum(negative_N)[group], groups.sum(1 - negative_N)[group]
    negative_sum_N = groups.sum(negative_N * r_N)[group]
    positive_sum_N = groups.sum((1 - negative_N) * r_N)[group]
    # The expected sum of the remaining negatives: over all drops, and over those in which this one remains.
    expected_sum_N = P_N * negative_sum_N / M_N
    sum_with_it_N = r_N + (P_N - 1) * (negative_sum_N - r_N) / (M_N - 1)
    positive_N = r_N - (positive_sum_N + expected_sum_N) / (2 * P_N)
    may_drop_N = P_N / M_N * (r_N - (positive_sum_N + sum_with_it_N) / (2 * P_N))
    dropping_N = torch.where(negative_N > 0, may_drop_N, positive_N)
    return torch.where(M_N > P_N, dropping_N, centered(groups))


KINDS: dict[str, Callable[[Groups], Tensor]] = {
    "mean": centered,
    "standardized": standardized,
    "others": against_others,
    "maxrl": over_mean,
    "opo": against_length_weighted,
    "reinforce_pp": lambda groups: normalized_in_step(groups, groups.reward),
    "reinforce_pp_baseline": lambda groups: normalized_in_step(groups, centered(groups)),
    "red_drop": after_drops,
    "gdpo": normalized_by_part,
}
Advantage = Annotated[
    Literal[
        "mean",
        "standardized",
        "others",
        "maxrl",
        "opo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "red_drop",
        "gdpo",
    ],
    Option(
        "how rewards become advantages: r minus the group's mean, that divided by the group's standard "
        "deviation, r minus the mean of the others, or the advantage of the method of this name",
        # Groups of two, unless rewards are compared over the step; GDPO reads the parts of rewards.
        needs={
            **dict.fromkeys(KINDS, (REWARD, GROUPS)),
            "reinforce_pp": (REWARD,),
            "gdpo": (REWARD_PARTS, PART_WEIGHTS, GROUPS),
        },
    ),
]
