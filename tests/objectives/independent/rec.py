"""See `independent.base`."""

from __future__ import annotations

from math import exp

from independent.base import Case, Response, Result
from independent.truncated import Pair, Place, log_ratio, over_all_tokens, power, weighed


def rec(
    case: Case,
    mask: str = "none",
    token_weight: str = "none",
    clip: Pair = (0.2, 0.2),
    ring: Pair = (0.6, 2.0),
    advantage: str = "mean",
) -> Result:
    """−k A l; k = 0 where masked, else 1 or exp(l − b)."""

    def k(y: Response, place: Place, a: float) -> float:
        if mask == "none" and token_weight == "none":
            return 1.0
        w = power(log_ratio(case, place))
        one = (a >= 0 and w <= 1 + clip[1]) or (a <= 0 and w >= 1 - clip[0])
        two = 1 - clip[0] <= w <= 1 + clip[1]
        again = (a >= 0 and w <= 1 - ring[0]) or (a <= 0 and w >= 1 + ring[1])
        kept = {"none": True, "one_side": one, "two_side": two, "ring": two or again}[mask]
        return (w if token_weight == "is" else 1.0) if kept else 0.0

    return weighed(case, advantage, k)


def rec_one_side(case: Case) -> Result:
    """k = 1 but where A > 0 and w > 1.2, or A < 0 and w < 0.8."""

    def k(y: Response, place: Place, a: float) -> float:
        w = power(log_ratio(case, place))
        return float(not ((a > 0 and w > 1.2) or (a < 0 and w < 0.8)))

    return weighed(case, "mean", k)


def rec_two_side(case: Case) -> Result:
    """k = 1 where 0.8 ≤ w ≤ 1.2."""
    return weighed(case, "mean", lambda y, p, a: float(0.8 <= power(log_ratio(case, p)) <= 1.2))


def rec_ring(case: Case) -> Result:
    """k = 1 there, and where A > 0 and w ≤ 0.4, or A < 0 and w ≥ 3."""

    def k(y: Response, place: Place, a: float) -> float:
        w = power(log_ratio(case, place))
        return float(0.8 <= w <= 1.2 or (a > 0 and w <= 0.4) or (a < 0 and w >= 3))

    return weighed(case, "mean", k)


def red_weight(case: Case, temperature: float = 1.0) -> Result:
    """k = exp(A/T)."""
    return weighed(case, "mean", lambda y, p, a: exp(a / temperature))


def red_drop(case: Case) -> Result:
    """k = 1, and A the mean over all drops."""
    return weighed(case, "red_drop", lambda y, p, a: 1.0)


def reinforce_pp(case: Case, advantage: str = "reinforce_pp") -> Result:
    """The gradient of −min(w A, clamp(w, 0.8, 1.2) A) is −w A where that is the first, else 0."""

    def term(y: Response, place: Place, a: float) -> Pair:
        w = power(log_ratio(case, place))
        k = w if w * a <= min(max(w, 0.8), 1.2) * a else 0.0
        return -k * a * float(case.logp[place]), -k * a

    return over_all_tokens(case, advantage, term)


def gdpo(case: Case) -> Result:
    return reinforce_pp(case, "gdpo")
