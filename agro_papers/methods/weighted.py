"""Policy gradients whose token terms are weighted or masked by the ratio to the policy that drew the samples,
or pulled back to it: mirror descent, REC and RED (arXiv 2509.24203), and truncated ratios without
gradient."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Literal

import torch

from agro.objectives import advantage as advantages
from agro.objectives.advantage import Advantage
from agro.objectives.core import SINGLETONS, Objective, Streams, Terms, always, coupling, only_with
from agro.objectives.ingredients import IMITATION, Ratio, log_ratio
from agro.objectives.methods.clipped import limited
from agro.objectives.needs import BEHAVIOR_LOGP, GROUPS, OLD_LOGP, REWARD
from agro.objectives.options import Option
from agro.objectives.reduce import Groups, refuse_several_rows, token_mean, token_weight
from agro.types import Batch, Tensor

Limits = tuple[float, float]
KeptClip = Annotated[
    Limits, Option("how far below and above 1 the ratio of a kept token may be", "ratio", ge=0)
]
WeightClip = Annotated[Limits, Option("how far below and above 1 the weight may go", "ratio", ge=0)]
Gamma = Annotated[Limits, Option("k and λ of the weight of these responses", "number", gt=0)]


def opmd(
    streams: Streams,
    batch: Batch,
    *,
    tau: Annotated[
        float, Option("τ, the strength of the regularization of a step", "reward per nat", gt=0)
    ] = 1.0,
    form: Annotated[
        Literal["simple", "pairwise"], Option("the factor before the gradient: 1/(1+τ), or 2τ/max(1, τ)")
    ] = "simple",
    baseline: Annotated[
        Literal["mean", "soft"], Option("the group's mean reward, or its soft maximum τ log mean exp(r/τ)")
    ] = "mean",
) -> Terms:
    """OPMD as in Trinity (arXiv 2509.24203): −c (r − b) log π, mean over all tokens, c = 1/(1+τ).

    This is REINFORCE with another step size, and needs no ratio: τ matters only next to other terms of the
    loss, in clipping of the gradient's norm, and in a soft b. "pairwise" is Σ_i (u_i − ū)², u_i = r_i − τ
    (log π − sg[log π]), divided by the tokens times max(1, τ): at the current policy its gradient is this one
    with c = 2τ/max(1, τ). Kimi's own form, with squared log-ratios of responses, is `kimi`.
    """
    groups = Groups.of(batch)
    r_N = groups.reward
    advantage_N = r_N - (groups.mean(r_N) if baseline == "mean" else groups.soft_maximum(r_N, tau))
    factor = 1 / (1 + tau) if form == "simple" else 2 * tau / max(1.0, tau)
    return Terms(factor * token_mean(batch, -advantage_N[batch.response][:, None] * streams["logp"]))


def token_quadratic(
    streams: Streams,
    batch: Batch,
    *,
    pull: Annotated[
        float, Option("strength of the squares of the log-ratios", "reward per nat²", ge=0)
    ] = 0.1,
    ratio: Ratio = "behavior",
) -> Terms:
    """The "dro" of tinker and verl: −A log π + ½ c (log π − log μ)² token by token, c = `pull`, mean over all
    tokens.

    This isn't DRO (arXiv 2405.19107; here `dro`): it has no value, the anchor is the behavior, and the
    tokens' squares have no cross terms, so where it ends depends on how a response is split into tokens.
    tinker uses the sum in place of the mean.
    """
    advantage_B1 = advantages.of_tokens(Groups.of(batch), "mean")
    square_BT = log_ratio(streams, batch, ratio).square()
    return Terms(token_mean(batch, -advantage_B1 * streams["logp"] + 0.5 * pull * square_BT))


def mdpo(
    streams: Streams,
    batch: Batch,
    *,
    step_size: Annotated[
        float, Option("t_k: the KL to the last policy has the weight 1/t_k", "nat per reward", gt=0)
    ] = 1.0,
    kl: Annotated[
        Literal["weighted", "square"], Option("the estimate of each token's KL: w log w, or half (log w)²")
    ] = "weighted",
    ratio: Ratio = "behavior",
) -> Terms:
    """Mirror descent policy optimization (MDPO, arXiv 2005.09814): −w A + (1/t_k) KL(π ‖ μ)
    token by token, w = π/μ, mean over all tokens; no clip.

    μ is the policy π_k that drew the samples, on which several updates are made. On its samples w log w is
    an unbiased estimate of the KL at each prefix, which the authors compute in closed form; half (log w)² is
    right only near π_k. The first update is the policy gradient. The authors anneal t_k to 0: a schedule.
    """
    advantage_B1 = advantages.of_tokens(Groups.of(batch), "mean")
    log_BT = log_ratio(streams, batch, ratio)
    w_BT = log_BT.exp()
    kl_BT = w_BT * log_BT if kl == "weighted" else 0.5 * log_BT.square()
    loss = token_mean(batch, -w_BT * advantage_B1 + kl_BT / step_size)
    return Terms(loss, metrics={"ratio_max": w_BT.max()})


def rec(
    streams: Streams,
    batch: Batch,
    *,
    mask: Annotated[
        Literal["none", "one_side", "two_side", "ring"],
        Option(
            "which tokens are masked, by their ratio",
            needs=dict.fromkeys(("one_side", "two_side", "ring"), (BEHAVIOR_LOGP,)),
        ),
    ] = "none",
    token_weight: Annotated[
        Literal["none", "is"],
        Option("the weight of a token: 1, or its ratio", needs={"is": (BEHAVIOR_LOGP,)}),
    ] = "none",
    clip: KeptClip = (0.2, 0.2),
    ring: Annotated[
        Limits, Option("how far below and above 1 a ratio must be to be kept again", "ratio", ge=0)
    ] = (0.6, 2.0),
    advantage: Advantage = "mean",
) -> Terms:
    """REC (arXiv 2509.24203): −sg[M ω] A log π, mean over all tokens of the step, w = π/μ token by token.

    M is 1 for "none"; for "one_side" if A ≥ 0 and w ≤ 1+ε_high, or A ≤ 0 and w ≥ 1−ε_low; for "two_side" if
    1−ε_low ≤ w ≤ 1+ε_high; for "ring" there, and if A ≥ 0 and w ≤ 1−`ring`[0], or A ≤ 0 and w ≥ 1+`ring`[1].
    ω is 1 (NoIS) or w. One-sided and weighted by w, the gradient is that of PPO's clip. The ring's limits are
    0.6 and 2.0 in Trinity's default_args, 0.4 and 0.4 in its constructor.
    """
    advantage_B1 = advantages.of_tokens(Groups.of(batch), advantage)
    logp_BT = streams["logp"]
    if mask == "none" and token_weight == "none":
        return Terms(token_mean(batch, -advantage_B1 * logp_BT))
    w_BT = log_ratio(streams, batch, "behavior").detach().exp()
    unmasked_BT = _unmasked(mask, w_BT, advantage_B1, clip, ring)
    weight_BT = torch.where(unmasked_BT, w_BT if token_weight == "is" else 1.0, 0.0)
    return limited(token_mean(batch, -weight_BT * advantage_B1 * logp_BT), batch, ~unmasked_BT, w_BT)


def _unmasked(mask: str, w_BT: Tensor, advantage_B1: Tensor, clip: Limits, ring: Limits) -> Tensor:
    """[B,T] the unmasked tokens."""
    up_B1, down_B1 = advantage_B1 >= 0, advantage_B1 <= 0
    above_low_BT, below_high_BT = w_BT >= 1 - clip[0], w_BT <= 1 + clip[1]
    if mask == "none":
        return torch.ones_like(w_BT, dtype=torch.bool)
    if mask == "one_side":
        return (up_B1 & below_high_BT) | (down_B1 & above_low_BT)
    band_BT = above_low_BT & below_high_BT
    if mask == "two_side":
        return band_BT
    return band_BT | (up_B1 & (w_BT <= 1 - ring[0])) | (down_B1 & (w_BT >= 1 + ring[1]))


def red_weight(
    streams: Streams,
    batch: Batch,
    *,
    temperature: Annotated[float, Option("T of the weight exp(A/T)", "reward", gt=0)] = 1.0,
) -> Terms:
    """RED-Weight (arXiv 2509.24203): −exp(A/T) A log π, A = r − r̄, mean over all tokens of the step.

    REINFORCE without ratios in which better responses weigh more: with r̄_w the weighted mean of the rewards,
    it is −exp(A/T) (r − r̄_w) log π plus r̄_w − r̄ ≥ 0 times imitation of the weighted responses.
    """
    advantage_B1 = advantages.of_tokens(Groups.of(batch), "mean")
    weight_B1 = (advantage_B1 / temperature).exp()
    return Terms(token_mean(batch, -weight_B1 * advantage_B1 * streams["logp"]))


def cispo(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    clip: WeightClip = (1.0, 0.28),
    advantage: Advantage = "standardized",
) -> Terms:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5): −sg[clamp(w, 1−ε_low, 1+ε_high)] A log π, w = π/μ
    token by token.

    The clamped weight is constant, so no token's gradient is lost; ε_low = 1 sets no lower limit. A as in
    `grpo`. Mean over all tokens of the step, as in TRL and Trinity; the paper divides by the tokens of each
    group. The paper gives no ε_high: 0.28 is Trinity's, and TRL's epsilon_high is 1 + ε_high.
    """
    weight_BT = log_ratio(streams, batch, ratio).detach().exp()
    return _weighed(streams, batch, weight_BT, clip, advantage)


