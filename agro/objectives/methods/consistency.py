"""Generation consistency (AGRO, arXiv 2503.19612): r − β log π*/π_ref is the same for every response to a
prompt.

The regularized reward of response i is R_i = r_i − β ρ_i, with ρ_i = Σ_t log π(y_t) − log π_ref(y_t). Several
published methods square its distance from a baseline (`squared_consistency`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from agro.errors import Refused
from agro.objectives.advantage import against_others
from agro.objectives.core import (
    SINGLETONS,
    MethodWarnings,
    Objective,
    Options,
    Streams,
    Terms,
    always,
    couples_baseline,
    couples_regularized_reward,
    only_with,
    to_reference,
)
from agro.objectives.ingredients import (
    ANCHOR_NEEDS,
    ANCHORS,
    BASELINE_SHIFT,
    IMITATION,
    WEIGHT,
    WEIGHT_BASELINE,
    anchor_logp,
    log_ratio,
    squared_norm,
)
from agro.objectives.needs import (
    BEHAVIOR_LOGP,
    FRESH,
    GROUPS,
    KL,
    OF_REFERENCE,
    REF_LOGP,
    REF_MEAN,
    REF_SQUARE,
    REWARD,
    STORED_QUANTILE,
    STORED_VALUE,
    TRIPLES,
    VALUE,
    Need,
)
from agro.objectives.options import NATS, Baseline, Beta, BetaAbove0, Option, Scale
from agro.objectives.reduce import Groups, refuse_several_rows
from agro.types import Batch, Tensor

WAY_OUT = 'likelihood_ratio = "adaptive" avoids it'


def options_warning(options: Options) -> str | None:
    beta = options["beta"]
    if options["likelihood_ratio"] != 1.0 or beta >= 0.5:
        return None
    return (
        "agro_onpolicy lowers rewards that are rare: with rewards of 0 and 1 it improves on the reference "
        f"only for prompts solved more often than ½ − β = {0.5 - beta:.3g} of the time (the metric "
        f"reversed_share counts the others); {WAY_OUT}"
    )


def rewards_warning(rewards: NDArray[np.float64], options: Options) -> str | None:
    """Say for how many of M prompts rewards [M,n] at the start show the trap; None if it can't be known.

    μ₃/(2β Var) of each prompt is computed from unbiased estimates of both moments, which need n ≥ 3.
    """
    c, beta, n = options["likelihood_ratio"], options["beta"], rewards.shape[1]
    if c == "adaptive" or not c * beta or n < 3:
        return None
    differ = rewards[rewards.max(1) > rewards.min(1)]  # without prompts that have an unknown reward, NaN
    if not len(differ):
        return None
    off = differ - differ.mean(1, keepdims=True)
    skew = n / (n - 2) * (off**3).sum(1) / (off**2).sum(1) / (2 * beta)
    return (
        f"on {(c * skew > 1).sum()} of {len(differ)} held-out prompts whose {n} rewards differ (of "
        f"{len(rewards)}) μ₃/(2β Var) of the rewards is above {1 / c:.3g} (median {np.median(skew):.3g}): "
        f"there agro_onpolicy lowers the reward at first. {WAY_OUT}"
    )


def metrics_warning(metrics: Mapping[str, float], options: Options) -> str | None:
    share = metrics["reversed_share"]
    if not share > 0.5:  # NaN if no rewards differ
        return None
    return (
        f"in {share:.0%} of the groups whose rewards differ the best response is pushed down. What to do: "
        'objective.likelihood_ratio = "adaptive", or the objective agro'
    )


def ratio(groups: Groups, R_N: Tensor, beta: float) -> Tensor:
    """[] Σ k₃ / (2β Σ k₂) over the groups of three or more; NaN if all their R are equal, and at β = 0.

    k₂ and k₃ are a group's unbiased estimates of Var R and μ₃. In a small group their ratio is noise, and a
    pair is always symmetric; the sums over groups estimate E_x μ₃ and E_x Var. Groups of equal R add 0 to
    both.
    """
    n_G, off_N = groups.n, R_N - groups.mean(R_N)
    third_G = n_G * groups.sum(off_N**3) / ((n_G - 1) * (n_G - 2)).clamp(min=1)
    weight_G = groups.weight * (n_G > 2)
    below = 2 * beta * (weight_G * groups.variance(R_N)).sum()
    return torch.where(below > 0, (weight_G * third_G).sum() / below, torch.nan)


Estimate = Literal["sequence", "triangular", "local"]
Regularizer = Literal["sequence", "triangular", "local", "reference"]


def regularized_reward(
    streams: Streams, batch: Batch, groups: Groups, beta: float, average: str = "sum"
) -> Tensor:
    """[N] R_i = r_i − β ρ_i, ρ_i the sum or the mean of the tokens' log-ratios; r_i at β = 0."""
    if beta == 0:
        return groups.reward
    return groups.reward - beta * groups.over_tokens(
        streams["logp"] - anchor_logp(batch, "reference"), average
    )


