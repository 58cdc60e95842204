"""BAPO (arXiv 2510.18927): bounds of the clip that are searched in each step, so that what pushes responses
up weighs enough beside what pushes others down.

A token with A > 0 adds |A| min(w, c_high) to P, one with A < 0 adds |A| max(w, c_low) to N. While P is too
small beside N, one bound after the other is raised by a step, up to its maximum. Both sums are over the
complete step, so rows are coupled by step; the bounds are constant in the gradient.

As the paper has it ("value"), raising c_low can't help: max(w, c_low) grows with c_low and so does N. Where
the start is below the target, c_low runs to its maximum. With the criterion "gradient" a sum counts only the
tokens that have a gradient, w ≤ c_high or w ≥ c_low, and raising c_low lowers N, which the paper intends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch

from agro.objectives.advantage import standardized
from agro.objectives.core import SINGLETONS, Objective, Options, Streams, Terms, coupling
from agro.objectives.imitation import IMITATION
from agro.objectives.methods.clipped import clipped_gain, floored_gain, limited, ratio_needs
from agro.objectives.needs import BEHAVIOR_LOGP
from agro.objectives.options import Option
from agro.objectives.reduce import Groups, token_mean
from agro.objectives.weights import WEIGHT, Ratio, log_ratio
from agro.types import Batch, Tensor

DUAL_CLIP = 3.0  # of the authors' code

Criterion = Annotated[
    Literal["value", "gradient"],
    Option("what a clipped token counts in the search: its clipped value, or nothing, as it has no gradient"),
]
Low = Annotated[
    tuple[float, float, float], Option("lower bound of the ratio: its start, maximum and step", "ratio", ge=0)
]
High = Annotated[
    tuple[float, float, float], Option("upper bound of the ratio: its start, maximum and step", "ratio", ge=0)
]


def bapo(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    criterion: Criterion = "value",
    target: Annotated[
        float,
        Option(
            "share of tokens with A > 0 in the loss, P/(P + N), that ends the search", "share", ge=0, lt=1
        ),
    ] = 0.4,
    low: Low = (0.6, 0.9, 0.02),
    high: High = (1.2, 3.0, 0.05),
) -> Terms:
    """BAPO as in the paper (arXiv 2510.18927, eqs. 7 to 9): −min(w A, clamp(w, c_low, c_high) A), c searched.

    P and N count each token by its probability under the recorded behavior. First c_high is raised, then
    c_low. A as in `grpo`; the mean over all tokens of the step. The authors' notes give the target as 0.4 and
    as 0.5.
    """
    assert batch.behavior_logp is not None
    probability_BT = torch.where(batch.mask, batch.behavior_logp, 0.0).exp()
    tokens = _Tokens.of(streams, batch, ratio, probability_BT)
    return tokens.terms(_Rule(criterion, target / (1 - target), low, high, ("high", "low")))


def bapo_code(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    criterion: Criterion = "value",
    target: Annotated[float, Option("P/N that ends the search", "ratio", ge=0)] = 0.5,
    low: Low = (0.8, 0.95, 0.05),
    high: High = (1.2, 2.0, 0.1),
) -> Terms:
    """BAPO as in the authors' code (github.com/WooooDyy/BAPO): max(min(w A, clamp(w, c_low, c_high) A), 3 A
    where A < 0), c searched.

    P and N count all tokens alike, the target is their ratio, and c_low is raised first, then c_high. The
    numbers are those of its script. A as in `grpo`; the mean over all tokens of the step.
    """
    tokens = _Tokens.of(streams, batch, ratio, torch.ones_like(batch.mask, dtype=torch.float64))
    return tokens.terms(_Rule(criterion, target, low, high, ("low", "high")), dual_clip=DUAL_CLIP)


@dataclass(frozen=True)
class _Rule:
    """How the bounds are searched; `low` and `high` are their starts, maxima and steps."""

    criterion: str
    odds: float  # P/N that ends the search
    low: tuple[float, float, float]
    high: tuple[float, float, float]
    order: tuple[str, str]  # which bound is raised first


@dataclass(frozen=True)
class _Tokens:
    """Ratios and advantages [B,T] of a step."""

    batch: Batch
    w: Tensor
    advantage: Tensor
    count: Tensor  # how much a token counts in the search; constant

    @classmethod
    def of(cls, streams: Streams, batch: Batch, ratio: str, count_BT: Tensor) -> _Tokens:
        groups = Groups.of(batch)
        w_BT = log_ratio(streams, batch, ratio).exp()
        weight_BT = torch.where(batch.mask, batch.weight.double()[:, None], 0.0)
        return cls(batch, w_BT, groups.at_tokens(standardized(groups)), weight_BT * count_BT)

    def search(self, rule: _Rule) -> tuple[float, float]:
        """c_low and c_high at which P ≥ odds · N, or the largest ones."""
        bounds = {"low": rule.low[0], "high": rule.high[0]}
        for name in rule.order:
            _, maximum, step = getattr(rule, name)
            while bounds[name] < maximum and self._is_short(rule, **bounds):
                bounds[name] = min(bounds[name] + step, maximum)
        return bounds["low"], bounds["high"]

    def _is_short(self, rule: _Rule, low: float, high: float) -> bool:
        """Whether P < odds · N."""
        w_BT = self.w.detach()
        up_BT, down_BT = w_BT.clamp(max=high), w_BT.clamp(min=low)
        if rule.criterion == "gradient":
            up_BT, down_BT = torch.where(w_BT <= high, w_BT, 0.0), torch.where(w_BT >= low, w_BT, 0.0)
        size_BT = self.count * self.advantage.abs()
        P = (size_BT * up_BT)[self.advantage > 0].sum()
        N = (size_BT * down_BT)[self.advantage < 0].sum()
        return bool(rule.odds * N > P)

    def terms(self, rule: _Rule, dual_clip: float | None = None) -> Terms:
        """PPO's clipped gain within the bounds that are found."""
        low, high = self.search(rule)
        gain_BT = clipped_gain(self.w, self.advantage, low, high)
        if dual_clip is not None:
            gain_BT = floored_gain(gain_BT, self.advantage, dual_clip)
        loss = token_mean(self.batch, -gain_BT)
        return limited(loss, self.batch, self.w * self.advantage != gain_BT, self.w)


def _conflict(options: Options) -> str:
    for name in ("low", "high"):
        start, maximum, step = options[name]
        if start > maximum or step <= 0:
            return (
                f"{name}: expected start, maximum and step, the start up to the maximum and the step above 0"
            )
    if options["low"][1] > options["high"][0]:
        return f"the lower bound may go to {options['low'][1]:g}, above the upper one, {options['high'][0]:g}"
    return ""


_entry = partial(
    Objective,
    couples=coupling("step"),
    excludes=_conflict,
    ingredients=(WEIGHT, IMITATION, SINGLETONS),
    metrics=("clipped_share", "ratio_max"),
)
ENTRIES: dict[str, Objective] = {
    "bapo": _entry(
        bapo,
        "BAPO, arXiv 2510.18927",
        lambda options: ratio_needs(options) | {BEHAVIOR_LOGP},
    ),
    "bapo_code": _entry(
        bapo_code,
        "BAPO, arXiv 2510.18927, the authors' code",
        ratio_needs,
    ),
}
