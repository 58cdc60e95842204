"""Objectives that mix the policy's own samples with an expert's (rows of role "expert") or with hinted ones,
and imitation of chosen texts, or of what a policy would write in place of a text.

They read no log-prob of another policy for an expert's rows: the expert's probabilities are unknown.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Literal

import torch

from agro.objectives.advantage import centered, standardized
from agro.objectives.core import (
    Objective,
    Options,
    Rule,
    Streams,
    Terms,
    always,
    ascending,
    coupling,
    only_with,
)
from agro.objectives.ingredients import ANCHORS, Ratio, k3, log_ratio
from agro.objectives.methods.clipped import Clip, DualClip, clipped_gain, floored_gain
from agro.objectives.needs import (
    BEHAVIOR_LOGP,
    GROUPS,
    HINTED,
    OLD_LOGP,
    PROPOSAL,
    PROPOSAL_MEAN,
    REWARD,
    Need,
    changed,
    except_experts,
)
from agro.objectives.options import Beta, Option
from agro.objectives.reduce import Groups, mean_over, quantile, standardize, token_mean, token_weight
from agro.types import Batch, Tensor


def policy_advantage(groups: Groups) -> Tensor:
    """[N] (r − r̄)/(std + 1e-6) among the group's own responses; 0 for an expert's."""
    # A group's expert responses are standardized separately, and then dropped.
    off_N = standardize(groups.reward, 2 * groups.group + groups.by_expert)
    return torch.where(groups.by_expert, 0.0, off_N)


def policy_log_ratio(streams: Streams, batch: Batch, ratio: str, policy_BT: Tensor) -> Tensor:
    """[B,T] log π − log μ of own tokens, 0 elsewhere."""
    anchor_BT = ANCHORS[ratio].of(batch)
    if anchor_BT is None:  # no row is the policy's own
        return torch.zeros_like(streams["logp"])
    return torch.where(policy_BT, streams["logp"] - anchor_BT, 0.0)


def policy_gain(
    w_BT: Tensor, advantage_BT: Tensor, clip: tuple[float, float] | None, dual_clip: float | None = None
) -> Tensor:
    """[B,T] min(w A, clamp(w, 1−ε_low, 1+ε_high) A), and for A < 0 at least c A."""
    gain_BT = w_BT * advantage_BT
    if clip is not None:
        gain_BT = clipped_gain(w_BT, advantage_BT, 1 - clip[0], 1 + clip[1])
    return gain_BT if dual_clip is None else floored_gain(gain_BT, advantage_BT, dual_clip)


def shaped(log_ratio_BT: Tensor, log_gamma: float | Tensor) -> Tensor:
    """[B,T] w/(w + γ), from log w."""
    return (log_ratio_BT - log_gamma).sigmoid()


QUANTILE = 0.9  # of hinted tokens' ratios (Guide)
SHAPE = (0.01, 1.0)  # a₁ and a₂ of TempSamp-R1
FIXES = {"shape": 0.8, "cap": 0.8, "anchor": 1.2}

PolicyRatio = Annotated[
    Literal["behavior", "old"],
    Option(
        "the ratio's denominator: recorded log-probs, or the trainer's when the batch was drawn",
        needs={"behavior": (except_experts(BEHAVIOR_LOGP),), "old": (except_experts(OLD_LOGP),)},
    ),
]
OptionalClip = Annotated[
    tuple[float, float] | None,
    Option("how far below and above 1 the ratio of own tokens may go; no limit if not given", "ratio", ge=0),
]


def chord(
    streams: Streams,
    batch: Batch,
    *,
    mu: Annotated[float, Option("share of the expert's term in the loss", "share", ge=0, le=1)] = 0.1,
    expert_weight: Annotated[
        Literal["phi", "probability", "none"],
        Option("of an expert's token, without gradient: p (1 − p), its probability p, or 1"),
    ] = "phi",
    ratio: PolicyRatio = "behavior",
    clip: Clip = (0.2, 0.2),
) -> Terms:
    """CHORD (arXiv 2508.11408): (1 − μ) · mean of −min(w A, clamp(w) A) over own tokens + μ · mean of
    −φ(p) log p over the expert's tokens, φ(p) = p (1 − p) without gradient.

    Each mean is over all such tokens of the step, and 0 without any. A is (r − r̄)/(std + 1e-6) among the
    group's own responses; an expert's rewards aren't read. `mu` may be a schedule:
    the paper's is {start = 0.9, end = 0.05, steps = 200, shape = "cosine", warmup = 0} with expert_weight
    "none" (CHORD-μ), and 0.1 with "phi" (CHORD-φ). Since φ ≤ ¼, its term is at least four times weaker at
    equal μ. "probability" is the code's "sft_is", without its cutoff of the probability (1 by default).
    """
    groups, logp_BT = Groups.of(batch), streams["logp"]
    by_expert_BT = groups.at_tokens(groups.by_expert)
    policy_BT, expert_BT = batch.mask & ~by_expert_BT, batch.mask & by_expert_BT
    advantage_BT = groups.at_tokens(policy_advantage(groups))
    w_BT = policy_log_ratio(streams, batch, ratio, policy_BT).exp()
    gain_BT = policy_gain(w_BT, advantage_BT, clip)
    p_BT = torch.where(batch.mask, logp_BT.detach().exp(), 0.0)
    phi_BT = {"phi": p_BT * (1 - p_BT), "probability": p_BT, "none": torch.ones_like(p_BT)}[expert_weight]
    weight_BT = token_weight(batch)
    policy_loss = mean_over(weight_BT, policy_BT, -gain_BT)
    expert_loss = mean_over(weight_BT, expert_BT, -phi_BT * logp_BT)
    clipped = mean_over(torch.ones_like(weight_BT), policy_BT, w_BT * advantage_BT > gain_BT)
    metrics = {"clipped_share": clipped, "ratio_max": w_BT.max()}
    return Terms((1 - mu) * policy_loss + mu * expert_loss, metrics=metrics)


def luffy(
    streams: Streams,
    batch: Batch,
    *,
    gamma: Annotated[
        float,
        Option("γ in p/(p + γ): the p at which an expert's token has most gradient", "probability", gt=0),
    ] = 0.1,
    ratio: PolicyRatio = "behavior",
    clip: OptionalClip = None,
    dual_clip: DualClip = None,
) -> Terms:
    """LUFFY (ElliottYan/LUFFY, policy shaping): Σ over tokens of −A p/(p + γ) on an expert's responses and of
    −A w on own ones, w = π/μ; mean in a group, then over groups.

    A = r − r̄ of the group including the expert's responses. An expert's token has the gradient weight A γ
    p/(p + γ)², largest (A/4) at p = γ, and isn't clipped. The code divides the sum by the longest length, a
    constant, and adds an entropy bonus of 0.001, which isn't here.
    """
    groups, logp_BT = Groups.of(batch), streams["logp"]
    expert_BT = groups.at_tokens(groups.by_expert)
    advantage_BT = groups.at_tokens(centered(groups))
    w_BT = policy_log_ratio(streams, batch, ratio, batch.mask & ~expert_BT).exp()
    gain_BT = policy_gain(w_BT, advantage_BT, clip, dual_clip)
    shaped_BT = shaped(logp_BT, math.log(gamma))
    loss_BT = -torch.where(expert_BT, shaped_BT * advantage_BT, gain_BT)
    weight = mean_over(token_weight(batch), batch.mask & expert_BT, shaped_BT)
    return Terms(
        groups.average_responses(groups.sum_tokens(loss_BT)),
        metrics={"weight_mean": weight, "ratio_max": w_BT.max()},
    )


def guide(
    streams: Streams,
    batch: Batch,
    *,
    gamma: Annotated[
        Literal["quantile"] | float,
        Option("γ in w/(w + γ): the 0.9 quantile of the hinted tokens' ratios, or a number", "ratio", gt=0),
    ] = "quantile",
    ratio: Ratio = "behavior",
    clip: Clip = (0.2, 0.2),
) -> Terms:
    """Guide (arXiv 2506.13923): Σ over tokens of −A w/(w + γ) on hinted responses, w = π(y_t | x)/μ(y_t | x,
    hint), and of −min(w A, clamp(w) A) on the others; mean in a group, then over groups.

    γ has no gradient: it is the least ratio that 0.9 of the step's hinted tokens don't exceed, so a factor on
    all of them changes nothing. Hinted responses aren't clipped. Their recorded log-probs are given the hint
    in the prompt, their tokens have the prompt without it, and meta.hint names it. The code has a floor of
    1e-4 for γ, which isn't needed here, and divides the sum by the longest length, a constant.
    """
    groups = Groups.of(batch)
    hinted_B1 = (batch.extra["hinted"] > 0)[:, None]
    advantage_BT = groups.at_tokens(standardized(groups))
    log_w_BT = policy_log_ratio(streams, batch, ratio, batch.mask)
    w_BT = torch.where(hinted_B1, 0.0, log_w_BT).exp()
    gain_BT = policy_gain(w_BT, advantage_BT, clip)
    hinted_BT = batch.mask & hinted_B1
    weight_BT = token_weight(batch)
    log_gamma: float | Tensor = 0.0
    if gamma != "quantile":
        log_gamma = math.log(gamma)
    elif hinted_BT.any():
        log_gamma = quantile(log_w_BT.detach()[hinted_BT], weight_BT[hinted_BT], QUANTILE)
    shaped_BT = shaped(log_w_BT, log_gamma)
    loss_BT = -torch.where(hinted_B1, shaped_BT * advantage_BT, gain_BT)
    return Terms(
        groups.average_responses(groups.sum_tokens(loss_BT)),
        metrics={"weight_mean": mean_over(weight_BT, hinted_BT, shaped_BT), "ratio_max": w_BT.max()},
    )


def tempsamp_r1(
    streams: Streams,
    batch: Batch,
    *,
    fix: Annotated[
        Literal["shape", "cap", "anchor"],
        Option("the expert's reward: shaped like all rewards, capped, or its advantage set by the best one"),
    ] = "shape",
    fix_at: Annotated[
        float | None,
        Option(
            "the reward at which shaping flattens (0.8), the cap's share of the group's highest reward "
            "(0.8), or the factor on the best own advantage (1.2); the paper's if not given",
            "see fix",
            gt=0,
        ),
    ] = None,
    ratio: PolicyRatio = "behavior",
    clip: Clip = (0.2, 0.2),
    beta: Beta = 0.0,
) -> Terms:
    """TempSamp-R1 (arXiv 2509.18056): GRPO on a group of own responses and one of an expert, whose reward is
    fixed in one of three ways; the expert's tokens have the ratio 1: −A log π, A without gradient.

    shape: r' = τ + 0.01 log(r − τ + 1) from τ on, τ − (e^(τ−r) − 1)/(e − 1) below, for all rewards, which are
    from 0 to 1. cap: r' = min(r, 0.8 r_max) for the expert's. A = (r' − r̄')/(std + 1e-6) in both. anchor: A
    among only own responses, and 1.2 max_i A_i for the expert's, which is 0 if all own rewards are equal.
    β k3 as in `grpo`; the paper's β wasn't read, nor whether r_max is the group's (here) or the largest
    possible one.
    """
    groups, logp_BT = Groups.of(batch), streams["logp"]
    expert_BT = groups.at_tokens(groups.by_expert)
    fix_value = FIXES[fix] if fix_at is None else fix_at
    advantage_BT = groups.at_tokens(_fixed_advantage(groups, fix, fix_value))
    w_BT = policy_log_ratio(streams, batch, ratio, batch.mask & ~expert_BT).exp()
    once_BT = 1 + logp_BT - logp_BT.detach()
    loss_BT = -torch.where(expert_BT, once_BT * advantage_BT, policy_gain(w_BT, advantage_BT, clip))
    if beta > 0:
        loss_BT = loss_BT + beta * k3(log_ratio(streams, batch, "reference"))
    loss = groups.average_responses(groups.mean_tokens(loss_BT))
    return Terms(loss, metrics={"ratio_max": w_BT.max()})


def _fixed_advantage(groups: Groups, fix: str, fix_value: float) -> Tensor:
    """[N] the advantages of own responses and the expert's."""
    if fix == "anchor":
        policy_N = policy_advantage(groups)
        best_G = groups.largest(torch.where(groups.by_expert, -math.inf, policy_N))
        return torch.where(groups.by_expert, fix_value * best_G[groups.group], policy_N)
    r_N = groups.reward
    if fix == "cap":
        limit_N = fix_value * groups.largest(r_N)[groups.group]
        r_N = torch.where(groups.by_expert, torch.minimum(r_N, limit_N), r_N)
    else:
        r_N = shape_reward(r_N, fix_value)
    groups = Groups.of(groups.batch.replace(reward=r_N[groups.batch.response]))
    return standardized(groups)