def less_baseline(groups: Groups, logp_BT: Tensor, R_N: Tensor, baseline: str) -> Tensor:
    """[N] R_i minus its baseline: the mean of the others in its group, the prompt's stored value, or the
    mean of nearly least variance over the step's other groups, without gradient."""
    if baseline == "stored":
        return R_N - groups.extra("stored_value")
    if baseline == "others":
        return R_N - groups.mean_others(R_N)
    if len(groups.n) < 2:
        raise Refused(
            'baseline = "step" compares a response with the other groups of its step: expected at least 2 '
            f"groups, got {groups.batch.group_names[0]!r} alone. What to do: raise train.groups, or set "
            'baseline = "others"'
        )
    share_N = squared_norm(groups, logp_BT.detach())
    above_G, total_G = (groups.weight * groups.sum(v) for v in (share_N * R_N.detach(), share_N))
    above_G, total_G = above_G.sum() - above_G, total_G.sum() - total_G
    return R_N - torch.where(total_G > 0, above_G / total_G, 0.0)[groups.group]


def agro(
    streams: Streams,
    batch: Batch,
    *,
    beta: Beta,
    baseline: Baseline = "others",
    scale: Scale = "reward",
    average: Annotated[
        Literal["sum", "token"],
        Option(
            "reduction over a response's tokens: with 'token' beta is per nat of the mean log-ratio, and "
            "keeps its size as responses grow"
        ),
    ] = "sum",
    regularizer: Annotated[
        Regularizer,
        Option(
            "estimate of the regularizer's gradient: for any data, or with less variance for fresh samples "
            "or the reference's"
        ),
    ] = "sequence",
) -> Terms:
    """½ Var over the group of R (AGRO, estimator of eq. 4): right for responses of any origin.

    scale "loss": the loss's own gradient, −(β/n)(R_i − R̄_{-i}) ∇log π(y_i); "reward": the same divided by β,
    which at β = 0 is RLOO. average "token" replaces the sum of a response's token log-ratios by their mean,
    in R and so in the gradient (1/T_i of each token's); β then keeps its size for longer responses, and the
    optimum changes: it is π_ref exp(T r/β) / Z if all lengths are T.

    baseline: R̄_{-i}, or "stored" for groups of one: `extra["stored_value"]` [B], from data.value_store or
    tracked (data.value_half_life). The loss is then ½ (R_i − V)². On fresh samples the expected gradient is
    the same for any V; on other samples only V = V* leads to π*. "step" sets V to
    Σ g R / Σ g over all other groups of the step, g = Σ_t (1 − π_t)²: it doesn't depend on the response's own
    reward, so that responses are raised even if all responses to their prompt are correct.

    regularizer: how its gradient, E_π[ρ ∇log π], is estimated (section 6). "sequence" is eq. 4 and valid on
    any data. The next two drop or integrate terms whose mean is zero only on the policy's own fresh samples.
    "triangular": Σ_t (Σ_{s≥t} ρ_s) ∇log π_t. "local": Σ_t [∇KL_t + (Σ_{s>t} KL_s) ∇log π_t], KL_t over
    the vocabulary. "reference" is for responses of π_ref and integrates under it (section 6, off-policy),
    with m_t = E ρ_t after y_<t: Σ_t [∇½ E ρ_t² + (Σ_{s<t} ρ_s − ρ̄_{-i}) ∇m_t + (Σ_{s>t} m_s) ∇log π_t].
    """
    groups = Groups.of(batch)
    logp_BT = streams["logp"]
    R_N = regularized_reward(streams, batch, groups, beta, average)
    if baseline == "others":
        loss = groups.average(0.5 * groups.variance(R_N))
    else:
        loss = groups.average_responses(0.5 * less_baseline(groups, logp_BT, R_N, baseline).square())
    factor = beta if scale == "loss" else 1.0
    surrogate = None
    if regularizer != "sequence" and beta != 0:
        gain_N = -against_others(groups) * groups.sum_tokens(logp_BT)
        regularizer_N = groups.sum_tokens(_token_regularizer(streams, groups, regularizer))
        surrogate = groups.average_responses(gain_N) + beta * groups.average_responses(regularizer_N)
        surrogate = surrogate * factor
    elif scale == "reward":
        advantage_N = less_baseline(groups, logp_BT, R_N, baseline).detach()
        surrogate = groups.average_responses(-advantage_N * groups.over_tokens(logp_BT, average))
    elif not loss.requires_grad:  # β = 0: the loss doesn't depend on the policy, its gradient is zero
        surrogate = 0.0 * logp_BT.sum()
    return Terms(loss, surrogate, {"consistency": loss})


