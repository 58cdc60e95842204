"""What objectives share beside their functions: a correction weight and its baselines, a KL term, and a share
of imitation.

A correction weight of each response's or token's part of the gradient, for samples that the policy didn't
write.

Multiplied into what the objective's gradient is in the log-probs, and constant itself. AGRO's part of
response i is then −w_i (β/n) (R_i − R̄_{-i}) ∇log π(y_i). The derivation and measurements are in
docs/guide/concepts.md.

The weight is a ratio within bounds. Of the policy to the reference or to the recorded behavior μ it corrects
for the distance of the policy; "mismatch" is π_old/μ, the trainer's log-probs when the batch was drawn to
those of the sampler, and corrects for what objectives with `ratio = "old"` leave out: another engine, another
precision, staleness. The rule "truncate" clamps the ratio (TIS); "mask" makes it 0 outside the bounds (MIS,
IcePop).

Masked tokens stay in every denominator: a mean is over all tokens of the response, or of the step. So a
masked token adds what a token of ratio 0 adds, nothing, the others count as much as they do without it, and
the estimate stays that of E_μ[w g 1{within bounds}]. Divided by the kept tokens alone, the step would grow as
more are masked, and a response's tokens would weigh more the more of them are wrong.

A baseline of a group is what its R are compared with. Every mean Σ_j c_j R_j with weights c_j ≥ 0 that don't
read rewards leaves π* the only stationary point of a table, with noisy rewards too; where responses share
parameters, a weight may add others. The least variance has c ∝ w g, g the squared norm of ∇log π (Greensmith
et al., JMLR 2004), for which Σ_t (1 − π_t)² stands. A baseline lowered by a constant pulls towards who wrote
the responses. See docs/guide/concepts.md.

Here too are the ratios of the trained policy to what the samples were drawn from.

A KL term in the loss is, token by token, β times an estimate of KL(π ‖ π_ref) at each token. With d = log π −
log π_ref of a token, k3 = exp(−d) − 1 + d, k2 = d²/2 (Schulman 2020). Only their gradient matters here: on
samples of the policy that of k2 is ∇KL(π ‖ π_ref) and that of k3 is ∇KL(π_ref ‖ π), after the sampled
prefixes. `unbiased_kl` multiplies the estimate by the token's ratio w = π/μ, gradient included
(DeepSeek-V3.2, arXiv 2512.02556, eq. 7): then the gradient of w k3 is w d, and the mean of w k3 and its
gradient are KL(π ‖ π_ref) and ∇KL(π ‖ π_ref) for samples of any policy μ. Neither is clipped, and correction
weights don't apply to it, as in TRL and verl. It is averaged over tokens as the objective's own terms.

A share of imitation is −log π of the better responses, mean over all their tokens. Which responses these are
depends on rewards and judgments alone, so no row's gradient depends on another row's log-probs. Of rewards
they are the best of n (RAFT, arXiv 2304.06767), of judged pairs the winners (RPO, arXiv 2404.19733).
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
    """[B,T] the same for "token"; for "sequence" and "mean" that of the token's response."""
    if level == "token":
        return log_ratio_BT
    return groups.at_tokens(groups.over_tokens(log_ratio_BT, "sum" if level == "sequence" else "token"))


Kind = Annotated[
    Literal["none", "reference", "behavior", "mismatch"],
    Option(
        "of each response's or token's part of the gradient: 1, or within bounds π/π_ref, π/μ or π_old/μ, μ "
        "being the recorded behavior and π_old the policy when the batch was drawn",
        needs={
            "reference": (REF_LOGP,),
            "behavior": (BEHAVIOR_LOGP,),
            "mismatch": (BEHAVIOR_LOGP, DRAWN_LOGP),
        },
    ),
]
WeightMax = Annotated[float | None, Option("largest weight; no bound where it is None", "ratio", gt=0)]
WeightMin = Annotated[float, Option("smallest weight, or ratio that isn't masked", "ratio", ge=0)]
WeightLevel = Annotated[
    Literal["sequence", "token", "mean"],
    Option("the ratio of the response, of each token, or the geometric mean of those of the response"),
]
Rule = Annotated[
    Literal["truncate", "mask"], Option("a ratio outside the bounds becomes the bound, or the weight 0")
]
Power = Annotated[
    float, Option("of the ratio, before it is bounded: 0.5 is its root", "exponent", gt=0, le=1)
]
WeightBaseline = Annotated[
    Literal["mean", "optimal"],
    Option(
        "what the R of a group are compared with: their mean, or the mean of nearly least variance, by w Σ_t "
        "(1 − π_t)²"
    ),
]
MEASURED = "measured"  # in place of a shift: what a run measures, falling to 0 over its steps
Shift = Annotated[
    float | Literal["measured"],
    Option(
        "how far the baseline is lowered, so that all responses are pushed up; 'measured': by how much the "
        "log's mean reward is above the start's on held-out prompts, where that exceeds two standard "
        "errors, falling to 0 over the phase",
        "reward",
        ge=0,
    ),
]
Normalize = Annotated[
    Literal["none", "group"],
    Option(
        "'group': the ratios of a group are divided by its largest one where that is below 1, so that a "
        "group which became improbable as a whole can come back"
    ),
]