def shape_reward(r: Tensor, threshold: float) -> Tensor:
    """The reward, flat above the threshold and steep far below it (TempSamp-R1)."""
    a1, a2 = SHAPE
    over = (r - threshold).clamp(min=0)
    under = (threshold - r).clamp(min=0)
    return threshold + a1 * over.log1p() - (a2 * under).expm1() / math.expm1(a2)


Quantile = Annotated[
    float, Option("quantile of −log π per token over the step's responses", "share", ge=0, le=1)
]


def otr(
    streams: Streams,
    batch: Batch,
    *,
    negative: Annotated[
        float, Option("reward of a token other than the given one, β_o; small and below 0", "reward")
    ] = -0.1,
    temperature: Annotated[
        float, Option("κ of the tokens' distribution q ∝ π^(1/κ)", "temperature", gt=0)
    ] = 1.0,
    draws: Annotated[
        float,
        Option("K tokens drawn from q per position, as in the paper; 0: the expectation", "tokens", ge=0),
    ] = 0.0,
    seed: Annotated[
        float,
        Option("seed of the draws, which also depend on earlier tokens; a schedule changes them", "number"),
    ] = 0.0,
) -> Terms:
    """One-token rollout (OTR, arXiv 2509.26313): −[q(x) log π(x) + β_o Σ_{a≠x} q(a) log π(a)] at each given
    token x, q without gradient; mean over all tokens of the step.

    This is the expectation over the paper's K = 256 draws from q, whose rewards are 1 for the given token and
    β_o for others. `draws` = K uses their shares in place of q: −(1/K) Σ_j R_j log π(a_j), which has the same
    gradient on average, but noisier. At κ = 1 that average is the gradient of sft with each token weighted by
    p, times 1 − β_o. The paper's κ is above 1; the number wasn't read. For other draws at each step set seed
    = {start = 0, end = STEPS, steps = STEPS}.
    """
    q_BT, mean_BT = streams["proposal"].detach(), streams["proposal_mean"]
    right_BT = q_BT * streams["logp"]
    loss = token_mean(batch, -(right_BT + negative * (mean_BT - right_BT)))
    return Terms(loss, metrics={"weight_mean": token_mean(batch, q_BT)})


