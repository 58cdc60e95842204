"""A KL term in an objective's loss, token by token: β times an estimate of KL(π ‖ π_ref) at each token.

With d = log π − log π_ref of a token, k3 = exp(−d) − 1 + d, k2 = d²/2 (Schulman 2020). Only their gradient
matters here: on samples of the policy that of k2 is ∇KL(π ‖ π_ref) and that of k3 is ∇KL(π_ref ‖ π), after
the sampled prefixes. `unbiased_kl` multiplies the estimate by the token's ratio w = π/μ, gradient included
(DeepSeek-V3.2, arXiv 2512.02556, eq. 7): then the gradient of w k3 is w d, and the mean of w k3 and its
gradient are KL(π ‖ π_ref) and ∇KL(π ‖ π_ref) for samples of any policy μ. Neither is clipped, and correction
weights don't apply to it, as in TRL and verl. It is averaged over tokens as the objective's own terms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch

from agro.objectives import weights
from agro.objectives.core import Gradient, Ingredient, Options, masked
from agro.objectives.needs import REF_LOGP, Need
from agro.objectives.options import Beta, Option
from agro.objectives.reduce import Groups, average_tokens
from agro.types import Batch, Tensor

Estimate = Annotated[Literal["k3", "k2"], Option("the estimate of a token's KL to the reference")]
Unbiased = Annotated[
    bool, Option("multiply the estimate by the token's ratio to what sampled it, gradient included")
]


class KLTerm(Ingredient):
    """Adds β times the estimate, averaged over tokens, to the loss."""

    options: ClassVar = {"beta": (Beta, 0.0), "kl": (Estimate, "k3"), "unbiased_kl": (Unbiased, False)}

    def needs(self, options: Options) -> set[Need]:
        """The reference's log-probs unless β is 0, and what the ratio is to."""
        if options["beta"] == 0:
            return set()
        return {REF_LOGP, weights.needed(_with_ratio(options))} if options["unbiased_kl"] else {REF_LOGP}

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        if options["beta"] == 0:
            return gradient
        loss, surrogate = kl_term(options, logp_BT, batch)
        (slope_BT,) = torch.autograd.grad(surrogate, [logp_BT])
        return replace(
            gradient, loss=gradient.loss + float(loss), logp_BT=gradient.logp_BT + masked(batch, slope_BT)
        )


KL_TERM = KLTerm()


def kl_term(options: Options, logp_BT: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """What it adds to the loss, and what has its gradient.

    The slopes are written out: of w k3, automatic differentiation would subtract huge numbers.
    """
    assert batch.ref_logp is not None
    d_BT = torch.where(batch.mask, logp_BT.detach() - batch.ref_logp, 0.0)
    kl_BT, slope_BT = d_BT.square() / 2, d_BT
    if options["kl"] == "k3":
        kl_BT, slope_BT = (-d_BT).exp() - 1 + d_BT, -(-d_BT).expm1()
    if options["unbiased_kl"]:
        w_BT = weights.log_ratio({"logp": logp_BT.detach()}, batch, _with_ratio(options)["ratio"]).exp()
        kl_BT, slope_BT = w_BT * kl_BT, w_BT * (d_BT if options["kl"] == "k3" else d_BT + kl_BT)
    groups, average = Groups.of(batch), options.get("average", "response")
    beta = float(options["beta"])
    loss, surrogate = (average_tokens(groups, x, average) for x in (kl_BT, slope_BT * logp_BT))
    return beta * loss, beta * surrogate


def _with_ratio(options: Options) -> dict[str, Any]:
    """Objectives without the option have ratios to the recorded behavior."""
    return {"ratio": "behavior", **options}