def _token_regularizer(streams: Streams, groups: Groups, regularizer: str) -> Tensor:
    """[B,T] a surrogate of the regularizer, per token."""
    batch = groups.batch
    refuse_several_rows(batch, f'objective agro: regularizer = "{regularizer}"', '"sequence"')
    if regularizer == "local":
        kl_BT = streams["kl"]
        return kl_BT + (_from_here_on(kl_BT) - kl_BT).detach() * streams["logp"]
    ratio_BT = log_ratio(streams, batch, "reference").detach()
    if regularizer == "triangular":
        return _from_here_on(ratio_BT) * streams["logp"]
    mean_BT, before_BT = streams["ref_mean"], ratio_BT.cumsum(1) - ratio_BT
    others_BT = groups.at_tokens(groups.mean_others(groups.sum_tokens(ratio_BT)))
    later_BT = (_from_here_on(mean_BT) - mean_BT).detach()
    return streams["ref_square"] + (before_BT - others_BT) * mean_BT + later_BT * streams["logp"]


def _from_here_on(x_BT: Tensor) -> Tensor:
    """[B,T] Σ_{s≥t} x_s."""
    return x_BT.flip(1).cumsum(1).flip(1)


def agro_onpolicy(
    streams: Streams,
    batch: Batch,
    *,
    beta: Beta,
    baseline: Annotated[
        bool,
        Option(
            "lower the variance of the likelihood-ratio part, at some bias; needs groups of 3",
            needs={False: (GROUPS,), True: (TRIPLES,)},
        ),
    ] = False,
    likelihood_ratio: Annotated[
        float | Literal["adaptive"],
        Option(
            "share of the likelihood-ratio part: 1 as in the paper, or 'adaptive', which avoids its trap",
            "share",
            ge=0,
            le=1,
        ),
    ] = 1.0,
    squared: Annotated[
        Estimate, Option("estimate of that part's squared log-ratio: plain, or with less variance")
    ] = "sequence",
) -> Terms:
    """On-policy AGRO (eqs. 5 and 6): (1/n) Σ_i [−β (R_i − R̄_{-i}) + c ½ (R_i − R̄_{-i})²] log π(y_i), on
    fresh samples, with the bracket as a constant.

    The first part is the pathwise one (`agro`), the second the likelihood-ratio part, whose share c is
    `likelihood_ratio`: 1 is the paper's loss. With `baseline` the second part is centered by the others'
    mean: lower variance, some bias.

    Every deterministic policy minimizes the on-policy loss too, and with c = 1 descent from π_ref goes to one
    if the third central moment μ₃ of r is above 2β Var r (for 0/1 rewards of success rate p, if β < ½ − p):
    then the second part pushes good responses down harder than the first pushes them up. "adaptive" sets c in
    each group to min(1, β / max_i (R_i − R̄_{-i})): the weight of a response then decreases with its R, so
    that no response of above-average R is pushed down. π* is stationary for every c, and near it c = 1
    (derivation: reproductions/trap).

    The metric `trap_ratio` is μ₃/(2β Var) of R, which at π_ref is r: above 1/c the step lowers E R to first
    order.

    squared: how the second part's ρ² term, ½ β² E_π[ρ² ∇log π], is estimated (appendix B.3). "sequence" is
    the plain estimate; "triangular" drops, at each token, the square of the earlier log-ratios' sum, which
    has zero mean; "local" also replaces later log-ratios by exact KLs where they multiply earlier ones.
    """
    groups = Groups.of(batch)
    R_N = regularized_reward(streams, batch, groups, beta)
    advantage_N = (R_N - groups.mean_others(R_N)).detach()
    v_N = 0.5 * advantage_N.square()
    if baseline:
        v_N = v_N - groups.mean_others(v_N)
    best_G = groups.largest(advantage_N)
    if likelihood_ratio == "adaptive":
        c_G = beta / best_G.clamp(min=beta or torch.finfo(best_G.dtype).tiny)
    else:
        c_G = torch.full_like(best_G, float(likelihood_ratio))
    weight_N = (c_G[groups.group] * v_N - beta * advantage_N).detach()
    surrogate = groups.average_responses(weight_N * groups.sum_tokens(streams["logp"]))
    if squared != "sequence" and beta:
        added_N = groups.sum_tokens(_square_correction(streams, batch, squared))
        surrogate = surrogate + c_G[0] * 0.5 * beta**2 * groups.average_responses(added_N)  # one c
    loss = groups.average(0.5 * groups.variance(R_N))
    highest_G, lowest_G = groups.extremes(groups.reward)
    differs_G = groups.weight * (highest_G > lowest_G)
    metrics = {
        "consistency": loss,
        "likelihood_ratio": groups.average(c_G),
        # The share of groups with differing rewards whose best response is pushed down; NaN if none differ.
        "reversed_share": (differs_G * (c_G * best_G > 2 * beta)).sum() / differs_G.sum(),
        "trap_ratio": ratio(groups, R_N, beta),
    }
    return Terms(loss, surrogate, metrics)


