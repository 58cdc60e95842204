"""Policy gradients whose responses or tokens have a weight or a baseline of one paper."""

from __future__ import annotations

from typing import Annotated, Literal

import torch

from agro.objectives.core import SINGLETONS, Objective, Options, Streams, Terms, always, coupling
from agro.objectives.imitation import IMITATION
from agro.objectives.needs import BEHAVIOR_LOGP, FUTURE, GROUPS, PROPOSAL, REWARD, Need, changed
from agro.objectives.options import Option
from agro.objectives.reduce import Groups, refuse_several_rows
from agro.objectives.weights import log_ratio, of_level
from agro.types import Batch, Tensor


def topr(
    streams: Streams,
    batch: Batch,
    *,
    baseline: Annotated[
        float, Option("b in r − b: a response whose reward isn't above it counts as negative", "reward")
    ] = 0.0,
    positive: Annotated[
        tuple[float, float], Option("limits of the weight of positive responses", "ratio", ge=0)
    ] = (1.0, 1.0),
    negative: Annotated[
        tuple[float, float], Option("limits of the weight of negative responses", "ratio", ge=0)
    ] = (0.0, 1.0),
    ratio: Annotated[
        Literal["sequence", "mean", "token"],
        Option("of the response as in the paper, its geometric mean over the tokens, or token by token"),
    ] = "sequence",
) -> Terms:
    """Tapered off-policy REINFORCE (TOPR, arXiv 2503.14286, eqs. 4 and 7): −k_i (r_i − b) · mean_t log
    π(y_it).

    k_i is π/μ of the response, without gradient, clamped to `positive` where r_i > b, else to `negative`.
    With the defaults positive responses are imitated, weighed by their reward, and negative ones are pushed
    down with the truncated ratio min(1, π/μ), which falls to 0 as the policy leaves them. The paper's rewards
    are 1 and −1: for 0 and 1 set baseline = 0.5. Of long responses the ratio underflows soon; other
    implementations take "mean" or "token".
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
    where it is the same for all, b is the group's mean. As in verl, b is 0 at tokens that one response alone
    has after a shorter one, and where all W are 0. A term of W is (1 − π(y))² + π(y)² (1/q(y) − 1) of q ∝ π²:
    both parts are at least 0, so that rounding makes no weight negative. Where q is below what numbers can
    hold, the second one counts as 0.
    """
    refuse_several_rows(batch, "objective otb", "opo or rloo")
    groups, mask_BT = Groups.of(batch), batch.mask
    logp_BT = torch.where(mask_BT, streams["logp"].detach(), 0.0)
    q_BT = torch.where(mask_BT, streams["proposal"].detach().double(), 0.0)
    others_BT = torch.where(q_BT > 0, (2 * logp_BT).exp() * (1 / q_BT - 1), 0.0).clamp(min=0)
    energy_BT = torch.where(mask_BT, (1 - logp_BT.exp()).square() + others_BT, 0.0).cumsum(1)
    number_BT = torch.where(mask_BT, mask_BT.cumsum(1) - 1, 0)  # t
    slot_BT = batch.group[:, None] * mask_BT.shape[1] + number_BT

    def in_group(v_BT: Tensor) -> Tensor:
        """[B,T] the sum over the t-th tokens of the responses of a group."""
        totals = torch.zeros(batch.n_groups * mask_BT.shape[1], dtype=torch.float64, device=v_BT.device)
        return totals.index_add(0, slot_BT[mask_BT], v_BT[mask_BT].double())[slot_BT]

    reward_BT = groups.at_tokens(groups.reward)
    total_BT = in_group(energy_BT)
    baseline_BT = in_group(energy_BT * reward_BT) / total_BT
    alone_BT = (in_group(torch.ones_like(energy_BT)) == 1) & (groups.n[batch.group] > 1)[:, None]
    advantage_BT = reward_BT - torch.where(mask_BT & ~alone_BT & (total_BT > 0), baseline_BT, 0.0)
    return Terms(groups.average_responses(-groups.sum_tokens(advantage_BT * streams["logp"])))


def fpa(
    streams: Streams,
    batch: Batch,
    *,
    extrapolation: Annotated[
        float, Option("λ: how far beyond π, seen from the reference, the future policy lies", "ratio", ge=0)
    ] = 1.0,
) -> Terms:
    """−A c log π of each response, averaged over its tokens, with c = exp(mean log π̂), a constant: the
    geometric mean of the token's probabilities under π̂ ∝ π (π/π_ref)^λ (FPA, arXiv 2509.19893).

    π̂ has the logits (1 + λ) z − λ z_ref. It is where the policy is going, so that a response that is pushed
    down counts less before its tokens are improbable, and those that it shares with right ones are kept.
    λ = 0 is SimPER (arXiv 2502.00883), whose loss −Σ A exp(mean log π) has this gradient. There and in the
    paper's experiments responses are judged in pairs, A = ±1; here A = r_i − r̄_{-i}, which of a pair with
    rewards 1 and 0 is the same.
    """
    groups = Groups.of(batch)
    advantage_N = groups.reward - groups.mean_others(groups.reward)
    future_BT = streams["logp" if extrapolation == 0 else "future"]
    coefficient_N = groups.mean_tokens(future_BT.detach()).exp()
    gain_N = advantage_N * coefficient_N
    surrogate = groups.average_responses(-gain_N * groups.mean_tokens(streams["logp"]))
    return Terms(groups.average_responses(-gain_N), surrogate)


def _fpa_needs(options: Options) -> set[Need]:
    """λ = 0 needs no reference."""
    strength = options["extrapolation"]
    return {REWARD, GROUPS} if strength == 0 else {REWARD, GROUPS, changed(FUTURE, strength=strength)}


ENTRIES: dict[str, Objective] = {
    "fpa": Objective(
        fpa,
        "FPA, arXiv 2509.19893, with SimPER's weights, arXiv 2502.00883",
        _fpa_needs,
        ingredients=(IMITATION, SINGLETONS),
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
