"""Generation consistency (AGRO, arXiv 2503.19612): r − β log π*/π_ref is the same for every response to a prompt.

With R_i = r_i − β ρ_i, ρ_i = Σ_t log π(y_t) − log π_ref(y_t): the regularised reward of response i.
"""

from __future__ import annotations

from torch import Tensor

from agro.objectives.core import Streams, Terms
from agro.objectives.reduce import Groups
from agro.types import Batch


def regularised_reward(streams: Streams, batch: Batch, groups: Groups, beta: float) -> Tensor:
    """[N] R_i = r_i − β ρ_i. At β = 0 the reference isn't read."""
    if beta == 0:
        return groups.reward
    assert batch.ref_logp is not None
    return groups.reward - beta * groups.sum_tokens(streams["logp"] - batch.ref_logp)


def agro(streams: Streams, batch: Batch, *, beta: float, scale: str) -> Terms:
    """½ Var over the group of R (AGRO statement 4, estimator of eq. 4): right for responses of any origin.

    scale "loss": the loss's own gradient, −(β/n)(R_i − R̄_{-i}) ∇log π(y_i); "reward": the same divided by β, which
    at β = 0 is RLOO.
    """
    groups = Groups.of(batch)
    R = regularised_reward(streams, batch, groups, beta)
    loss = groups.average(0.5 * groups.variance(R))
    surrogate = None
    if scale == "reward":
        advantage = (R - groups.mean_others(R)).detach()
        surrogate = groups.average_responses(-advantage * groups.sum_tokens(streams["logp"]))
    elif not loss.requires_grad:  # β = 0: the loss doesn't depend on the policy, its gradient is zero
        surrogate = 0.0 * streams["logp"].sum()
    return Terms(loss, surrogate, {"consistency": loss})


def agro_onpolicy(streams: Streams, batch: Batch, *, beta: float, baseline: bool) -> Terms:
    """The same loss under μ = π, the gradient through the sampling included (AGRO eqs. 5 and 6, Proposition 4).

    (1/n) Σ_i [−β (R_i − R̄_{-i}) + ½ (R_i − R̄_{-i})²] ∇log π(y_i); with `baseline`, v_i = ½ (R_i − R̄_{-i})² is
    replaced by v_i − v̄_{-i}: lower variance, some bias.
    """
    groups = Groups.of(batch)
    R = regularised_reward(streams, batch, groups, beta)
    advantage = (R - groups.mean_others(R)).detach()
    v = 0.5 * advantage.square()
    if baseline:
        v = v - groups.mean_others(v)
    surrogate = groups.average_responses((v - beta * advantage) * groups.sum_tokens(streams["logp"]))
    loss = groups.average(0.5 * groups.variance(R))
    return Terms(loss, surrogate, {"consistency": loss})
