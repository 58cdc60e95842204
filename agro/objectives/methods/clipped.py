"""Objectives with a clipped importance ratio, and corrections for samples that another policy generated.

Those on groups clip the ratio to π_old, the trainer's policy when the batch was drawn, and may weight each
token's gradient by π_old/μ within bounds, where μ is what the sampler recorded. The bounds, the level and the
rule outside them are options of `agro.objectives.ingredients`, which describes the denominators. Apart from
the bounds, they estimate GRPO's gradient at π_old on samples of any staleness.

PPO has a critic: a value at every token, learned with the policy, from which advantages are estimated.
Advantages and the value's targets are constants of a batch, even over several updates: they use the values
when it was drawn, as the ratios use the policy that sampled it.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch

from agro.objectives.advantage import Std, relative
from agro.objectives.core import SINGLETONS, Objective, Streams, Terms, always
from agro.objectives.ingredients import IMITATION, KL_TERM, WEIGHT, Ratio, log_ratio
from agro.objectives.needs import BEHAVIOR_LOGP, DRAWN_VALUE, GROUPS, PREFIX_VALUE, REWARD
from agro.objectives.options import Average, Option
from agro.objectives.reduce import Groups, average_tokens, refuse_several_rows, token_mean
from agro.types import Batch, Tensor

Clip = Annotated[tuple[float, float], Option("how far below and above 1 the ratio may go", "ratio", ge=0)]
LogClip = Annotated[
    tuple[float, float], Option("how far below and above 0 a token's log-ratio may go", "nats", ge=0)
]
DualClip = Annotated[
    float | None,
    Option("ratio above which tokens of negative advantage get no gradient; None: no bound", "ratio", gt=1),
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
    """GRPO (arXiv 2402.03300, eq. 3): −min(w A, clamp(w, 1−ε_low, 1+ε_high) A) + β k3, w = π/μ per token.

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
    """GSPO (arXiv 2507.18071, eqs. 5 to 7): −min(s A, clamp(s, 1−ε_low, 1+ε_high) A), one ratio per response.

    s = exp(mean_t log π/μ) is the geometric mean of the response's token ratios, A as in `grpo`. Mean in a
    group, mean over groups. All tokens of a response share one coefficient, −s A / (n T) unless the ratio
    is clipped.
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

    log w_t is clamped to −clip[0] … clip[1] if that lowers the gain: from above if A > 0, from below if
    A < 0. A as in `grpo`. Mean in a group, mean over groups. A clipped token gets no gradient, the others of
    its response get −s A / (n T), s the geometric mean.
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


def limited(loss: Tensor, batch: Batch, clipped_BT: Tensor, w_BT: Tensor) -> Terms:
    """The loss with two metrics: the share of clipped tokens, and the largest ratio."""
    clipped = (clipped_BT & batch.mask).sum() / batch.mask.sum()
    return Terms(loss, metrics={"clipped_share": clipped, "ratio_max": w_BT.max()})


def ppo(
    streams: Streams,
    batch: Batch,
    *,
    clip: Clip = (0.2, 0.2),
    value_clip: Annotated[
        float | None,
        Option("how far a value may move from that when the batch was drawn; None: no bound", "reward", gt=0),
    ] = 0.2,
    gae_lambda: Annotated[
        tuple[float, float],
        Option(
            "λ of the advantages and of the value's targets: 0 trusts the next value, 1 only rewards",
            "share",
            ge=0,
            le=1,
        ),
    ] = (0.95, 0.95),
    gamma: Annotated[float, Option("discount of rewards per token", "share", gt=0, le=1)] = 1.0,
    average: Average = "token",
) -> Terms:
    """PPO (arXiv 1707.06347): −min(w A, clamp(w, 1−ε_low, 1+ε_high) A), w = π/μ per token, A by GAE, plus
    the value's loss ½ max((V − G)², (clamp(V, V_old ± value_clip) − G)²).

    GAE (arXiv 1506.02438): A_t = Σ_{k≥t} (γλ)^(k−t) δ_k, δ_k = r_k + γ V_old(y_≤k) − V_old(y_<k), with value
    0 after the last token. G_t = V_old(y_<t) + A_t with the second λ, which is 1 in VC-PPO (arXiv 2503.01491)
    and VAPO (2504.05118). Token rewards are `extra["token_reward"]` [B,T] if the batch has it (NaN: none);
    one between two tokens of the policy counts for the earlier token. The remainder of a response's reward
    comes at its last token. V_old is `old_value` [B,T].

    Advantages aren't standardized, as in the paper; verl and TRL standardize them over the step, and TRL
    weights the value's loss by a tenth. Adam is invariant to their scale. On fresh samples with λ = γ = 1 the
    policy's expected gradient is that of the reward, whatever the values are.
    """
    refuse_several_rows(batch, "objective ppo", "grpo or agro")
    assert batch.old_value is not None
    groups, reward_BT = Groups.of(batch), _token_rewards(batch)
    old_BT = torch.where(batch.mask, batch.old_value.double(), 0.0)
    advantage_BT, other_BT = (gae(reward_BT, old_BT, batch.mask, gamma, share) for share in gae_lambda)
    target_BT, value_BT = old_BT + other_BT, streams["prefix_value"]
    w_BT = log_ratio(streams, batch, "behavior").exp()
    gain_BT = clipped_gain(w_BT, advantage_BT, 1 - clip[0], 1 + clip[1])
    error_BT = (value_BT - target_BT).square()
    if value_clip is not None:
        near_BT = torch.clamp(value_BT, old_BT - value_clip, old_BT + value_clip)
        error_BT = torch.maximum(error_BT, (near_BT - target_BT).square())
    value_loss = average_tokens(groups, 0.5 * error_BT, average)
    metrics = {
        **limited(value_loss, batch, w_BT * advantage_BT != gain_BT, w_BT).metrics,
        "value_loss": value_loss,
        "value_mean": token_mean(batch, value_BT),
        "explained_variance": explained_variance(batch, old_BT, target_BT),
    }
    return Terms(average_tokens(groups, -gain_BT, average) + value_loss, metrics=metrics)


def gae(reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, share: float) -> Tensor:
    """[B,T] advantages at the tokens of the mask, 0 elsewhere: δ_t + γλ A of the next one (λ: `share`).

    `value_BT` is the value of the prefix before each token. A reward outside the mask counts for the token
    before it.
    """
    advantage_BT = torch.zeros_like(value_BT)
    next_value_B, next_advantage_B, later_B = torch.zeros_like(value_BT[:, :1]).expand(-1, 3).unbind(1)
    for t in reversed(range(mask_BT.shape[1])):
        here_B, later_B = mask_BT[:, t], later_B + reward_BT[:, t]
        error_B = later_B + gamma * next_value_B - value_BT[:, t]
        now_B = error_B + gamma * share * next_advantage_B
        advantage_BT[:, t] = torch.where(here_B, now_B, 0.0)
        next_advantage_B = torch.where(here_B, now_B, next_advantage_B)
        next_value_B = torch.where(here_B, value_BT[:, t], next_value_B)
        later_B = torch.where(here_B, 0.0, later_B)
    return advantage_BT


def explained_variance(batch: Batch, value_BT: Tensor, target_BT: Tensor) -> Tensor:
    """[] 1 − Var(G − V)/Var(G) over the tokens of the step; NaN if all targets are equal."""

    def variance(x_BT: Tensor) -> Tensor:
        return token_mean(batch, (x_BT - token_mean(batch, x_BT)).square())

    spread = variance(target_BT)
    return torch.where(spread > 0, 1 - variance(target_BT - value_BT) / spread, torch.nan)


def _token_rewards(batch: Batch) -> Tensor:
    """[B,T] the reward of each token, and the remainder of the response's reward at the last one."""
    token_reward = batch.extra.get("token_reward")
    last_BT = batch.mask & (batch.mask.flip(1).cumsum(1).flip(1) == 1)
    if token_reward is None:
        return torch.where(last_BT, batch.reward.double()[:, None], 0.0)
    dense_BT = token_reward.double().nan_to_num()
    return dense_BT + torch.where(last_BT, (batch.reward.double() - dense_BT.sum(1))[:, None], 0.0)


_entry = partial(
    Objective, ingredients=(WEIGHT, KL_TERM, IMITATION, SINGLETONS), metrics=("clipped_share", "ratio_max")
)
ENTRIES: dict[str, Objective] = {
    "ppo": Objective(
        ppo,
        "PPO, arXiv 1707.06347",
        always(REWARD, PREFIX_VALUE, DRAWN_VALUE, BEHAVIOR_LOGP),
        ingredients=(KL_TERM, IMITATION),
        metrics=("clipped_share", "ratio_max", "value_loss", "value_mean", "explained_variance"),
    ),
    "grpo": _entry(grpo, "GRPO, arXiv 2402.03300, eq. 3", always(REWARD, GROUPS)),
    "gspo": _entry(gspo, "GSPO, arXiv 2507.18071, eqs. 5 to 7", always(REWARD, GROUPS)),
    "gmpo": _entry(gmpo, "GMPO, arXiv 2507.20673, eq. 4", always(REWARD, GROUPS)),
}
