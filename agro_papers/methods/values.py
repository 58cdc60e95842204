"""Objectives with one paper's value, baseline or weight of a response."""

from __future__ import annotations

from typing import Annotated, Literal

import torch

from agro.objectives.core import (
    SINGLETONS,
    Objective,
    Streams,
    Terms,
    always,
    coupling,
    masked,
    to_reference,
)
from agro.objectives.ingredients import IMITATION, log_ratio, of_level
from agro.objectives.methods.consistency import regularizer
from agro.objectives.needs import (
    BEHAVIOR_LOGP,
    FRESH,
    GROUPS,
    NORMALIZER,
    PREFIX_VALUE,
    PROPOSAL,
    REF_LOGP,
    REWARD,
    VALUE,
    changed,
    except_experts,
)
from agro.objectives.options import Beta, BetaAbove0, Option
from agro.objectives.reduce import Groups, mean_over, refuse_several_rows
from agro.types import Batch, Tensor


def tbrm(streams: Streams, batch: Batch, *, beta: BetaAbove0) -> Terms:
    """½ (r − β (ρ + V(x)))² / β of each response, V(x) = log Σ_a exp of the logits at its first token (TBRM,
    arXiv 2505.15311): β/2 times (ρ + V − r/β)².

    The logits act as Q-values: the residuals Q − r − log π_ref − V of a response's tokens add up to ρ + V(x)
    − r/β, since log π = Q − V. So the same weights learn V, and one response per prompt is enough. A number
    added to all logits of the first token changes V but not π: it becomes V*/β, and descent ends at π*. Until
    then V is whatever the model was trained to, so the policy moves even if all rewards are 0 (ReVal, arXiv
    2603.23355, subtracts V of the reference).
    """
    refuse_several_rows(batch, "objective tbrm", "dro or agro")
    groups = Groups.of(batch)
    rho_N = groups.sum_tokens(log_ratio(streams, batch, "reference"))
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
    compared: Annotated[
        Literal["pairs", "end"],
        Option("positions that must agree: any two, or each with the end, with later log-ratios constant"),
    ] = "pairs",
) -> Terms:
    """Consistency along a response: C_t = Σ_{s<t} (r_s − β ρ_s) + V(y_<t) is V*(x) at every token (V* after
    the last: 0).

    The loss of a response is the mean of ½ (C_s − C_t)² over all pairs of its positions s < t ≤ T + 1, which
    is the sample variance of C: each pair is a residual of V*(y_<s) = Σ_{s≤u<t} (r_u − β ρ_u) + V*(y_<t).
    With compared = "end" (OREO, arXiv 2412.16145) it is the mean of ½ (C_{T+1} − C_t)² over t, in which the
    policy's gradient goes only through ρ_t, not through the later ones. A group counts as one. Token rewards
    are `extra["token_reward"]` [B,T] if the batch has it (NaN: none); the rest of a response's reward comes
    at its last token. The policy's part of the gradient is divided by β, as in `dro`.

    The policy must write all tokens: across a tool's random output V* holds only on average.
    Path consistency: Nachum et al., arXiv 1702.08892.
    """
    refuse_several_rows(batch, "objective prefix_consistency", "dro or agro")
    mask_BT = batch.mask
    token_reward = batch.extra.get("token_reward")
    dense_BT = (
        torch.zeros_like(streams["logp"]) if token_reward is None else token_reward.double().nan_to_num()
    )
    penalty_BT = masked(batch, regularizer(streams, batch, beta))
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
    """Hybrid policy gradient (HNPG, arXiv 2311.08384): −(r − V(x)) log π, mean over own, fresh responses, and
    ½ (r − V(x))² to learn V, mean over these plus `offline` times the mean over an expert's.

    Others' responses only train the value, so the policy's gradient is that of its own samples, whatever was
    logged; the policy samples responses to the log's prompts like to any others. A response's Q is its
    reward.
    """
    groups = Groups.of(batch)
    policy_N = ~groups.by_expert
    value_N = groups.mean_rows(streams["value"])
    off_N = groups.reward - value_N
    weight_N, error_N = groups.weight[groups.group], 0.5 * off_N.square()
    gain = mean_over(weight_N, policy_N, off_N.detach() * groups.sum_tokens(streams["logp"]))
    value_loss = mean_over(weight_N, policy_N, error_N) + offline * mean_over(weight_N, ~policy_N, error_N)
    value = groups.average_responses(value_N)
    return Terms(value_loss - gain, metrics={"value_loss": value_loss, "value_mean": value})