def _square_correction(streams: Streams, batch: Batch, squared: str) -> Tensor:
    """[B,T] a surrogate, per token, of what the estimates of appendix B.3 add to ρ² ∇log π.

    With a_t = Σ_{s<t} ρ_s and b_t = Σ_{s≥t} ρ_s: ρ² = (a_t + b_t)², of which a_t² is dropped. With "local"
    the ρ_s after t in 2 a_t b_t become KL_s.
    """
    refuse_several_rows(batch, f'objective agro_onpolicy: squared = "{squared}"', '"sequence"')
    ratio_BT = log_ratio(streams, batch, "reference").detach()
    later_BT = _from_here_on(ratio_BT)
    prefix_BT = later_BT[:, :1] - later_BT
    added_BT = -prefix_BT.square()
    if squared == "local":
        kl_BT = streams["kl"].detach()
        added_BT = added_BT + 2 * prefix_BT * ((_from_here_on(kl_BT) - kl_BT) - (later_BT - ratio_BT))
    return added_BT * streams["logp"]


def dro(streams: Streams, batch: Batch, *, beta: Beta) -> Terms:
    """½ (r − β ρ − V(x))² of each response, minimized over the policy and the value (DRO-V, arXiv
    2405.19107). One response is enough, since V replaces the group's mean: at the minimum π = π*
    and V = V*, on responses of any origin.

    V is the mean of the values of a response's rows, usually one. The policy's part of the gradient is
    divided by β: −(r − β ρ − V) ∇log π(y), which at β = 0 is REINFORCE with a learned baseline. Groups weigh
    equally, whatever their sizes.
    """
    groups = Groups.of(batch)
    ratio_N = groups.sum_tokens(regularizer(streams, batch, beta))
    value_N = groups.mean_rows(streams["value"])
    off_N = groups.reward - ratio_N - value_N
    loss = groups.average_responses(0.5 * off_N.square())
    return Terms(loss, metrics={"value_loss": loss, "value_mean": groups.average_responses(value_N)})