def minpro(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    clip: WeightClip = (1.0, 0.28),
    cap_at_one: Annotated[bool, Option("limit the smallest ratio before a token to 1")] = False,
) -> Terms:
    """MinPRO (arXiv 2601.22718): `cispo` with w_t · min_{s<t} w_s for w_t, the smallest ratio of an earlier
    token for their product.

    The product of all ratios up to a token is the exact weight, but its variance explodes. The first token's
    minimum is 1 (inferred). As quoted the minimum may be above 1; `cap_at_one` is our reading. The paper's
    limits weren't available: these are those of `cispo`. A response must be in one row.
    """
    refuse_several_rows(batch, "objective minpro", "cispo")
    log_BT = log_ratio(streams, batch, ratio).detach()
    lowest_BT = torch.where(batch.mask, log_BT, math.inf).cummin(1).values
    previous_BT = torch.cat([torch.full_like(log_BT[:, :1], math.inf), lowest_BT[:, :-1]], 1)
    previous_BT = torch.where(previous_BT.isinf(), 0.0, previous_BT)
    if cap_at_one:
        previous_BT = previous_BT.clamp(max=0.0)
    return _weighed(streams, batch, (log_BT + previous_BT).exp(), clip, "standardized")


def _weighed(streams: Streams, batch: Batch, weight_BT: Tensor, clip: Limits, advantage: str) -> Terms:
    """−clamp(weight) A log π, mean over all tokens."""
    advantage_B1 = advantages.of_tokens(Groups.of(batch), advantage)
    clamped_BT = weight_BT.clamp(1 - clip[0], 1 + clip[1])
    loss = token_mean(batch, -clamped_BT * advantage_B1 * streams["logp"])
    return limited(loss, batch, clamped_BT != weight_BT, weight_BT)