def middle_band(streams: Streams, batch: Batch, *, low: Quantile, high: Quantile) -> Terms:
    """Imitate responses of medium perplexity (BFS-Prover-V2, arXiv 2509.06493): −log π of responses whose
    mean −log π per token lies between two quantiles over the step; mean over their tokens.

    This leaves out what is too easy and what is noise. The quantile of a share is the least number that this
    share doesn't exceed. The paper's shares weren't read. It filters tactics, which are separate samples
    here.
    """
    groups, logp_BT = Groups.of(batch), streams["logp"]
    nll_N = -groups.mean_tokens(logp_BT.detach())
    weight_N = groups.weight[groups.group]
    lower, upper = (quantile(nll_N, weight_N, share) for share in (low, high))
    band_N = (nll_N >= lower) & (nll_N <= upper)
    band_BT = batch.mask & band_N[batch.response][:, None]
    share_in_band = (weight_N * band_N).sum() / weight_N.sum()
    return Terms(mean_over(token_weight(batch), band_BT, -logp_BT), metrics={"kept_share": share_in_band})


_apart = always(except_experts(REWARD), except_experts(GROUPS))  # an expert's responses aren't compared


def _otr_needs(options: Options) -> set[Need]:
    numbers = {"temperature": 1.0, "draws": 0.0, "seed": 0.0}
    for key in numbers:
        if isinstance(options.get(key), int | float):  # not a schedule
            numbers[key] = float(options[key])
    values = {**numbers, "draws": int(numbers["draws"])}
    return {changed(need, **values) for need in (PROPOSAL, PROPOSAL_MEAN)}


