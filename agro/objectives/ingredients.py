"""What objectives share in addition to their functions: a correction weight and its baselines, a KL term, and
a share of imitation.

A correction weight multiplies each response's or token's part of the gradient in the log-probs, for samples
that another policy wrote. It is constant: AGRO's part of response i becomes −w_i (β/n) (R_i − R̄_{-i})
∇log π(y_i). docs/guide/concepts.md has the derivation and measurements.

The weight is a ratio within bounds. The ratio of the policy to the reference or to the recorded behavior μ
corrects for the policy's distance from it. "mismatch" is π_old/μ, the trainer's log-probs when the batch was
drawn to those of the sampler, and corrects for what objectives with `ratio = "old"` ignore: another engine,
another precision, staleness. The rule "truncate" clamps the ratio (TIS); "mask" makes it 0 outside the bounds
(MIS, IcePop).

Masked tokens stay in every denominator: a mean is over all tokens of the response, or of the step. So a
masked token adds 0, as a token of ratio 0 does, the others count as much as without it, and the estimate
remains that of E_μ[w g 1{within bounds}]. Dividing by the remaining tokens alone would make the step larger
as more are masked, and give a response's tokens more weight the more of them are wrong.

A group's baseline is what its R are compared with. Every mean Σ_j c_j R_j with weights c_j ≥ 0 that don't
depend on rewards leaves π* the only stationary point of a tabular policy, even with noisy rewards; if
responses share parameters, a weight may add others. The variance is least for c ∝ w g, g the squared norm of
∇log π (Greensmith et al., JMLR 2004), which Σ_t (1 − π_t)² approximates. A baseline lowered by a constant
pulls towards the policy that wrote the responses. See docs/guide/concepts.md.

A KL term in the loss is, token by token, β times an estimate of KL(π ‖ π_ref) at each token. With d = log π −
log π_ref of a token, k3 = exp(−d) − 1 + d, k2 = d²/2 (Schulman 2020). Only their gradients matter here: on
samples of the policy k2's is ∇KL(π ‖ π_ref) and k3's is ∇KL(π_ref ‖ π), after the sampled prefixes.
`unbiased_kl` multiplies the estimate by the token's ratio w = π/μ, gradient included (DeepSeek-V3.2, arXiv
2512.02556, eq. 7): then the gradient of w k3 is w d, and the mean of w k3 and its gradient are KL(π ‖ π_ref)
and ∇KL(π ‖ π_ref) for samples of any policy μ. As in TRL and verl, the term is neither clipped nor weighted.
It is averaged over tokens like the objective's own terms.

A share of imitation is the mean −log π over all tokens of the better responses: by rewards the best of n
(RAFT, arXiv 2304.06767), in judged pairs the winners (RPO, arXiv 2404.19733). The choice depends on rewards
and judgments alone, so no row's gradient depends on another row's log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch

from agro.errors import Refused
from agro.objectives.core import Gradient, Ingredient, Options, ascending, masked, only_with
from agro.objectives.needs import BEHAVIOR_LOGP, DRAWN_LOGP, OLD_LOGP, REF_LOGP, ColumnNeed, Need
from agro.objectives.options import Beta, Option, needed_by
from agro.objectives.reduce import Groups, Pairs, average_tokens
from agro.types import Batch, Tensor

# The policies that π is compared with.
ANCHORS: dict[str, ColumnNeed] = {"reference": REF_LOGP, "behavior": BEHAVIOR_LOGP, "old": OLD_LOGP}
ANCHOR_NEEDS = {name: (need,) for name, need in ANCHORS.items()}
Ratio = Annotated[
    Literal["behavior", "old"],
    Option(
        "the ratio's denominator: recorded log-probs, or the trainer's when the batch was drawn",
        needs=ANCHOR_NEEDS,
    ),
]


def anchor_logp(batch: Batch, anchor: str) -> Tensor:
    """[B,T] log-probs of one of `ANCHORS`."""
    anchor_BT = ANCHORS[anchor].of(batch)
    assert anchor_BT is not None
    return anchor_BT


def log_ratio(streams: Mapping[str, Tensor], batch: Batch, anchor: str) -> Tensor:
    """[B,T] log π minus the anchor's log-prob of each token, 0 outside the mask."""
    return torch.where(batch.mask, streams["logp"] - anchor_logp(batch, anchor), 0.0)


