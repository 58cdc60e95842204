"""Objectives whose value is learned otherwise than in `dro`: of logits, of prefixes, beside an expert."""

from __future__ import annotations

from typing import Annotated, Literal

import torch

from agro.objectives.core import Objective, Streams, Terms, always, masked, regularized, to_reference
from agro.objectives.imitation import IMITATION
from agro.objectives.methods.consistency import regularizer
from agro.objectives.needs import FRESH, NORMALIZER, PREFIX_VALUE, REF_LOGP, REWARD, VALUE, except_experts
from agro.objectives.options import Beta, BetaAbove0, Option, Scale
from agro.objectives.reduce import Groups, refuse_several_rows
from agro.types import Batch, Tensor


def tbrm(streams: Streams, batch: Batch, *, beta: BetaAbove0) -> Terms:
    """½ (r − β (ρ + V(x)))² / β of each response, V(x) = log Σ_a exp of the logits at its first token (TBRM,
    arXiv 2505.15311): β/2 times (ρ + V − r/β)².

    The logits are taken as Q-values: the residuals Q − r − log π_ref − V of a response's tokens add up to ρ +
    V(x) − r/β, since log π = Q − V. So V is learned by the same weights, and one response a prompt is enough.
    A number that is added to all logits of the first token changes V and not π: it becomes V*/β, and descent
    ends at π*. Until then V is whatever the model was trained to, so that the policy moves also where all
    rewards are 0 (ReVal, arXiv 2603.23355, subtracts V of the reference).
    """
    refuse_several_rows(batch, "objective tbrm", "dro or agro")
    groups = Groups.of(batch)
    assert batch.ref_logp is not None
    rho_N = groups.sum_tokens(streams["logp"] - batch.ref_logp)
    start_B = streams["normalizer"].gather(1, batch.mask.int().argmax(1, keepdim=True))[:, 0]
    value_N = beta * start_B[groups.first_row]
    off_N = groups.reward - beta * rho_N - value_N
    loss = groups.average_responses(0.5 * off_N.square()) / beta
    return Terms(loss, metrics={"value_loss": beta * loss, "value_mean": groups.average_responses(value_N)})


def prefix_consistency(
    streams: Streams,
    batch: Batch,
    *,
    beta: Beta,
    scale: Scale = "reward",
    compared: Annotated[
        Literal["pairs", "end"],
        Option("positions that agree: any two, or each with the end, later log-ratios being constant"),
    ] = "pairs",
) -> Terms:
    """Consistency along a response: C_t = Σ_{s<t} (r_s − β ρ_s) + V(y_<t) is V*(x) at every token (V* after
    the last: 0).

    The loss of a response is the mean of ½ (C_s − C_t)² over all pairs of its positions s < t ≤ T + 1, which
    is the sample variance of C: each pair is a residual of V*(y_<s) = Σ_{s≤u<t} (r_u − β ρ_u) + V*(y_<t).
    With compared = "end" (OREO, arXiv 2412.16145) it is the mean of ½ (C_{T+1} − C_t)² over t, in which the
    policy's gradient goes through ρ_t alone, and not through the later ones. A group counts as one. Rewards
    of tokens are `extra["token_reward"]` [B,T] where the batch has it (NaN: none); what of a response's
    reward they don't cover comes at its last token. `scale` is as of `dro`.

    Only where the policy writes all tokens: V* holds on average alone across a tool's random output.
    Path consistency: Nachum et al., arXiv 1702.08892.
    """
    refuse_several_rows(batch, "objective prefix_consistency", "dro or agro")
    mask_BT = batch.mask
    token_reward = batch.extra.get("token_reward")
    dense_BT = (
        torch.zeros_like(streams["logp"]) if token_reward is None else token_reward.double().nan_to_num()
    )
    penalty_BT = masked(batch, regularizer(streams["logp"], batch, beta, scale))
    total_B = batch.reward.double() - penalty_BT.sum(1)  # C after the last token, where the value is 0
    prefix_BT = (dense_BT - penalty_BT).cumsum(1) - (dense_BT - penalty_BT)
    C_BT = torch.where(mask_BT, prefix_BT + streams["prefix_value"], 0.0)
    T_B = mask_BT.sum(1)
    if compared == "end":
        later_BT = (total_B[:, None] - prefix_BT).detach() - (penalty_BT - penalty_BT.detach())
        squares_B = 0.5 * masked(batch, (later_BT - streams["prefix_value"]).square()).sum(1)
    else:
        mean_B = (C_BT.sum(1) + total_B) / (T_B + 1)
        off_BT = torch.where(mask_BT, (C_BT - mean_B[:, None]).square(), 0.0)
        squares_B = off_BT.sum(1) + (total_B - mean_B).square()
    groups = Groups.of(batch)
    loss = groups.average_responses((squares_B / T_B)[groups.first_row])
    start_B = streams["prefix_value"].gather(1, mask_BT.int().argmax(1, keepdim=True))[:, 0]
    value = groups.average_responses(start_B[groups.first_row])
    return Terms(loss, metrics={"value_loss": loss, "value_mean": value})


def hnpg(
    streams: Streams,
    batch: Batch,
    *,
    offline: Annotated[
        float, Option("weight of the value's errors on an expert's responses", "ratio", ge=0)
    ] = 1.0,
) -> Terms:
    """Hybrid policy gradient (HNPG, arXiv 2311.08384): −(r − V(x)) log π, mean over own responses, which are
    fresh, and ½ (r − V(x))² to learn V, mean over these plus `offline` times the mean over an expert's.

    Responses of others train the value alone, so the policy's gradient is that of its own samples, whatever
    was logged; prompts of the log are sampled from like any others. A response's Q is its reward here.
    """
    groups = Groups.of(batch)
    policy_N = ~groups.by_expert
    value_N = groups.mean_rows(streams["value"])
    off_N = groups.reward - value_N
    gain = _mean_over(groups, policy_N, off_N.detach() * groups.sum_tokens(streams["logp"]))
    error_N = 0.5 * off_N.square()
    value_loss = _mean_over(groups, policy_N, error_N) + offline * _mean_over(groups, ~policy_N, error_N)
    value = groups.average_responses(value_N)
    return Terms(value_loss - gain, metrics={"value_loss": value_loss, "value_mean": value})


def _mean_over(groups: Groups, chosen_N: Tensor, v_N: Tensor) -> Tensor:
    """[N] -> []: the mean over the chosen responses, 0 where there are none; a weight w counts one w
    times."""
    weight_N = torch.where(chosen_N, groups.weight[groups.group], 0.0)
    total = weight_N.sum()
    return (weight_N * v_N).sum() / torch.where(total > 0, total, 1.0)


ENTRIES: dict[str, Objective] = {
    "tbrm": Objective(
        tbrm,
        "TBRM, arXiv 2505.15311, as arXiv 2603.23355 quotes it",
        always(REWARD, REF_LOGP, NORMALIZER),
        anchor=to_reference,
        ingredients=(),
        metrics=("value_loss", "value_mean"),
    ),
    "prefix_consistency": Objective(
        prefix_consistency,
        "AGRO, arXiv 2503.19612, for every prefix; path consistency, arXiv 1702.08892",
        regularized(REWARD, PREFIX_VALUE),
        ingredients=(IMITATION,),
        metrics=("value_loss", "value_mean"),
    ),
    "hnpg": Objective(
        hnpg,
        "HNPG, arXiv 2311.08384",
        always(REWARD, VALUE, except_experts(FRESH)),
        ingredients=(),
        metrics=("value_loss", "value_mean"),
    ),
}
