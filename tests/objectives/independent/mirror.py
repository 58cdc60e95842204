"""See `independent.base`."""

from __future__ import annotations

from math import exp, fsum, log

import numpy as np

from independent.advantages import mean_of
from independent.base import Case, Response, Result, groups_of
from independent.truncated import Pair, Place, log_ratio, over_all_tokens, power


def opmd(case: Case, tau: float = 1.0, form: str = "simple", baseline: str = "mean") -> Result:
    """−c (r − b) l, mean over all tokens. As b = r̄ + (b − r̄), it is that of r − r̄ plus c (b − r̄) l."""
    c = 1 / (1 + tau) if form == "simple" else 2 * tau / max(1.0, tau)
    beyond: dict[Place, float] = {}
    for g in groups_of(case, 2):
        r = [y.reward for y in g.responses]
        b = mean_of(r)
        if baseline == "soft":
            b = max(r) + tau * log(fsum(exp((x - max(r)) / tau) for x in r) / len(r))
        beyond |= {place: b - mean_of(r) for y in g.responses for place in y.places}

    def term(y: Response, place: Place, a: float) -> Pair:
        k = c * (a - beyond[place])
        return -k * float(case.logp[place]), -k

    return over_all_tokens(case, "mean", term)


def token_quadratic(
    case: Case, pull: float = 0.1, ratio: str = "behavior", advantage: str = "mean"
) -> Result:
    """−A l + ½ c e², e = l − b; the derivative is −A + c e."""

    def term(y: Response, place: Place, a: float) -> Pair:
        e = log_ratio(case, place, ratio)
        return -a * float(case.logp[place]) + 0.5 * pull * e * e, -a + pull * e

    return over_all_tokens(case, advantage, term)


def opmd_token(case: Case) -> Result:
    """−A l + 0.1 e²."""

    def term(y: Response, place: Place, a: float) -> Pair:
        e = log_ratio(case, place)
        return -a * float(case.logp[place]) + 0.1 * e * e, -a + 0.2 * e

    return over_all_tokens(case, "mean", term)


def mdpo(
    case: Case, step_size: float = 1.0, kl: str = "weighted", ratio: str = "behavior", advantage: str = "mean"
) -> Result:
    """−w A + (w e)/t or −w A + (½ e²)/t; d(w e)/dl = w (e + 1)."""

    def term(y: Response, place: Place, a: float) -> Pair:
        e = log_ratio(case, place, ratio)
        w = power(e)
        value, slope = (w * e, w * (e + 1)) if kl == "weighted" else (0.5 * e * e, e)
        return -w * a + value / step_size, -w * a + slope / step_size

    return over_all_tokens(case, advantage, term)


def props(case: Case, clip: float = 0.3) -> Result:
    """max(w, 1 - ε), w = exp(l - f), mean over all tokens; the slope is w where it is above 1 - ε, else 0."""
    every = [(g.weight, place) for g in groups_of(case, 1) for y in g.responses for place in y.places]
    W = fsum(weight for weight, _ in every)
    grad, loss = np.zeros(case.logp.shape), 0.0
    for weight, place in every:
        w = power(float(case.logp[place]) - float(case.ref_logp[place]))
        loss += weight / W * max(w, 1 - clip)
        grad[place] = weight / W * w if w > 1 - clip else 0.0
    return loss, {"logp": grad}