def k3(d: Tensor) -> Tensor:
    """exp(−d) − 1 + d."""
    return (-d).exp() - 1 + d


def of_level(groups: Groups, log_ratio_BT: Tensor, level: str) -> Tensor:
    """[B,T] unchanged for "token"; for "sequence" the sum, for "mean" the mean over the token's response."""
    if level == "token":
        return log_ratio_BT
    return groups.at_tokens(groups.over_tokens(log_ratio_BT, "sum" if level == "sequence" else "token"))


Kind = Annotated[
    Literal["none", "reference", "behavior", "mismatch"],
    Option(
        "weight of each response's or token's part of the gradient: 1, or π/π_ref, π/μ or π_old/μ within "
        "bounds, where μ is the recorded behavior and π_old the policy when the batch was drawn",
        needs={
            "reference": (REF_LOGP,),
            "behavior": (BEHAVIOR_LOGP,),
            "mismatch": (BEHAVIOR_LOGP, DRAWN_LOGP),
        },
    ),
]
WeightMax = Annotated[float | None, Option("largest weight; None: no bound", "ratio", gt=0)]
WeightMin = Annotated[float, Option("smallest weight, or smallest ratio that isn't masked", "ratio", ge=0)]
WeightLevel = Annotated[
    Literal["sequence", "token", "mean"],
    Option("ratio of the response, of each token, or the geometric mean over the response's tokens"),
]
Rule = Annotated[
    Literal["truncate", "mask"], Option("what a ratio outside the bounds becomes: the bound, or 0")
]
Power = Annotated[
    float, Option("exponent of the ratio, before it is bounded: 0.5 is the root", "exponent", gt=0, le=1)
]
WeightBaseline = Annotated[
    Literal["mean", "optimal"],
    Option(
        "what the R of a group are compared with: their mean, or the mean weighted by w Σ_t (1 − π_t)², "
        "which has nearly the least variance"
    ),
]
MEASURED = "measured"  # instead of a number: the run measures the shift, which falls to 0 over its steps
Shift = Annotated[
    float | Literal["measured"],
    Option(
        "how far the baseline is lowered, which pushes up all responses; 'measured': by the log's mean "
        "reward minus the start's on held-out prompts, if that exceeds two standard errors, falling to 0 "
        "over the phase",
        "reward",
        ge=0,
    ),
]
Normalize = Annotated[
    Literal["none", "group"],
    Option(
        "'group': a group's ratios are divided by the largest if that is below 1, so that a group that has "
        "become improbable as a whole can recover"
    ),
]


class Weight(Ingredient):
    """Multiplies each token's gradient by a constant weight."""

    options: ClassVar = {
        "weight": (Kind, "none"),
        "weight_max": (WeightMax, 1.0),
        "weight_min": (WeightMin, 0.0),
        "weight_level": (WeightLevel, "sequence"),
        "weight_rule": (Rule, "truncate"),
        "weight_power": (Power, 1.0),
        "weight_normalize": (Normalize, "none"),
    }
    metrics: ClassVar = ("weight_mean",)
    rules: ClassVar = (
        *only_with(
            "weight",
            ("none",),
            **{key: (default,) for key, (_, default) in options.items() if key != "weight"},
        ),
        *only_with("weight_normalize", ("group",), weight_level=("sequence", "mean")),
        ascending("weight_min", "weight_max"),
    )

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        if options["weight"] == "none":
            return gradient
        weight_BT, groups = weights(options, logp_BT, batch), Groups.of(batch)
        mean = float(groups.average_responses(groups.mean_tokens(weight_BT)))
        metrics = {**gradient.metrics, "weight_mean": mean}
        return replace(gradient, logp_BT=weight_BT * gradient.logp_BT, metrics=metrics)


