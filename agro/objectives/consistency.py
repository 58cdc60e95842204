"""Generation consistency (AGRO, arXiv 2503.19612): r − β log π*/π_ref is the same for every response to a prompt.

With R_i = r_i − β ρ_i, ρ_i = Σ_t log π(y_t) − log π_ref(y_t): the regularised reward of response i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agro.errors import Refused
from agro.objectives.core import Streams, Terms
from agro.objectives.reduce import Groups, in_several_rows
from agro.types import Batch


def regularised_reward(
    streams: Streams, batch: Batch, groups: Groups, beta: float, average: str = "sum"
) -> Tensor:
    """[N] R_i = r_i − β ρ_i, ρ_i the sum of the log-ratio's tokens or their mean. At β = 0 the reference isn't read."""
    if beta == 0:
        return groups.reward
    assert batch.ref_logp is not None
    return groups.reward - beta * groups.over_tokens(streams["logp"] - batch.ref_logp, average)


def reference_weight(streams: Streams, batch: Batch, groups: Groups) -> Tensor:
    """[N] min(1, π/π_ref) of each response, without gradient: what the policy no longer writes teaches less."""
    assert batch.ref_logp is not None
    ratio = groups.sum_tokens(streams["logp"] - batch.ref_logp).detach()
    return ratio.clamp(max=0.0).exp()


def agro(
    streams: Streams, batch: Batch, *, beta: float, scale: str, average: str, regulariser: str, weight: str
) -> Terms:
    """½ Var over the group of R (AGRO statement 4, estimator of eq. 4): right for responses of any origin.

    scale "loss": the loss's own gradient, −(β/n)(R_i − R̄_{-i}) ∇log π(y_i); "reward": the same divided by β, which
    at β = 0 is RLOO. average "token" takes the mean of a response's token log-ratios and not their sum, in R and so in
    the gradient (1/T_i of each token's); β then keeps its size for longer responses, and the optimum is another:
    π_ref exp(T r/β) / Z where all lengths are T.

    regulariser: how the pull to the reference, E_π[ρ ∇log π], is estimated (section 6). "sequence" is eq. 4 and right on
    any data. The others leave out or integrate what has zero mean on the policy's own fresh samples, and there alone.
    "triangular": Σ_t (Σ_{s≥t} ρ_s) ∇log π_t. "local": Σ_t [∇KL_t + (Σ_{s>t} KL_s) ∇log π_t], KL_t over the vocabulary.

    weight "reference": each response's part of the gradient is multiplied by min(1, π/π_ref) of that response, a
    constant (reproductions/offline). A tabular policy whose data cover all responses still has π* as its only stationary
    point, since the weight depends on the response and the policy alone. It stops the push on responses that
    the policy has all but stopped writing. The ratio is of the whole response, so on very long ones the weight can
    underflow to 0. The loss stays ½ Var(R), which is no longer what the gradient is of.
    """
    groups = Groups.of(batch)
    R = regularised_reward(streams, batch, groups, beta, average)
    loss = groups.average(0.5 * groups.variance(R))
    if weight == "reference":
        w = reference_weight(streams, batch, groups)
        residual = (R - groups.mean_others(R)).detach() * (beta if scale == "loss" else 1.0)
        weighted = groups.average_responses(-w * residual * groups.over_tokens(streams["logp"], average))
        return Terms(loss, weighted, {"consistency": loss, "weight_mean": groups.average_responses(w)})
    surrogate = None
    if regulariser != "sequence":
        r = groups.reward
        gain = groups.average_responses(-(r - groups.mean_others(r)) * groups.sum_tokens(streams["logp"]))
        surrogate = gain + beta * groups.average_responses(
            groups.sum_tokens(_token_pull(streams, batch, regulariser))
        )
        surrogate = surrogate * (beta if scale == "loss" else 1.0)
    elif scale == "reward":
        advantage = (R - groups.mean_others(R)).detach()
        surrogate = groups.average_responses(-advantage * groups.over_tokens(streams["logp"], average))
    elif not loss.requires_grad:  # β = 0: the loss doesn't depend on the policy, its gradient is zero
        surrogate = 0.0 * streams["logp"].sum()
    return Terms(loss, surrogate, {"consistency": loss})


def _token_pull(streams: Streams, batch: Batch, regulariser: str) -> Tensor:
    """[B,T] a surrogate of the pull to the reference, token by token."""
    _check_one_row_each(batch, "agro", "regulariser", regulariser)
    if regulariser == "local":
        kl = streams["kl"]
        return kl + (_from_here_on(kl) - kl).detach() * streams["logp"]
    assert batch.ref_logp is not None
    ratio = torch.where(batch.mask, streams["logp"] - batch.ref_logp, 0.0)
    return _from_here_on(ratio).detach() * streams["logp"]


def _check_one_row_each(batch: Batch, name: str, option: str, value: str) -> None:
    if split := in_several_rows(batch):
        raise Refused(
            f'objective {name}: {option} = "{value}" looks along a response, but that of {split} lies in several rows; take "sequence"'
        )


def _from_here_on(x: Tensor) -> Tensor:
    """[B,T] Σ_{s≥t} x_s."""
    return x.flip(1).cumsum(1).flip(1)


def agro_onpolicy(
    streams: Streams,
    batch: Batch,
    *,
    beta: float,
    baseline: bool,
    likelihood_ratio: float | str,
    squared: str,
) -> Terms:
    """On-policy AGRO (eqs. 5 and 6): (1/n) Σ_i [−β (R_i − R̄_{-i}) + c ½ (R_i − R̄_{-i})²] log π(y_i), on fresh samples.

    The first part is the pathwise one (`agro`), the second the likelihood-ratio part, whose share c is
    `likelihood_ratio`: 1 is the paper's loss. With `baseline` the second part is centred by the others' mean: lower
    variance, some bias.

    Every deterministic policy minimises the on-policy loss too, and with c = 1 descent from π_ref goes to one where the
    third central moment μ₃ of r is above 2β Var r (0/1 rewards of success rate p: where β < ½ − p): there the
    second part pushes good responses down harder than the first pushes them up. "adaptive" lets c be in each group
    min(1, β / max_i (R_i − R̄_{-i})): the weight of a response then falls with its R, so that no response of above-average
    R is pushed down. π* is stationary for every c, and near it c = 1 (derivation: reproductions/trap).

    The metric `trap_ratio` is μ₃/(2β Var) of R, which at π_ref is r: above 1/c the step lowers E R to first order.

    squared: how the part with ρ² of the second one, ½ β² E_π[ρ² ∇log π], is estimated (appendix B.3). "sequence" as it
    stands; "triangular" leaves out, at each token, the square of what came before it, which has zero mean;
    "local" besides takes exact KLs for the log-ratios after the token where they meet those before it.
    """
    groups = Groups.of(batch)
    R = regularised_reward(streams, batch, groups, beta)
    advantage = (R - groups.mean_others(R)).detach()
    v = 0.5 * advantage.square()
    if baseline:
        v = v - groups.mean_others(v)
    best = groups.largest(advantage)
    if likelihood_ratio == "adaptive":
        c = beta / best.clamp(min=beta or torch.finfo(best.dtype).tiny)
    else:
        c = torch.full_like(best, float(likelihood_ratio))
    weight = (c[groups.group] * v - beta * advantage).detach()
    surrogate = groups.average_responses(weight * groups.sum_tokens(streams["logp"]))
    if squared != "sequence" and beta:
        less = groups.sum_tokens(_less_of_square(streams, batch, squared))
        surrogate = surrogate + c[0] * 0.5 * beta**2 * groups.average_responses(less)
    loss = groups.average(0.5 * groups.variance(R))
    differs = groups.weight * (groups.largest(groups.reward) > -groups.largest(-groups.reward))
    metrics = {
        "consistency": loss,
        "likelihood_ratio": groups.average(c),
        # Of the groups whose rewards differ, those whose best response is pushed down; NaN where there are none.
        "reversed_share": (differs * (c * best > 2 * beta)).sum() / differs.sum(),
        "trap_ratio": _trap_ratio(groups, R, beta),
    }
    return Terms(loss, surrogate, metrics)


def _less_of_square(streams: Streams, batch: Batch, squared: str) -> Tensor:
    """[B,T] a surrogate of what statement 21 has in place of ρ² ∇log π, less this, token by token.

    With a_t = Σ_{s<t} ρ_s and b_t = Σ_{s≥t} ρ_s: ρ² = (a_t + b_t)², of which a_t² falls away. In 2 a_t b_t the ρ_s after t
    may be KL_s.
    """
    _check_one_row_each(batch, "agro_onpolicy", "squared", squared)
    assert batch.ref_logp is not None
    ratio = torch.where(batch.mask, streams["logp"] - batch.ref_logp, 0.0).detach()
    later = _from_here_on(ratio)
    before = later[:, :1] - later
    less = -before.square()
    if squared == "local":
        kl = streams["kl"].detach()
        less = less + 2 * before * ((_from_here_on(kl) - kl) - (later - ratio))
    return less * streams["logp"]


def _trap_ratio(groups: Groups, R: Tensor, beta: float) -> Tensor:
    """[] Σ k₃ / (2β Σ k₂) over the groups of three or more; NaN where there are none that differ, and at β = 0.

    k₂ and k₃ are a group's unbiased estimates of Var R and μ₃. Of few responses their ratio says little, and a pair is
    always symmetric; the sums over groups estimate E_x μ₃ and E_x Var. Groups of equal R belong to both and add nothing.
    """
    n, off = groups.n, R - groups.mean(R)
    third = n * groups.sum(off**3) / ((n - 1) * (n - 2)).clamp(min=1)
    weight = groups.weight * (n > 2)
    below = 2 * beta * (weight * groups.variance(R)).sum()
    return torch.where(below > 0, (weight * third).sum() / below, torch.nan)


def squared_consistency(
    streams: Streams,
    batch: Batch,
    *,
    beta: float,
    anchor: str,
    baseline: str,
    value_beta: float | None,
    scale: str,
) -> Terms:
    """Σ_i (r_i − β e_i − b)² in a group, e_i = Σ_t log π − log anchor: what several methods share, each with its own parts.

    anchor: π_ref, or the behaviour that the samples were drawn from; the optimum is anchor · exp(r/β) / Z. b: the group's
    mean of r_i − β e_i, or its soft maximum of r, β₁ log mean exp(r/β₁), or a "stored" one, `extra["stored_value"]` [B]: the
    soft maximum over samples of the anchor that were made before, which lets a group have one response. scale multiplies
    the sum: "half_variance" 1/(2(n−1)), "square" 1/n, "pairs" n/(n−1), "trajectory" 1/(n β²).

    GVPO (arXiv 2504.19599): behaviour, mean, half_variance. VarGrad, trajectory balance (arXiv 2503.18929): reference,
    mean, trajectory. CoPG with n samples: reference, mean, pairs. OAPL: behaviour, soft, square. A*PO (arXiv 2505.20686):
    reference, stored, square. AGRO itself: reference, mean, half_variance.
    """
    groups = Groups.of(batch)
    anchored = batch.ref_logp if anchor == "reference" else batch.behavior_logp
    assert anchored is not None
    u = groups.reward - beta * groups.sum_tokens(streams["logp"] - anchored)
    if baseline == "mean":
        off = u - groups.mean(u)
    elif baseline == "soft":
        off = u - groups.soft_maximum(groups.reward, value_beta or beta)
    else:
        off = u - batch.extra["stored_value"].double()[groups.first_row]
    n = groups.n.to(u.dtype)
    factor = {
        "half_variance": 0.5 / (n - 1),
        "square": 1.0 / n,
        "pairs": n / (n - 1),
        "trajectory": 1.0 / (n * beta**2),
    }[scale]
    loss = groups.average(factor * groups.sum(off.square()))
    several = groups.n > 1
    variance = torch.where(several, groups.variance(u), 0.0)  # of one response there is none
    share = groups.average(several.double())
    return Terms(loss, metrics={"consistency": groups.average(0.5 * variance) / share})