def vespo(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    positive: Gamma = (2.0, 3.0),
    negative: Gamma = (3.0, 2.0),
) -> Terms:
    """VESPO (arXiv 2602.10693): −sg[φ(W)] A log π, φ(W) = e^λ W^k e^(−λW), W = π/μ of the complete response.

    φ(1) = 1, largest at W = k/λ, near 0 far from 1 on both sides. (k, λ) is `positive` if A ≥ 0, else
    `negative`. A as in `grpo`, mean over all tokens of the step. TRL clamps log W to between log 1e-8 and 20.
    """
    groups = Groups.of(batch)
    advantage_N = advantages.standardized(groups)
    log_N = groups.sum_tokens(log_ratio(streams, batch, ratio).detach())
    up_N = (advantage_N >= 0).to(log_N.dtype)
    k_N, lambda_N = (up_N * up + (1 - up_N) * down for up, down in zip(positive, negative))
    weight_N = (lambda_N + k_N * log_N - lambda_N * log_N.exp()).exp()
    coefficient_B1 = (weight_N * advantage_N)[batch.response][:, None]
    loss = token_mean(batch, -coefficient_B1 * streams["logp"])
    return Terms(loss, metrics={"weight_mean": groups.average_responses(weight_N)})


def m2po(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    budget: Annotated[
        float, Option("largest mean of the squared log-ratios of the tokens that count", "nats²", gt=0)
    ] = 0.04,
    tokens: Annotated[
        Literal["all", "harmful"],
        Option("the tokens whose squares the budget limits: all, or as in the authors' code"),
    ] = "all",
) -> Terms:
    """M2PO (arXiv 2510.01161): −M w A, w = π/μ token by token. M = 0 for the tokens with the largest (log w)²
    of the step, as many as needed for a mean of (log w)² over the others of at most `budget`.

    Tokens with equal squares are masked together. A as in `grpo`; the sum is divided by all tokens of the
    step. "all" is AReaL's reading. The authors' code ("harmful") looks only at tokens with A > 0 and w > 1 or
    A < 0 and w < 1, and limits their mean with the masked squares counted as the least of them; it also never
    masks between 0.7 and 1.5, which isn't here.
    """
    advantage_B1 = advantages.of_tokens(Groups.of(batch), "standardized")
    log_BT = log_ratio(streams, batch, ratio)
    counts_BT = batch.mask
    if tokens == "harmful":
        counts_BT = batch.mask & (log_BT.detach() * advantage_B1 > 0)
    square_BT = log_BT.detach().square()
    weight_BT = token_weight(batch)
    threshold = _masking_threshold(square_BT[counts_BT], weight_BT[counts_BT], budget, tokens == "harmful")
    masked_BT = counts_BT & (square_BT >= threshold)
    w_BT = torch.where(masked_BT, 0.0, log_BT).exp()
    loss = token_mean(batch, torch.where(masked_BT, 0.0, -w_BT * advantage_B1))
    return limited(loss, batch, masked_BT, log_BT.exp())


