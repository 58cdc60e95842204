"""Preferences without a judge: a response's reward says whether it is a good one.

A response is a good one where its reward is above a threshold (`kto`), or where it is the best of its
group (`online_dpo`). ρ is a response's log-ratio to the reference, the sum over its tokens.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch

from agro.objectives.core import SINGLETONS, Objective, Streams, Terms, always, coupling
from agro.objectives.imitation import IMITATION
from agro.objectives.methods.preference import BetaOfJudgments, Smoothing, bradley_terry, log_ratio, ordered
from agro.objectives.needs import GROUPS, REF_LOGP, REWARD
from agro.objectives.options import Option
from agro.objectives.reduce import Groups, Pairs
from agro.objectives.weights import WEIGHT
from agro.types import Batch

Threshold = Annotated[float, Option("a response whose reward isn't above it isn't a good one", "reward")]
Weight = Annotated[float, Option("λ, weight of these responses in the loss", "ratio", ge=0)]


def kto(
    streams: Streams,
    batch: Batch,
    *,
    beta: BetaOfJudgments,
    threshold: Threshold = 0.0,
    desirable: Weight = 1.0,
    undesirable: Weight = 1.0,
    kl: Annotated[
        Literal["step", "none"], Option("z₀: the KL to the reference as the step's samples estimate it, or 0")
    ] = "step",
) -> Terms:
    """λ_D (1 − σ(β (ρ − z₀))) of good responses, λ_U (1 − σ(β (z₀ − ρ))) of the others: KTO (arXiv
    2402.01306).

    z₀, without gradient, is max(0, mean ρ of the step). The paper and TRL estimate the KL from responses
    paired with other prompts, which costs another forward pass; on the policy's own samples the mean of ρ is
    its unbiased estimate, on others it isn't. Mean in a group, mean over groups.
    """
    groups = Groups.of(batch)
    rho_N = log_ratio(streams, batch, groups)
    z = groups.average_responses(rho_N).clamp(min=0).detach() if kl == "step" else rho_N.new_zeros(())
    good_N = groups.reward > threshold
    off_N = torch.where(good_N, z - rho_N, rho_N - z)
    weight_N = desirable * good_N.double() + undesirable * (~good_N).double()
    loss = groups.average_responses(weight_N * (beta * off_N).sigmoid())
    return Terms(loss, metrics={"reference_point": z})


def online_dpo(
    streams: Streams, batch: Batch, *, beta: BetaOfJudgments, label_smoothing: Smoothing = 0.0
) -> Terms:
    """DPO on the best and the worst response of each group by reward (arXiv 2402.04792; Async RLHF, arXiv
    2410.18252).

    Where several are the best or the worst, the mean over all such pairs; other codes take the first. A group
    with equal rewards has no pair and counts 0 in the mean over groups.
    """
    pairs = Pairs.best_and_worst(Groups.of(batch))
    margin_P = beta * pairs.gap(log_ratio(streams, batch, pairs.groups))
    loss = pairs.average(bradley_terry(margin_P, 1 - label_smoothing))
    return Terms(loss, metrics=ordered(pairs, margin_P))


ENTRIES: dict[str, Objective] = {
    "kto": Objective(
        kto,
        "KTO, arXiv 2402.01306",
        always(REWARD, REF_LOGP),
        lambda options: "row" if options["kl"] == "none" else "step",
        ingredients=(WEIGHT, IMITATION),
        metrics=("reference_point",),
    ),
    "online_dpo": Objective(
        online_dpo,
        "online DPO, arXiv 2402.04792; Async RLHF, arXiv 2410.18252",
        always(REWARD, GROUPS, REF_LOGP),
        coupling("group"),
        ingredients=(WEIGHT, IMITATION, SINGLETONS),
        metrics=("implicit_margin", "ordered_share"),
    ),
}