@dataclass(frozen=True)
class GroupBaseline(Ingredient):
    """Changes what a group's R are compared with, in objectives whose gradients sum to 0 in a group.

    Entries list it before the weight, whose multiplication it takes into account.
    """

    options: ClassVar = {"weight_baseline": (WeightBaseline, "mean")}
    # It compares the R of complete responses within a group.
    rules: ClassVar = only_with(
        "weight_baseline",
        ("optimal",),
        weight_level=("sequence",),
        baseline=("others",),
        average=("sum",),
        regularizer=("sequence",),
        normalize=(False,),
    )
    judged: bool = False  # whether only the responses of judged pairs are compared

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        if options["weight_baseline"] == "mean":
            return gradient
        groups, weight_BT = Groups.of(batch), weights(options, logp_BT, batch)
        compared_N = torch.ones_like(groups.group, dtype=torch.float64)  # 0 for a response in no pair
        if self.judged:
            pairs = Pairs.of(batch)
            in_pair = torch.cat([pairs.winner, pairs.loser])
            compared_N = torch.zeros_like(compared_N).index_fill(0, in_pair, 1.0)
        weight_BT = weight_BT * groups.at_tokens(compared_N)
        # The gradient is R̄ − R_i times a constant of the group; its mean is how far the baseline is below
        # R̄.
        share_N = groups.mean_tokens(weight_BT) * squared_norm(groups, logp_BT.detach())
        excess_G = groups.weighted_mean(groups.mean_tokens(gradient.logp_BT), share_N)
        excess_BT = groups.at_tokens(compared_N * excess_G[groups.group])
        return replace(gradient, logp_BT=gradient.logp_BT - torch.where(batch.mask, excess_BT, 0.0))


class BaselineShift(Ingredient):
    """Lowers the baseline by s: adds −s w ∇log π for each response, the mean over responses and groups.

    Towards the log's author μ the reward rises by E_μ r − E_π r per share of μ, which a mean over μ's own
    responses can't show. Entries list it after the baseline and before the weight.
    """

    options: ClassVar = {"baseline_shift": (Shift, 0.0)}
    rules: ClassVar = (
        *only_with("average", ("token",), baseline_shift=(0.0,)),
        *only_with("scale", ("loss",), baseline_shift=(0.0,)),
    )

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        shift = options["baseline_shift"]
        if shift == MEASURED:
            raise Refused('baseline_shift = "measured" is for runs, which measure it: expected a number here')
        if shift == 0:
            return gradient
        groups = Groups.of(batch)
        share_N = (groups.weight / groups.weight.sum() / groups.n)[groups.group]
        lower_BT = torch.where(batch.mask, groups.at_tokens(shift * share_N), 0.0)
        return replace(gradient, logp_BT=gradient.logp_BT - lower_BT)


WEIGHT, WEIGHT_BASELINE, WEIGHT_BASELINE_OF_PAIRS = Weight(), GroupBaseline(), GroupBaseline(judged=True)
BASELINE_SHIFT = BaselineShift()


def weights(options: Options, logp_BT: Tensor, batch: Batch) -> Tensor:
    """[B,T] the weight of each token, or of its response unless `weight_level` is "token"; 1 for "none"."""
    if options["weight"] == "none":
        return torch.ones_like(logp_BT)
    level, minimum, maximum = options["weight_level"], options["weight_min"], options["weight_max"]
    now_BT, anchor = logp_BT.detach(), options["weight"]
    if anchor == "mismatch":
        now_BT, anchor = anchor_logp(batch, "old").double(), "behavior"
    ratio_BT = log_ratio({"logp": now_BT}, batch, anchor)
    groups = Groups.of(batch)
    log_BT = float(options["weight_power"]) * of_level(groups, ratio_BT, level)
    if options["weight_normalize"] == "group":
        largest_G = groups.largest(groups.mean_tokens(log_BT)).clamp(max=0.0)
        log_BT = log_BT - groups.at_tokens(largest_G[groups.group])
    lower = math.log(minimum) if minimum > 0 else -math.inf
    upper = math.inf if maximum is None else math.log(maximum)
    if options["weight_rule"] == "truncate":
        return log_BT.clamp(lower, upper).exp()
    return torch.where((log_BT >= lower) & (log_BT <= upper), log_BT, -math.inf).exp()