RATIO_MAX = ("ratio_max",)
_text = partial(Objective, ingredients=())
ENTRIES: dict[str, Objective] = {
    "chord": Objective(chord, "CHORD, arXiv 2508.11408", _apart, metrics=("clipped_share", *RATIO_MAX)),
    "luffy": Objective(
        luffy,
        "LUFFY, arXiv 2504.14945, policy shaping",
        always(REWARD, GROUPS),
        metrics=(*RATIO_MAX, "weight_mean"),
    ),
    "guide": Objective(
        guide,
        "Guide, arXiv 2506.13923",
        always(REWARD, GROUPS, HINTED),
        lambda options: "step" if options.get("gamma") == "quantile" else "row",
        metrics=(*RATIO_MAX, "weight_mean"),
    ),
    "tempsamp_r1": Objective(
        tempsamp_r1,
        "TempSamp-R1, arXiv 2509.18056, sections on mixed-policy sampling",
        lambda options: _apart(options) if options.get("fix") == "anchor" else {REWARD, GROUPS},
        metrics=RATIO_MAX,
    ),
    "otr": _text(
        otr,
        "OTR, arXiv 2509.26313",
        _otr_needs,
        rules=(
            Rule(("draws",), "to be a whole number", lambda draws: draws == int(draws)),
            *only_with("draws", (0,), seed=(0,)),  # without draws it is their expectation
        ),
        metrics=("weight_mean",),
    ),
    "middle_band": _text(
        middle_band,
        "BFS-Prover-V2, arXiv 2509.06493",
        always(),
        coupling("step"),
        rules=(ascending("low", "high"),),
        metrics=("kept_share",),
    ),
}
