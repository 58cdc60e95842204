"""Preferences: pairs of responses to one prompt, one of which was judged better.

Subtracting the generation consistency (AGRO, Theorem 1) of two responses cancels V*: r(y) − r(y') = β (ρ*(y)
− ρ*(y')). A judgment is evidence about the left side, so these losses depend on the policy only through h =
ρ(winner) − ρ(loser), whoever wrote the two. Groups weigh equally, and so do the pairs within a group. A
response in no pair gets a gradient of 0.

Without a judge, a response is good if its reward is above a threshold (`kto`), or the best of its group
(`online_dpo`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch

from agro.objectives.core import SINGLETONS, Objective, Streams, Terms, always, coupling, only_with
from agro.objectives.ingredients import (
    ANCHOR_NEEDS,
    IMITATION,
    IMITATION_OF_WINNERS,
    WEIGHT,
    WEIGHT_BASELINE_OF_PAIRS,
    anchor_logp,
)
from agro.objectives.needs import GROUPS, PAIRS, PAIRS_AND_TIES, REF_LOGP, REWARD, Need
from agro.objectives.options import BetaAbove0, Option, Votes
from agro.objectives.reduce import Groups, Pairs
from agro.types import Batch, Tensor

BetaOfJudgments = Annotated[
    float,
    Option(
        "strength of the regularization towards the reference",
        "logit of a judgment per nat of the response's log-ratio",
        gt=0,
    ),
]
Anchor = Annotated[
    Literal["reference", "behavior"],
    Option("the policy that ρ compares with: the reference, or the recorded behavior", needs=ANCHOR_NEEDS),
]
Average = Annotated[
    Literal["sum", "token"], Option("whether ρ is the sum or the mean of a response's token log-ratios")
]
Smoothing = Annotated[float, Option("probability that a judgment is reversed", "probability", ge=0, lt=0.5)]
Threshold = Annotated[float, Option("reward above which a response counts as good", "reward")]
Weight = Annotated[float, Option("λ, weight of these responses in the loss", "ratio", ge=0)]


def bradley_terry(margin_P: Tensor, p: Tensor | float) -> Tensor:
    """[P] −p log σ(m) − (1 − p) log σ(−m)."""
    return -p * torch.nn.functional.logsigmoid(margin_P) - (1 - p) * torch.nn.functional.logsigmoid(-margin_P)


def log_ratio(
    streams: Streams, batch: Batch, groups: Groups, anchor: str = "reference", average: str = "sum"
) -> Tensor:
    """[N] ρ of each response; log π itself if the anchor is "none"."""
    if anchor == "none":
        return groups.over_tokens(streams["logp"], average)
    return groups.over_tokens(streams["logp"] - anchor_logp(batch, anchor), average)


def mean_of_won(pairs: Pairs, v_P: Tensor) -> Tensor:
    """[] the mean over the pairs with a winner, averaged like the loss."""
    won, v_P = pairs.won(), v_P[~pairs.tie]
    return won.average(v_P) / won.average(torch.ones_like(v_P))


def ordered(pairs: Pairs, margin_P: Tensor) -> dict[str, Tensor]:
    """The share of pairs ordered as judged, and the mean margin; both are 0 at the anchor."""
    return {
        "ordered_share": mean_of_won(pairs, margin_P > 0),
        "implicit_margin": mean_of_won(pairs, margin_P),
    }


def ranked(
    streams: Streams, batch: Batch, pairs: Pairs, margin_P: Tensor, anchor: str = "reference"
) -> dict[str, Tensor]:
    """`ordered`, and the share of pairs whose winner is at least as probable as the loser: in all, per token,
    and under the anchor."""
    groups, logp_BT = pairs.groups, streams["logp"]
    by_name = {
        "ranked_share": groups.sum_tokens(logp_BT),
        "ranked_share_per_token": groups.mean_tokens(logp_BT),
        "ranked_share_anchor": groups.sum_tokens(anchor_logp(batch, anchor)),
    }
    shares = {name: mean_of_won(pairs, pairs.gap(v_N) >= 0) for name, v_N in by_name.items()}
    return ordered(pairs, margin_P) | shares


def pair_consistency(
    streams: Streams,
    batch: Batch,
    *,
    beta: BetaAbove0,
    gap: Annotated[
        float | Literal["reward"],
        Option(
            "how much better the winner is: a number, or 'reward': the rewards' difference", "reward", gt=0
        ),
    ] = 0.5,
    votes: Votes = "ignore",
    anchor: Anchor = "reference",
) -> Terms:
    """¼ (r_w − r_l − β h)², which is ½ Var(R) of the two responses; r_w − r_l is `gap`, or that of the
    rewards.

    A number is for judgments without rewards: with ½ the loss is β²/4 times that of `ipo`. votes = "mean"
    multiplies it by 2p − 1, p the probability that the winner is the better one: `vipo`, up to β²/4. "reward"
    gives a quarter of CoPG (arXiv 2406.19185) on the judged pairs, whoever won. anchor = "behavior" replaces
    the reference's log-probs by those recorded with the responses.
    """
    pairs = Pairs.of(batch)
    margin_P = beta * pairs.gap(log_ratio(streams, batch, pairs.groups, anchor))
    gap_P: Tensor | float
    if isinstance(gap, str):
        gap_P = pairs.gap(pairs.groups.reward)
    else:
        gap_P = gap * (2 * pairs.chance(votes) - 1)
    loss = pairs.average(0.25 * (gap_P - margin_P).square())
    return Terms(loss, metrics=ranked(streams, batch, pairs, margin_P, anchor))


def ipo(
    streams: Streams,
    batch: Batch,
    *,
    beta: BetaAbove0,
    votes: Votes = "ignore",
    anchor: Anchor = "reference",
    average: Average = "sum",
) -> Terms:
    """(h − 1/(2β))², β the paper's τ (IPO, arXiv 2310.12036, eq. 17): 4/β² times `pair_consistency`.

    With votes = "mean" (h − (2p − 1)/(2β))², p the probability that the winner is the better one. average =
    "token", as in TRL, is another objective: ρ is the mean of a response's token log-ratios.
    """
    pairs = Pairs.of(batch)
    h_P = pairs.gap(log_ratio(streams, batch, pairs.groups, anchor, average))
    wanted_P = (2 * pairs.chance(votes) - 1) / (2 * beta)
    loss = pairs.average((h_P - wanted_P).square())
    return Terms(loss, metrics=ranked(streams, batch, pairs, beta * h_P, anchor))


def dpo(
    streams: Streams,
    batch: Batch,
    *,
    beta: BetaOfJudgments,
    label_smoothing: Smoothing = 0.0,
    votes: Votes = "ignore",
    anchor: Anchor = "reference",
    winner: Annotated[
        float, Option("share in the loss of −log σ(β ρ) of the winner, which keeps ρ above 0", "share", ge=0)
    ] = 0.0,
) -> Terms:
    """−p log σ(βh) − (1 − p) log σ(−βh), p = 1 − `label_smoothing`: DPO (arXiv 2305.18290, eq. 7).

    The Bradley–Terry likelihood of the judgments, with r(y) − r(y') = β (ρ(y) − ρ(y')) in logits: if
    judgments are sampled from that model, the optimum is π_ref exp(r/β) / Z. With votes = "mean" p is the
    probability that the winner is the better one (VDPO), smoothed likewise. anchor = "behavior" replaces the
    reference's log-probs by those recorded with the responses; the reference isn't needed then. `winner` adds
    a term that isn't DPO's.

    The metrics ranked_share… are those of arXiv 2405.19534: the share of pairs in which the policy itself,
    the anchor, or the loss's own optimum gives the winner the larger log-prob.
    """
    pairs = Pairs.of(batch)
    margin_N = beta * log_ratio(streams, batch, pairs.groups, anchor)
    margin_P = pairs.gap(margin_N)
    p = label_smoothing + (1 - 2 * label_smoothing) * pairs.chance(votes)
    loss_P = bradley_terry(margin_P, p)
    if winner != 0:
        praise_P = torch.nn.functional.logsigmoid(margin_N[pairs.winner])
        loss_P = loss_P - winner * torch.where(pairs.tie, 0.0, praise_P)
    metrics = ranked(streams, batch, pairs, margin_P, anchor)
    # At the loss's own optimum β h = logit p; the share is 1 for judgments that are certain.
    gap_P = pairs.gap(pairs.groups.sum_tokens(anchor_logp(batch, anchor)))
    logit_P = torch.as_tensor(p, dtype=torch.float64, device=gap_P.device).logit()
    metrics["ranked_share_ideal"] = mean_of_won(pairs, gap_P + logit_P / beta >= 0)
    return Terms(pairs.average(loss_P), metrics=metrics)


def gpo(
    streams: Streams,
    batch: Batch,
    *,
    beta: BetaOfJudgments,
    loss: Annotated[
        Literal["exponential", "truncated_square", "savage"],
        Option("f(m): exp(−m), max(0, 1 − m)², or σ(−m)², which isn't convex"),
    ] = "exponential",
) -> Terms:
    """f(β h): the losses of GPO (arXiv 2402.05749, table 1) that no other method has; the rest are those of
    `dpo`, `slic` and `ipo`.

    On Bradley–Terry judgments the margins at the optimum equal those of `dpo`, at 2β with "exponential" and
    at β with "savage".
    """
    pairs = Pairs.of(batch)
    margin_P = beta * pairs.gap(log_ratio(streams, batch, pairs.groups))
    losses = {
        "exponential": (-margin_P).exp(),
        "truncated_square": (1 - margin_P).clamp(min=0).square(),
        "savage": (-margin_P).sigmoid().square(),
    }
    return Terms(pairs.average(losses[loss]), metrics=ranked(streams, batch, pairs, margin_P))


def slic(
    streams: Streams,
    batch: Batch,
    *,
    beta: BetaOfJudgments,
    margin: Annotated[float, Option("δ: the loss is 0 if β h is larger", "logit of a judgment", gt=0)] = 1.0,
    anchor: Annotated[
        Literal["reference", "behavior", "none"],
        Option(
            "the policy that ρ compares with: the reference, the recorded behavior, or none (ρ is log π)",
            needs=ANCHOR_NEEDS,
        ),
    ] = "reference",
) -> Terms:
    """max(0, δ − β h): SLiC's hinge (arXiv 2305.10425) on log-ratios, as in TRL.

    The paper's own calibration loss is on log π: anchor = "none", beta = 1, and δ in nats; its term λ · (−log
    π) of a target is the ingredient imitation = λ, here the mean over the tokens of the winners. The gradient
    is ∓β in pairs whose margin isn't reached, 0 in the others.
    """
    pairs = Pairs.of(batch)
    margin_P = beta * pairs.gap(log_ratio(streams, batch, pairs.groups, anchor))
    return Terms(pairs.average((margin - margin_P).clamp(min=0)), metrics=ordered(pairs, margin_P))


def kto(
    streams: Streams,
    batch: Batch,
    *,
    beta: BetaOfJudgments,
    threshold: Threshold = 0.0,
    desirable: Weight = 1.0,
    undesirable: Weight = 1.0,
    kl: Annotated[
        Literal["step", "none"], Option("z₀: the KL to the reference as estimated from the step, or 0")
    ] = "step",
) -> Terms:
    """λ_D (1 − σ(β (ρ − z₀))) of good responses, λ_U (1 − σ(β (z₀ − ρ))) of the others: KTO (arXiv
    2402.01306).

    z₀, without gradient, is max(0, mean ρ of the step). The paper and TRL estimate the KL from responses
    paired with other prompts, which costs another forward pass; the mean of ρ is an unbiased estimate on
    the policy's own samples only. Mean in a group, mean over groups.
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

    If several are best or worst, the loss is the mean over all such pairs; other code takes the first. A
    group with equal rewards has no pair and counts 0 in the mean over groups.
    """
    pairs = Pairs.best_and_worst(Groups.of(batch))
    margin_P = beta * pairs.gap(log_ratio(streams, batch, pairs.groups))
    loss = pairs.average(bradley_terry(margin_P, 1 - label_smoothing))
    return Terms(loss, metrics=ordered(pairs, margin_P))


ORDERED = ("ordered_share", "implicit_margin")
RANKED = (*ORDERED, "ranked_share", "ranked_share_per_token", "ranked_share_anchor")


def judged(function: Callable[..., Terms], source: str, metrics: tuple[str, ...], *needs: Need) -> Objective:
    """The entry of a loss on judged pairs; `needs`: those that its options don't declare."""
    return Objective(
        function,
        source,
        always(*needs),
        coupling("group"),
        ingredients=(WEIGHT, IMITATION_OF_WINNERS, SINGLETONS),
        metrics=metrics,
    )


ENTRIES: dict[str, Objective] = {
    "pair_consistency": Objective(
        pair_consistency,
        "AGRO, arXiv 2503.19612, Theorem 1 for two responses",
        # With rewards it doesn't matter who won.
        lambda options: {PAIRS_AND_TIES, REWARD} if options["gap"] == "reward" else set(),
        coupling("group"),
        rules=only_with("gap", ("reward",), votes=("ignore",)),  # votes estimate the gap that rewards give
        ingredients=(WEIGHT_BASELINE_OF_PAIRS, WEIGHT, IMITATION_OF_WINNERS, SINGLETONS),
        metrics=RANKED,
    ),
    "dpo": judged(dpo, "DPO, arXiv 2305.18290, eq. 7", (*RANKED, "ranked_share_ideal")),
    "ipo": judged(ipo, "IPO, arXiv 2310.12036, eq. 17", RANKED),
    "slic": judged(slic, "SLiC-HF, arXiv 2305.10425", ORDERED, PAIRS),
    "gpo": judged(gpo, "GPO, arXiv 2402.05749, table 1", RANKED, PAIRS, REF_LOGP),
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