def topr(
    streams: Streams,
    batch: Batch,
    *,
    baseline: Annotated[
        float, Option("b in r − b: a response with a reward up to b counts as negative", "reward")
    ] = 0.0,
    positive: Annotated[
        tuple[float, float], Option("limits of the weight of positive responses", "ratio", ge=0)
    ] = (1.0, 1.0),
    negative: Annotated[
        tuple[float, float], Option("limits of the weight of negative responses", "ratio", ge=0)
    ] = (0.0, 1.0),
    ratio: Annotated[
        Literal["sequence", "mean", "token"],
        Option("the response's ratio as in the paper, its geometric mean over tokens, or token by token"),
    ] = "sequence",
) -> Terms:
    """Tapered off-policy REINFORCE (TOPR, arXiv 2503.14286, eqs. 4 and 7): −k_i (r_i − b) · mean_t log
    π(y_it).

    k_i is π/μ of the response, without gradient, clamped to `positive` if r_i > b, else to `negative`. With
    the defaults positive responses are imitated, weighted by their reward, and negative ones are pushed down
    with the truncated ratio min(1, π/μ), which falls to 0 as the policy leaves them. The paper's rewards are
    1 and −1: for 0 and 1 set baseline = 0.5. For long responses the ratio soon underflows; other
    implementations use "mean" or "token".
    """
    groups = Groups.of(batch)
    logp_BT = streams["logp"]
    log_ratio_BT = of_level(groups, log_ratio(streams, batch, "behavior").detach(), ratio)
    signal_B = (groups.reward - baseline)[batch.response][:, None]
    ratio_BT = log_ratio_BT.exp()
    weight_BT = torch.where(signal_B > 0, ratio_BT.clamp(*positive), ratio_BT.clamp(*negative))
    loss = groups.average_responses(groups.mean_tokens(-weight_BT * signal_B * logp_BT))
    weight = groups.average_responses(groups.mean_tokens(weight_BT.expand_as(logp_BT)))
    return Terms(loss, metrics={"weight_mean": weight})


def otb(streams: Streams, batch: Batch) -> Terms:
    """−(1/n) Σ_i Σ_t (r_i − b_t) log π(y_it), b_t = Σ_i W_it r_i / Σ_i W_it over the responses with a t-th
    token (OTB, arXiv 2602.07078).

    W_t = Σ_{s≤t} (1 − 2π(y_s) + Σ_a π(a)²) is the squared norm of the gradient in the logits up to a token:
    if it is the same for all, b is the group's mean. As in verl, b is 0 at positions that only one response
    of several reaches, and if all W are 0. A term of W is (1 − π(y))² + π(y)² (1/q(y) − 1) with q ∝ π²: both
    parts are at least 0, so rounding makes no weight negative. If q underflows, the second part counts as 0.
    """
    refuse_several_rows(batch, "objective otb", "opo or rloo")
    groups, mask_BT = Groups.of(batch), batch.mask
    logp_BT = torch.where(mask_BT, streams["logp"].detach(), 0.0)
    q_BT = torch.where(mask_BT, streams["proposal"].detach().double(), 0.0)
    remainder_BT = torch.where(q_BT > 0, (2 * logp_BT).exp() * (1 / q_BT - 1), 0.0).clamp(min=0)
    energy_BT = torch.where(mask_BT, (1 - logp_BT.exp()).square() + remainder_BT, 0.0).cumsum(1)
    number_BT = torch.where(mask_BT, mask_BT.cumsum(1) - 1, 0)  # t
    slot_BT = batch.group[:, None] * mask_BT.shape[1] + number_BT

    def in_group(v_BT: Tensor) -> Tensor:
        """[B,T] the sum over the t-th tokens of a group's responses."""
        totals = torch.zeros(batch.n_groups * mask_BT.shape[1], dtype=torch.float64, device=v_BT.device)
        return totals.index_add(0, slot_BT[mask_BT], v_BT[mask_BT].double())[slot_BT]

    reward_BT = groups.at_tokens(groups.reward)
    total_BT = in_group(energy_BT)
    baseline_BT = in_group(energy_BT * reward_BT) / total_BT
    alone_BT = (in_group(torch.ones_like(energy_BT)) == 1) & (groups.n[batch.group] > 1)[:, None]
    advantage_BT = reward_BT - torch.where(mask_BT & ~alone_BT & (total_BT > 0), baseline_BT, 0.0)
    return Terms(groups.average_responses(-groups.sum_tokens(advantage_BT * streams["logp"])))


VALUED = ("value_loss", "value_mean")
ENTRIES: dict[str, Objective] = {
    "tbrm": Objective(
        tbrm,
        "TBRM, arXiv 2505.15311, as arXiv 2603.23355 quotes it",
        always(REWARD, REF_LOGP, NORMALIZER),
        anchor=to_reference,
        ingredients=(),
        metrics=VALUED,
    ),
    "prefix_consistency": Objective(
        prefix_consistency,
        "AGRO, arXiv 2503.19612, for every prefix; path consistency, arXiv 1702.08892",
        always(REWARD, PREFIX_VALUE),
        ingredients=(IMITATION,),
        metrics=VALUED,
    ),
    "hnpg": Objective(
        hnpg,
        "HNPG, arXiv 2311.08384",
        always(REWARD, VALUE, except_experts(FRESH)),
        ingredients=(),
        metrics=VALUED,
    ),
    "otb": Objective(
        otb,
        "OTB, arXiv 2602.07078",
        always(REWARD, GROUPS, changed(PROPOSAL, temperature=0.5)),
        coupling("group"),
        ingredients=(IMITATION, SINGLETONS),
    ),
    "topr": Objective(
        topr,
        "TOPR, arXiv 2503.14286, eqs. 4 and 7",
        always(REWARD, BEHAVIOR_LOGP),
        ingredients=(IMITATION,),
        metrics=("weight_mean",),
    ),
}