def _masking_threshold(square_M: Tensor, weight_M: Tensor, budget: float, capped: bool) -> float:
    """The smallest masked one of M squares; ∞ if none needs masking.

    `capped`: masked squares count as that smallest one, else they don't count.
    """
    square_M, order = square_M.sort()
    weight_M = weight_M[order]
    total_M, weights_M = (weight_M * square_M).cumsum(0), weight_M.cumsum(0)
    if capped:
        total_M = total_M + square_M * (weight_M.sum() - weights_M)
        weights_M = weight_M.sum().expand_as(weights_M)
    above_M = total_M > budget * weights_M
    return float(square_M[above_M.int().argmax()]) if above_M.any() else math.inf


def raft_pp(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    clip: WeightClip = (0.2, 0.2),
    least_reward: Annotated[
        float | None, Option("reward of a positive response; the best of each group if not given", "reward")
    ] = None,
) -> Terms:
    """RAFT++ (arXiv 2504.11343): −min(w, clamp(w, 1−ε_low, 1+ε_high)) for tokens of positive responses, 0 for
    all others. w = π/μ token by token.

    Responses with the group's highest reward are positive, as in the paper; if all rewards are equal none is,
    since the authors leave such prompts out. Mean over the tokens of a response, then over all responses,
    including negative ones.
    """
    groups = Groups.of(batch)
    positive_N = groups.best if least_reward is None else groups.reward >= least_reward
    w_BT = log_ratio(streams, batch, ratio).exp()
    gain_BT = torch.minimum(w_BT, w_BT.clamp(1 - clip[0], 1 + clip[1]))
    positive_BT = groups.at_tokens(positive_N)
    loss = groups.average_responses(-groups.mean_tokens(torch.where(positive_BT, gain_BT, 0.0)))
    return limited(loss, batch, (w_BT > 1 + clip[1]) & positive_BT, w_BT)


