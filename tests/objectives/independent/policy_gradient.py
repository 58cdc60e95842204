"""See `independent.base`."""

from __future__ import annotations

from math import exp, fsum

import numpy as np

from independent.advantages import advantages
from independent.base import (
    Case,
    Found,
    Pair,
    Place,
    Response,
    Result,
    averaged,
    less_baseline,
    power,
    regularized,
    shares,
)


def rloo(case: Case, beta: float = 0.0, baseline: str = "others", normalize: bool = False) -> Result:
    """-(1/n) Σ_i (a_i - b_i) l_i, where a_i = r_i - β (l_i - f_i) is a number, not a function of l; for b_i
    see `less_baseline`. Normalized: minus their mean, over their standard deviation, 1e-4 or more, both
    weighted, with n - 1 for the number of responses."""
    groups = case.groups(2 if baseline == "others" else 1)
    every = [regularized(case, g, beta) for g in groups]
    offs = [less_baseline(case, groups, at, every, baseline) for at in range(len(groups))]
    if normalize:
        flat = [(g.weight, a) for g, off in zip(groups, offs, strict=True) for a in off if g.weight > 0]
        total_weight = fsum(w for w, _ in flat)
        mean = fsum(w * a for w, a in flat) / total_weight
        variance = fsum(w * (a - mean) ** 2 for w, a in flat) / total_weight * len(flat) / (len(flat) - 1)
        offs = [[(a - mean) / max(variance**0.5, 1e-4) for a in off] for off in offs]
    return summed(case, list(zip(groups, offs, strict=True)))


def reinforce(case: Case, baseline: str | float = "none", shift: float = 0.0) -> Result:
    """-(1/n) Σ_i (A_i - shift) l_i; A is r, r minus the mean reward, a number or the stored value, or another
    advantage."""
    if baseline == "stored":
        return summed(case, [(g, [r - case.stored(g) for r in g.rewards]) for g in case.groups(1)], shift)
    if isinstance(baseline, str) and baseline != "none":
        return summed(case, advantages(case, baseline), shift)
    b = 0.0 if baseline == "none" else float(baseline)
    return summed(case, [(g, [r - b for r in g.rewards]) for g in case.groups(1)], shift)


def summed(case: Case, found: Found, shift: float = 0.0) -> Result:
    """-(1/n) Σ_i (A_i - shift) l_i."""

    def token(A: float, _: Response, place: Place) -> Pair:
        return -(A - shift) * float(case.logp[place]), -(A - shift)

    return averaged(case, found, 1.0, token)


def maxrl(case: Case) -> Result:
    """A = (r - r̄)/|r̄|."""
    return summed(case, advantages(case, "maxrl"))


def opo(case: Case) -> Result:
    """A = r - Σ T r / Σ T."""
    return summed(case, advantages(case, "opo"))


def asymre(case: Case) -> Result:
    """A = r - (r̄ - 0.1)."""
    return summed(case, advantages(case, "mean"), -0.1)


def kl_pg(case: Case, beta: float) -> Result:
    """[15]: -(1/n) Σ_i (r_i - r̄_{-i}) l_i + (β/n) Σ_i Σ_t KL_it; the second sum is a stream of its own."""
    loss, grads = summed(case, advantages(case, "others"))
    kl_grad = np.zeros(case.logp.shape)
    for place, share in shares(case.groups(2), 1.0).items():
        loss += share * beta * float(case.kl[place])
        kl_grad[place] = share * beta
    return loss, {**grads, "kl": kl_grad}


def topr(
    case: Case,
    baseline: float = 0.0,
    positive: Pair = (1.0, 1.0),
    negative: Pair = (0.0, 1.0),
    ratio: str = "sequence",
) -> Result:
    """-(r - b) mean_t k_t l_t.

    k is a number: exp of Σ (l - b), of its mean or of a token's, within the limits of r's sign.
    """

    def token(r: float, y: Response, place: Place) -> Pair:
        signal, whole = r - baseline, case.summed_log_ratio(y, "behavior")
        low, high = positive if signal > 0 else negative
        log_k = {"sequence": whole, "mean": whole / len(y.places), "token": case.log_ratio(place)}[ratio]
        k = min(max(power(log_k), low), high)
        return -signal * k * float(case.logp[place]), -signal * k

    return averaged(case, [(g, g.rewards) for g in case.groups(1)], "response", token)


def otb(case: Case) -> Result:
    """-(1/n) Σ_i Σ_t (r_i - b_t) l_it; b_t weighs rewards by Σ_{s≤t} (1 - 2π + π²/q)."""
    grad, loss = np.zeros(case.logp.shape), 0.0
    groups = case.groups(2)
    W = fsum(g.weight for g in groups)
    for g in groups:
        energies = []
        for y in g.responses:
            pi = [exp(float(case.logp[place])) for place in y.places]
            terms = [1 - 2 * p + p * p / float(case.proposal[at]) for p, at in zip(pi, y.places)]
            energies.append([fsum(terms[: t + 1]) for t in range(len(terms))])
        for y in g.responses:
            for t, place in enumerate(y.places):
                there = [(z.reward, e[t]) for z, e in zip(g.responses, energies) if t < len(e)]
                b = fsum(r * e for r, e in there) / fsum(e for _, e in there)
                A = y.reward - (b if len(there) > 1 else 0.0)
                grad[place] = -g.weight / W / len(g.responses) * A
                loss += grad[place] * float(case.logp[place])
    return loss, {"logp": grad, "proposal": np.zeros(case.logp.shape)}
