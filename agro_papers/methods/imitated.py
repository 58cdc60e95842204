"""Imitation of chosen texts, or of what a policy would write in a text's place."""

from __future__ import annotations

from typing import Annotated

from agro.objectives.core import Objective, Options, Streams, Terms, coupling
from agro.objectives.needs import PROPOSAL, PROPOSAL_MEAN, Need, changed
from agro.objectives.options import Option
from agro.objectives.reduce import Groups, mean_over, quantile, token_mean
from agro.types import Batch

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
        Option("K tokens drawn from q at each position, as in the paper; 0: the expectation", "tokens", ge=0),
    ] = 0.0,
    seed: Annotated[
        float,
        Option("of the draws, which also depend on the tokens before; a schedule changes them", "number"),
    ] = 0.0,
) -> Terms:
    """One-token rollout (OTR, arXiv 2509.26313): −[q(x) log π(x) + β_o Σ_{a≠x} q(a) log π(a)] at each given
    token x, q without gradient; mean over all tokens of the step.

    This is the expectation over the paper's K = 256 draws from q, whose rewards are 1 for the given token and
    β_o for others. `draws` = K takes their shares in place of q: −(1/K) Σ_j R_j log π(a_j), the same gradient
    on average, and a noisier one. At κ = 1 that average is the gradient of sft with each token weighted by p,
    times 1 − β_o. The paper's κ is above 1; the number wasn't read.
    """
    q_BT, mean_BT = streams["proposal"].detach(), streams["proposal_mean"]
    right_BT = q_BT * streams["logp"]
    loss = token_mean(batch, -(right_BT + negative * (mean_BT - right_BT)))
    return Terms(loss, metrics={"weight_mean": token_mean(batch, q_BT)})


def middle_band(streams: Streams, batch: Batch, *, low: Quantile, high: Quantile) -> Terms:
    """The middle of the perplexities (BFS-Prover-V2, arXiv 2509.06493): −log π of responses whose mean −log
    π per token lies between two quantiles of the step's; mean over their tokens.

    What is too easy and what is noise is left out. The quantile of a share is the least number that so many
    don't exceed. The paper's shares weren't read. It filters tactics, which are samples of their own here.
    """
    groups, logp_BT = Groups.of(batch), streams["logp"]
    nll_N = -groups.mean_tokens(logp_BT.detach())
    weight_N = groups.weight[groups.group]
    lower, upper = (quantile(nll_N, weight_N, share) for share in (low, high))
    band_N = (nll_N >= lower) & (nll_N <= upper)
    band_BT = batch.mask & band_N[batch.response][:, None]
    share_in_band = (weight_N * band_N).sum() / weight_N.sum()
    return Terms(mean_over(batch, band_BT, -logp_BT), metrics={"kept_share": share_in_band})


def _otr_needs(options: Options) -> set[Need]:
    at = [
        options[key] if isinstance(options.get(key), (int, float)) else other
        for key, other in (("temperature", 1.0), ("draws", 0.0), ("seed", 0.0))
    ]
    temperature, draws, seed = map(float, at)
    drawn = {"temperature": temperature, "draws": int(draws), "seed": seed}
    return {changed(need, **drawn) for need in (PROPOSAL, PROPOSAL_MEAN)}


def _otr_excludes(options: Options) -> str:
    if options["draws"] != int(options["draws"]):
        return f"draws = {options['draws']} isn't a whole number"
    if options["seed"] and not options["draws"]:
        return (
            f"seed = {options['seed']} is of draws, but draws = 0 is their expectation; leave one of them out"
        )
    return ""


def _band_excludes(options: Options) -> str:
    if options["low"] <= options["high"]:
        return ""
    return f"low = {options['low']} is above high = {options['high']}; swap them"


ENTRIES: dict[str, Objective] = {
    "otr": Objective(
        otr,
        "OTR, arXiv 2509.26313",
        _otr_needs,
        ingredients=(),
        excludes=_otr_excludes,
        metrics=("weight_mean",),
    ),
    "middle_band": Objective(
        middle_band,
        "BFS-Prover-V2, arXiv 2509.06493",
        lambda options: set(),
        coupling("step"),
        ingredients=(),
        excludes=_band_excludes,
        metrics=("kept_share",),
    ),
}
