"""See `independent.base`."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, fsum

from independent.base import Case, Pair, Place, Response, Result, clipped, over_tokens, power

# (the log-ratios o - b of a response by place, its place) -> the weight
Weight = Callable[[dict[Place, float], Place], float]


def _corrected(case: Case, weight: Weight) -> Result:
    """-min(u A, clamp(u, 0.8, 1.2) A), u = exp(l - o); its slope, -u A or 0, times a weight of o - b."""

    def token(A: float, y: Response, place: Place) -> Pair:
        term, slope = clipped(case.ratio(place, "old"), A, 0.8, 1.2)
        logs = {p: float(case.old_logp[p]) - float(case.behavior_logp[p]) for p in y.places}
        return term, slope * weight(logs, place)

    return over_tokens(case, token, True, "response")


def tis(case: Case) -> Result:
    """min(κ, 2) of a token."""
    return _corrected(case, lambda logs, place: min(exp(logs[place]), 2.0))


def mis(case: Case) -> Result:
    """κ of the response up to 3, else 0."""

    def up_to_3(logs: dict[Place, float], _: Place) -> float:
        w = power(fsum(logs.values()))
        return w if w <= 3.0 else 0.0

    return _corrected(case, up_to_3)


def icepop(case: Case) -> Result:
    """κ of a token from 0.5 to 5, else 0."""
    return _corrected(case, lambda logs, place: exp(logs[place]) if 0.5 <= exp(logs[place]) <= 5.0 else 0.0)


def decoupled_ppo(case: Case) -> Result:
    """κ of a token."""
    return _corrected(case, lambda logs, place: exp(logs[place]))