def regularizer(streams: Streams, batch: Batch, beta: float) -> Tensor:
    """[B,T] β (log π − log π_ref), with the derivative 1, not β, in log π."""
    logp_BT = streams["logp"]
    value_BT = beta * log_ratio(streams, batch, "reference") if beta else torch.zeros_like(logp_BT)
    return value_BT.detach() + (logp_BT - logp_BT.detach())


def _token_level(options: Options, key: str) -> set[Need]:
    """The needs of the token-level estimate in option `key`; at β = 0 there is nothing to estimate."""
    if options.get("beta") == 0:
        return set()
    estimates: dict[str, set[Need]] = {
        "sequence": set(),
        "triangular": {FRESH},
        "local": {FRESH, KL},
        "reference": {BEHAVIOR_LOGP, OF_REFERENCE, REF_MEAN, REF_SQUARE},
    }
    return estimates[options[key]]


def squared_consistency(
    streams: Streams,
    batch: Batch,
    *,
    beta: Annotated[float, Option("strength of the regularization towards the anchor", NATS, gt=0)],
    anchor: Annotated[
        Literal["reference", "behavior", "old"],
        Option(
            "the policy that β regularizes towards: the reference, the recorded behavior, or the trainer's "
            "own when the batch was drawn",
            needs=ANCHOR_NEEDS,
        ),
    ] = "reference",
    baseline: Annotated[
        Literal["mean", "reward", "soft", "stored"],
        Option(
            "the group's mean of the regularized rewards, or of the rewards alone, their soft maximum, or a "
            "value from data.value_store",
            needs={**dict.fromkeys(("mean", "reward", "soft"), (GROUPS,)), "stored": (STORED_VALUE,)},
        ),
    ] = "mean",
    value_beta: Annotated[float | None, Option("β₁ of the soft maximum; None: beta", "reward", gt=0)] = None,
    scale: Annotated[
        Literal["half_variance", "square", "pairs", "trajectory"], Option("what multiplies the squares")
    ] = "half_variance",
) -> Terms:
    """Σ_i (r_i − β e_i − b)² in a group, e_i = Σ_t log π − log anchor, with the parts of several
    methods to choose from.

    anchor: π_ref, the behavior policy that the samples were drawn from, or the trainer's policy when the
    batch was drawn ("old"); the optimum is anchor · exp(r/β) / Z. b: the group's mean of r_i − β e_i, which
    alone depends on the policy; the mean of r; its soft maximum, β₁ log mean exp(r/β₁), which is the mean
    as β₁ → ∞ and the maximum as β₁ → 0; or "stored", `extra["stored_value"]` [B]: the soft maximum over
    earlier samples of the anchor, which allows groups of one response. scale multiplies the sum:
    "half_variance" 1/(2(n−1)), "square" 1/n, "pairs" n/(n−1), which makes it the sum over pairs of (a_i −
    a_j)²/(n−1), a = r − β e, "trajectory" 1/(n β²).

    AGRO itself: reference, mean, half_variance. Its presets: gvpo, vargrad, copg, rebel, kimi, oapl, apo.
    """
    groups = Groups.of(batch)
    u_N = groups.reward - beta * groups.sum_tokens(log_ratio(streams, batch, anchor))
    off_N = u_N - _baseline(groups, u_N, baseline, value_beta or beta)
    n_G = groups.n.to(u_N.dtype)
    factor_G = {
        "half_variance": 0.5 / (n_G - 1),
        "square": 1.0 / n_G,
        "pairs": n_G / (n_G - 1),
        "trajectory": 1.0 / (n_G * beta**2),
    }[scale]
    loss = groups.average(factor_G * groups.sum(off_N.square()))
    several_G = groups.n > 1
    variance_G = torch.where(several_G, groups.variance(u_N), 0.0)  # one response has none
    share = groups.average(several_G)
    return Terms(loss, metrics={"consistency": groups.average(0.5 * variance_G) / share})


