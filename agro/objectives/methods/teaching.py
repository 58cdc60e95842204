"""Learning from a teacher's text, whatever its rewards, or from a teacher's log-probs of the policy's own
samples."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch

from agro.objectives.core import Objective, Options, Streams, Terms, always, only_with
from agro.objectives.ingredients import ANCHOR_NEEDS, WEIGHT, log_ratio
from agro.objectives.needs import KL, REF_LOGP, Need
from agro.objectives.options import Option
from agro.objectives.reduce import token_mean
from agro.types import Batch, Tensor


def sft(streams: Streams, batch: Batch) -> Terms:
    """−log π(y_t), mean over all tokens of the step."""
    return Terms(token_mean(batch, -streams["logp"]))


def distill(
    streams: Streams,
    batch: Batch,
    *,
    over: Annotated[
        Literal["samples", "vocabulary"],
        Option("whether the teacher's log-prob of the sampled token is used, or those of all tokens"),
    ] = "samples",
    divergence: Annotated[
        Literal["reverse", "forward"] | float,
        Option(
            "KL(π ‖ teacher), KL(teacher ‖ π), or the generalized Jensen–Shannon divergence of this β",
            "share",
            gt=0,
            lt=1,
        ),
    ] = "reverse",
    ratio: Annotated[
        Literal["behavior", "old", "none"],
        Option(
            "each token's π/μ by recorded log-probs or the trainer's, or 1, which is right on fresh samples"
        ),
    ] = "behavior",
) -> Terms:
    """On-policy distillation (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543): the divergence of the next
    token's distributions after prefixes of the policy's samples, mean over all tokens of the step. The
    teacher is the reference model.

    With u = teacher/π, a divergence is E_π h(u), and its gradient E_π[c(u) ∇log π], c = h − u h'. Over
    samples it is (π/μ) c(u) ∇log π of each token, π/μ and c without gradient: c = −log u for "reverse", −u
    for "forward", −(1 − β) log(βu + 1 − β) for JSD_β = β KL(teacher ‖ M) + (1 − β) KL(π ‖ M), M = β teacher +
    (1 − β) π. Over the vocabulary it is the exact reverse KL. Prefixes are not differentiated.
    """
    if over == "vocabulary":
        return Terms(token_mean(batch, streams["kl"]))
    logp_BT = streams["logp"]
    log_u_BT = -log_ratio(streams, batch, "reference").detach()
    value_BT, slope_BT = _divergence(log_u_BT, divergence)
    w_BT = torch.ones_like(logp_BT)
    if ratio != "none":
        w_BT = log_ratio(streams, batch, ratio).detach().exp()
    return Terms(
        token_mean(batch, w_BT * value_BT),
        token_mean(batch, w_BT * slope_BT * logp_BT),
        {"ratio_max": w_BT.max()},
    )


def _divergence(log_u: Tensor, divergence: str | float) -> tuple[Tensor, Tensor]:
    """h(u) and c(u) = h − u h'."""
    if divergence == "reverse":
        return -log_u, -log_u
    u = log_u.exp()
    if divergence == "forward":
        return u * log_u, -u
    beta = float(divergence)
    log_m = torch.logaddexp(log_u + math.log(beta), torch.full_like(log_u, math.log1p(-beta)))
    return beta * u * (log_u - log_m) - (1 - beta) * log_m, -(1 - beta) * log_m


def _distill_needs(options: Options) -> set[Need]:
    if options.get("over") == "vocabulary":
        return {KL}
    return {REF_LOGP, *ANCHOR_NEEDS.get(options["ratio"], ())}


ENTRIES: dict[str, Objective] = {
    "distill": Objective(
        distill,
        "on-policy distillation, arXiv 2306.13649 (GKD) and 2306.08543 (MiniLLM)",
        _distill_needs,
        ingredients=(),
        # Over the vocabulary it is the exact KL(π ‖ teacher), without ratios.
        rules=only_with("over", ("vocabulary",), divergence=("reverse",), ratio=("behavior",)),
        metrics=("ratio_max",),
    ),
    "sft": Objective(
        sft,
        "maximum likelihood (SFT); iw-SFT with a weight, arXiv 2507.12856",
        always(),
        ingredients=(WEIGHT,),
    ),
}