def nested_reft(
    streams: Streams,
    batch: Batch,
    *,
    mismatch: Annotated[
        Literal["is", "ignore", "retrace"],
        Option(
            "the weight of a token: its ratio to the sampler or to the policy before the step, or retrace",
            needs={"is": (BEHAVIOR_LOGP,), "ignore": (OLD_LOGP,), "retrace": (BEHAVIOR_LOGP,)},
        ),
    ] = "is",
    retrace: Annotated[float, Option("λ of λ min(1, w), the weight of retrace", "ratio", gt=0)] = 1.0,
) -> Terms:
    """Nested-ReFT (arXiv 2508.10123): responses are drawn from the policy with some layers skipped; three
    rules handle the mismatch.

    "is": −w A, w = π/μ token by token, where μ is the recorded sampler. "ignore": the same with the complete
    policy before the step as μ, as if it had drawn them. "retrace": −sg[λ min(1, w)] A log π. A as in
    `grpo`, mean over the tokens of a response, in a group, over groups. The rules are inferred from the
    abstract.
    """
    groups = Groups.of(batch)
    advantage_B1 = advantages.of_tokens(groups, "standardized")
    log_BT = log_ratio(streams, batch, "old" if mismatch == "ignore" else "behavior")
    if mismatch == "retrace":
        gain_BT = retrace * log_BT.detach().clamp(max=0.0).exp() * streams["logp"]
    else:
        gain_BT = log_BT.exp()
    loss = groups.average_responses(groups.mean_tokens(-gain_BT * advantage_B1))
    return Terms(loss, metrics={"ratio_max": log_BT.exp().max()})


_entry = partial(Objective, ingredients=(IMITATION, SINGLETONS))
_masking = partial(_entry, metrics=("clipped_share", "ratio_max"))
_of_groups = always(REWARD, GROUPS)
ENTRIES: dict[str, Objective] = {
    "opmd": _entry(
        opmd,
        "OPMD, arXiv 2509.24203",
        _of_groups,
        rules=only_with("form", ("pairwise",), baseline=("mean",)),
    ),
    "token_quadratic": _entry(token_quadratic, "the loss dro of tinker and verl", _of_groups),
    "mdpo": _entry(mdpo, "MDPO, arXiv 2005.09814", _of_groups, metrics=("ratio_max",)),
    "rec": _masking(rec, "REC, arXiv 2509.24203", always()),
    "red_weight": _entry(red_weight, "RED-Weight, arXiv 2509.24203", _of_groups),
    "cispo": _masking(cispo, "CISPO, MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5", always()),
    "minpro": _masking(minpro, "MinPRO, arXiv 2601.22718", _of_groups),
    "vespo": _entry(vespo, "VESPO, arXiv 2602.10693", _of_groups, metrics=("weight_mean",)),
    "m2po": _masking(m2po, "M2PO, arXiv 2510.01161", _of_groups, coupling("step")),
    "raft_pp": _masking(
        raft_pp,
        "RAFT++, arXiv 2504.11343",
        lambda options: {REWARD, GROUPS} if options["least_reward"] is None else {REWARD},
    ),
    "nested_reft": _entry(nested_reft, "Nested-ReFT, arXiv 2508.10123", _of_groups, metrics=("ratio_max",)),
}