def qrpo(streams: Streams, batch: Batch, *, beta: BetaAbove0) -> Terms:
    """(q − β log Z − β ρ)² of each response (QRPO, arXiv 2507.08068): q from 0 to 1,
    `extra["stored_quantile"]` [B], is the share of the reference's samples for the prompt whose reward
    isn't above this one's.

    If rewards are continuous, q of the reference's own samples is uniform, so log Z = log ∫ exp(q/β) dq = 1/β
    + log β + log(1 − exp(−1/β)) needs no estimate, and one response per prompt is enough; the authors' code
    omits the last term, which is below 5e-5 for β ≤ 0.1. The optimum is π_ref exp(q/β) / Z, which depends
    only on the ranks of rewards. With few distinct rewards, such as 0 and 1, q isn't uniform and Z isn't this
    number: no policy makes all residuals 0 then.
    """
    groups = Groups.of(batch)
    log_z = 1 / beta + math.log(beta) + math.log1p(-math.exp(-1 / beta))
    rho_N = groups.sum_tokens(log_ratio(streams, batch, "reference"))
    off_N = groups.extra("stored_quantile") - beta * (log_z + rho_N)
    return Terms(groups.average_responses(off_N.square()))


def _baseline(groups: Groups, u_N: Tensor, baseline: str, value_beta: float) -> Tensor:
    """[N] b of `squared_consistency`."""
    if baseline == "mean":
        return groups.mean(u_N)
    if baseline == "reward":
        return groups.mean(groups.reward)
    if baseline == "soft":
        return groups.soft_maximum(groups.reward, value_beta)
    return groups.extra("stored_value")


ENTRIES: dict[str, Objective] = {
    "agro": Objective(
        agro,
        "AGRO, arXiv 2503.19612, eq. 4 and section 6",
        lambda options: {REWARD} | _token_level(options, "regularizer"),
        lambda options: (
            couples_baseline(options) if options["regularizer"] in ("sequence", "reference") else "row"
        ),
        # The other estimates are of sums, for one policy's samples, with the mean of the others as baseline.
        rules=only_with(
            "regularizer",
            ("triangular", "local", "reference"),
            baseline=("others",),
            weight=("none",),
            average=("sum",),
        ),
        anchor=to_reference,
        ingredients=(WEIGHT_BASELINE, BASELINE_SHIFT, WEIGHT, IMITATION, SINGLETONS),
        metrics=("consistency",),
    ),
    "agro_onpolicy": Objective(
        agro_onpolicy,
        "AGRO, arXiv 2503.19612, eqs. 5 and 6",
        lambda options: {REWARD, FRESH} | _token_level(options, "squared"),
        couples_regularized_reward,
        # The others drop terms of zero mean, which isn't 0 if the response itself determines their weight.
        rules=only_with("likelihood_ratio", ("adaptive",), squared=("sequence",)),
        anchor=to_reference,
        warnings=MethodWarnings(options_warning, rewards_warning, metrics_warning),
        ingredients=(IMITATION, SINGLETONS),
        metrics=("consistency", "likelihood_ratio", "reversed_share", "trap_ratio"),
    ),
    "dro": Objective(
        dro,
        "DRO-V, arXiv 2405.19107",
        always(REWARD, VALUE),
        ingredients=(WEIGHT, IMITATION),
        anchor=to_reference,
        metrics=("value_loss", "value_mean"),
    ),
    "squared_consistency": Objective(
        squared_consistency,
        "AGRO, arXiv 2503.19612, with the anchors, baselines and scales of gvpo, vargrad, copg, rebel, kimi, "
        "oapl and apo",
        always(REWARD),
        lambda options: "group" if options["baseline"] == "mean" else "row",
        # The other scales divide by n − 1.
        rules=only_with("baseline", ("stored",), scale=("square", "trajectory")),
        anchor=lambda options: ANCHORS[options.get("anchor", "reference")],
        ingredients=(WEIGHT, IMITATION, SINGLETONS),
        metrics=("consistency",),
    ),
    "qrpo": Objective(
        qrpo,
        "QRPO, arXiv 2507.08068, eq. 11",
        always(REF_LOGP, STORED_QUANTILE),
        ingredients=(WEIGHT,),
    ),
}