def squared_norm(groups: Groups, logp_BT: Tensor) -> Tensor:
    """[N] Σ_t (1 − π_t)², which approximates the squared norm of a response's ∇log π."""
    return groups.sum_tokens((1.0 - logp_BT.exp()).square())


Estimate = Annotated[Literal["k3", "k2"], Option("the estimate of a token's KL to the reference")]
Unbiased = Annotated[
    bool, Option("multiply the estimate by the token's ratio to the sampling policy, gradient included")
]


class KLTerm(Ingredient):
    """Adds β times the estimate, averaged over tokens, to the loss."""

    options: ClassVar = {"beta": (Beta, 0.0), "kl": (Estimate, "k3"), "unbiased_kl": (Unbiased, False)}

    def needs(self, options: Options) -> set[Need]:
        """The reference's log-probs unless β is 0, and the ratio's denominator: the recorded behavior if the
        objective has no `ratio`."""
        needs = super().needs(options)
        if needs and options["unbiased_kl"]:
            needs.update(needed_by({"ratio": (Ratio, "behavior")}, options))
        return needs

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        beta, detached = float(options["beta"]), {"logp": logp_BT.detach()}
        if beta == 0:
            return gradient
        d_BT = log_ratio(detached, batch, "reference")
        kl_BT, slope_BT = d_BT.square() / 2, d_BT
        if options["kl"] == "k3":
            kl_BT, slope_BT = k3(d_BT), -(-d_BT).expm1()
        if options["unbiased_kl"]:
            w_BT = log_ratio(detached, batch, options.get("ratio", "behavior")).exp()
            kl_BT, slope_BT = w_BT * kl_BT, w_BT * (d_BT if options["kl"] == "k3" else d_BT + kl_BT)
        groups, average = Groups.of(batch), options.get("average", "response")
        # The slopes are written out, since automatic differentiation of w k3 would subtract huge numbers.
        loss, surrogate = (beta * average_tokens(groups, x, average) for x in (kl_BT, slope_BT * logp_BT))
        (grad_BT,) = torch.autograd.grad(surrogate, [logp_BT])
        return replace(
            gradient, loss=gradient.loss + float(loss), logp_BT=gradient.logp_BT + masked(batch, grad_BT)
        )


KL_TERM = KLTerm()


Share = Annotated[
    float,
    Option(
        "share in the loss of the mean −log π over all tokens of the best responses of groups whose rewards "
        "differ, or of the winners of judged pairs",
        "loss per nat",
        ge=0,
    ),
]


@dataclass(frozen=True)
class Imitation(Ingredient):
    """Adds the share to the loss. The rows of a group with weight w count w times."""

    options: ClassVar = {"imitation": (Share, 0.0)}
    metrics: ClassVar = ("imitation_loss",)
    winners: bool = False  # imitate the winners of judged pairs, whatever the rewards

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        """Also adds the metric `imitation_loss`, NaN if nothing is imitated."""
        share = options["imitation"]
        if share == 0:
            return gradient
        groups = Groups.of(batch)
        if self.winners:
            winner = Pairs.of(batch).won().winner
            imitated_N = torch.zeros_like(groups.group, dtype=torch.bool).index_fill(0, winner, True)
        else:
            imitated_N = groups.best
        imitated_BT = batch.mask & imitated_N[batch.response][:, None]
        weight_BT = torch.where(imitated_BT, batch.weight.double()[:, None], 0.0)
        return gradient.likelier(share, logp_BT, weight_BT, "imitation_loss")


IMITATION, IMITATION_OF_WINNERS = Imitation(), Imitation(winners=True)