class Weight(Ingredient):
    """The gradient times a constant weight of each token."""

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
    """What the R of a group are compared with, for objectives whose gradients sum to 0 in it.

    Entries list it before the weight, whose multiplication it allows for.
    """

    options: ClassVar = {"weight_baseline": (WeightBaseline, "mean")}
    # What doesn't compare the R of complete responses in a group has another value.
    rules: ClassVar = only_with(
        "weight_baseline",
        ("optimal",),
        weight_level=("sequence",),
        baseline=("others",),
        average=("sum",),
        regularizer=("sequence",),
        normalize=(False,),
    )
    judged: bool = False  # whether a group's responses are those of judged pairs alone

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        if options["weight_baseline"] == "mean":
            return gradient
        groups, weight_BT = Groups.of(batch), weights(options, logp_BT, batch)
        compared_N = torch.ones_like(groups.group, dtype=torch.float64)  # 0 of a response in no pair
        if self.judged:
            pairs = Pairs.of(batch)
            in_pair = torch.cat([pairs.winner, pairs.loser])
            compared_N = torch.zeros_like(compared_N).index_fill(0, in_pair, 1.0)
        weight_BT = weight_BT * groups.at_tokens(compared_N)
        # The gradient of R̄ − R_i times a constant of the group: its mean is how far the baseline is below R̄.
        share_N = groups.mean_tokens(weight_BT) * squared_norm(groups, logp_BT.detach())
        excess_G = groups.weighted_mean(groups.mean_tokens(gradient.logp_BT), share_N)
        excess_BT = groups.at_tokens(compared_N * excess_G[groups.group])
        return replace(gradient, logp_BT=gradient.logp_BT - torch.where(batch.mask, excess_BT, 0.0))


class BaselineShift(Ingredient):
    """A baseline that is lower by s: −s w ∇log π more of each response, the mean over responses and groups.

    Towards the log's author μ the reward rises by E_μ r − E_π r a share of μ, which a mean of μ's own
    responses doesn't tell. Entries list it before the weight, after the baseline.
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
    """[B,T] the weight of each token, of its response but with `weight_level` "token"; 1 without a weight."""
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
    """[N] Σ_t (1 − π_t)², which stands for that of a response's ∇log π."""
    return groups.sum_tokens((1.0 - logp_BT.exp()).square())


Estimate = Annotated[Literal["k3", "k2"], Option("the estimate of a token's KL to the reference")]
Unbiased = Annotated[
    bool, Option("multiply the estimate by the token's ratio to what sampled it, gradient included")
]


class KLTerm(Ingredient):
    """Adds β times the estimate, averaged over tokens, to the loss."""

    options: ClassVar = {"beta": (Beta, 0.0), "kl": (Estimate, "k3"), "unbiased_kl": (Unbiased, False)}

    def needs(self, options: Options) -> set[Need]:
        """The reference's log-probs unless β is 0, and what the ratio is to: the recorded behavior where an
        objective has no `ratio`."""
        needs = super().needs(options)
        if needs and options["unbiased_kl"]:
            needs.update(needed_by({"ratio": (Ratio, "behavior")}, options))
        return needs

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        beta, now = float(options["beta"]), {"logp": logp_BT.detach()}
        if beta == 0:
            return gradient
        d_BT = log_ratio(now, batch, "reference")
        kl_BT, slope_BT = d_BT.square() / 2, d_BT
        if options["kl"] == "k3":
            kl_BT, slope_BT = k3(d_BT), -(-d_BT).expm1()
        if options["unbiased_kl"]:
            w_BT = log_ratio(now, batch, options.get("ratio", "behavior")).exp()
            kl_BT, slope_BT = w_BT * kl_BT, w_BT * (d_BT if options["kl"] == "k3" else d_BT + kl_BT)
        groups, average = Groups.of(batch), options.get("average", "response")
        # The slopes are written out: of w k3, automatic differentiation would subtract huge numbers.
        loss, surrogate = (beta * average_tokens(groups, x, average) for x in (kl_BT, slope_BT * logp_BT))
        (grad_BT,) = torch.autograd.grad(surrogate, [logp_BT])
        return replace(
            gradient, loss=gradient.loss + float(loss), logp_BT=gradient.logp_BT + masked(batch, grad_BT)
        )


KL_TERM = KLTerm()


Share = Annotated[
    float,
    Option(
        "of imitation in the loss: times −log π, mean over all tokens of the best responses of each group "
        "whose rewards differ, or of the winners of judged pairs",
        "loss per nat",
        ge=0,
    ),
]


@dataclass(frozen=True)
class Imitation(Ingredient):
    """Adds the share to the loss. A weight w counts the rows of a group w times."""

    options: ClassVar = {"imitation": (Share, 0.0)}
    metrics: ClassVar = ("imitation_loss",)
    winners: bool = False  # of judged pairs, whatever the rewards

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        """Adds the metric `imitation_loss` as well: NaN where nothing is imitated."""
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
