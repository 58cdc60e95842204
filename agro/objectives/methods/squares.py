"""Squares of regularized rewards against a baseline: what several published methods share."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch

from agro.objectives.core import SINGLETONS, Objective, Options, Streams, Terms, always
from agro.objectives.imitation import IMITATION
from agro.objectives.needs import (
    BEHAVIOR_LOGP,
    GROUPS,
    OLD_LOGP,
    REF_LOGP,
    REWARD,
    STORED_QUANTILE,
    STORED_VALUE,
    ColumnNeed,
    Need,
)
from agro.objectives.options import NATS, BetaAbove0, Option
from agro.objectives.reduce import Groups
from agro.objectives.weights import WEIGHT
from agro.types import Batch, Tensor

ANCHORS: dict[str, ColumnNeed] = {"reference": REF_LOGP, "behavior": BEHAVIOR_LOGP, "old": OLD_LOGP}


def squared_consistency(
    streams: Streams,
    batch: Batch,
    *,
    beta: Annotated[float, Option("strength of the regularization towards the anchor", NATS, gt=0)],
    anchor: Annotated[
        Literal["reference", "behavior", "old"],
        Option(
            "the policy that β regularizes to: the reference, the recorded behavior, or the trainer's own "
            "when the batch was drawn"
        ),
    ] = "reference",
    baseline: Annotated[
        Literal["mean", "reward", "lowered", "soft", "stored"],
        Option(
            "the group's mean of what is squared, or of the rewards alone, or this less beta, their soft "
            "maximum, or one from data.value_store"
        ),
    ] = "mean",
    value_beta: Annotated[
        float | None, Option("β₁ of the soft maximum; beta where it is not given", "reward", gt=0)
    ] = None,
    scale: Annotated[
        Literal["half_variance", "square", "pairs", "trajectory"], Option("what multiplies the squares")
    ] = "half_variance",
) -> Terms:
    """Σ_i (r_i − β e_i − b)² in a group, e_i = Σ_t log π − log anchor, with the parts of several methods to
    choose from.

    anchor: π_ref, or the behavior policy that the samples were drawn from, or that policy as the trainer
    computes it ("old"); the optimum is anchor · exp(r/β) / Z. b: the group's mean of r_i − β e_i, which alone
    moves with the policy; the mean of r; that less β; its soft maximum, β₁ log mean exp(r/β₁), which is the
    mean as β₁ → ∞ and the maximum as β₁ → 0; or a "stored" one, `extra["stored_value"]` [B]: the soft maximum
    over samples of the anchor that were made before, which lets a group have one response. scale multiplies
    the sum:
    "half_variance" 1/(2(n−1)), "square" 1/n, "pairs" n/(n−1), which makes it the sum over pairs of (a_i −
    a_j)²/(n−1), a = r − β e, "trajectory" 1/(n β²).

    AGRO itself: reference, mean, half_variance. Its presets: gvpo, vargrad, copg, rebel, kimi, kimi_shifted,
    oapl, apo.
    """
    groups = Groups.of(batch)
    anchor_BT = ANCHORS[anchor].of(batch)
    assert anchor_BT is not None
    u_N = groups.reward - beta * groups.sum_tokens(streams["logp"] - anchor_BT)
    off_N = u_N - _baseline(groups, u_N, baseline, beta, value_beta or beta)
    n_G = groups.n.to(u_N.dtype)
    factor_G = {
        "half_variance": 0.5 / (n_G - 1),
        "square": 1.0 / n_G,
        "pairs": n_G / (n_G - 1),
        "trajectory": 1.0 / (n_G * beta**2),
    }[scale]
    loss = groups.average(factor_G * groups.sum(off_N.square()))
    several_G = groups.n > 1
    variance_G = torch.where(several_G, groups.variance(u_N), 0.0)  # of one response there is none
    share = groups.average(several_G.double())
    return Terms(loss, metrics={"consistency": groups.average(0.5 * variance_G) / share})


def qrpo(streams: Streams, batch: Batch, *, beta: BetaAbove0) -> Terms:
    """(q − β log Z − β ρ)² of each response (QRPO, arXiv 2507.08068): q from 0 to 1,
    `extra["stored_quantile"]` [B], is the share of the reference's samples of the prompt whose reward isn't
    above this one's.

    Where rewards are continuous, q of the reference's own samples is uniform, so log Z = log ∫ exp(q/β) dq =
    1/β + log β + log(1 − exp(−1/β)) needs no estimate, and one response a prompt is enough; the authors' code
    leaves out the last term, which is below 5e-5 for β ≤ 0.1. The optimum is π_ref exp(q/β) / Z, in which the
    rewards count by their rank alone. With few different rewards, such as 0 and 1, q isn't uniform and Z
    isn't this number: no policy fits all residuals then.
    """
    groups = Groups.of(batch)
    assert batch.ref_logp is not None
    quantile_N = batch.extra["stored_quantile"].double()[groups.first_row]
    log_z = 1 / beta + math.log(beta) + math.log1p(-math.exp(-1 / beta))
    rho_N = groups.sum_tokens(streams["logp"] - batch.ref_logp)
    off_N = quantile_N - beta * (log_z + rho_N)
    return Terms(groups.average_responses(off_N.square()))


def _baseline(groups: Groups, u_N: Tensor, baseline: str, beta: float, value_beta: float) -> Tensor:
    """[N] b."""
    if baseline == "mean":
        return groups.mean(u_N)
    if baseline in ("reward", "lowered"):
        return groups.mean(groups.reward) - (beta if baseline == "lowered" else 0.0)
    if baseline == "soft":
        return groups.soft_maximum(groups.reward, value_beta)
    return groups.batch.extra["stored_value"].double()[groups.first_row]


def _squares_anchor(options: Options) -> ColumnNeed:
    return ANCHORS[options.get("anchor", "reference")]


def _squares_needs(options: Options) -> set[Need]:
    baseline = STORED_VALUE if options["baseline"] == "stored" else GROUPS
    return {REWARD, _squares_anchor(options), baseline}


def _squares_conflict(options: Options) -> str:
    if options["baseline"] != "stored" or options["scale"] in ("square", "trajectory"):
        return ""
    return (
        f'scale = "{options["scale"]}" divides by n − 1, but baseline = "stored" allows n = 1; '
        'use scale = "square" or "trajectory"'
    )


ENTRIES: dict[str, Objective] = {
    "squared_consistency": Objective(
        squared_consistency,
        "AGRO, arXiv 2503.19612, with the anchors, baselines and scales of gvpo, vargrad, copg, rebel, kimi, "
        "oapl and apo",
        _squares_needs,
        lambda options: "group" if options["baseline"] == "mean" else "row",
        excludes=_squares_conflict,
        anchor=_squares_anchor,
        ingredients=(WEIGHT, IMITATION, SINGLETONS),
        metrics=("consistency",),
    )
}
ENTRIES["qrpo"] = Objective(
    qrpo,
    "QRPO, arXiv 2507.08068, eq. 11",
    always(REF_LOGP, STORED_QUANTILE),
    ingredients=(WEIGHT,),
)
