"""See `independent.base`. A weight without gradient is a number: of −k A l it leaves the derivative −k A."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, fsum, inf, log

from independent.advantages import advantages
from independent.base import (
    Case,
    Found,
    Pair,
    Place,
    Response,
    Result,
    Token,
    averaged,
    clipped,
    mean_of,
    power,
)


def over_all_tokens(case: Case, advantage: str, token: Token) -> Result:
    return averaged(case, advantages(case, advantage), "token", token)


def weighed(case: Case, advantage: str, weight: Callable[[float, Response, Place], float]) -> Result:
    """−k A l, k a number."""

    def token(A: float, y: Response, place: Place) -> Pair:
        k = weight(A, y, place)
        return -k * A * float(case.logp[place]), -k * A

    return over_all_tokens(case, advantage, token)


def cispo(
    case: Case, ratio: str = "behavior", clip: Pair = (1.0, 0.28), advantage: str = "standardized"
) -> Result:
    """k = clamp(exp(l − b), 1 − ε₁, 1 + ε₂)."""
    low, high = 1 - clip[0], 1 + clip[1]
    return weighed(case, advantage, lambda A, y, p: min(max(case.ratio(p, ratio), low), high))


def aipo(case: Case) -> Result:
    return cispo(case, clip=(1.0, 3.0), advantage="mean")


def minpro(
    case: Case,
    ratio: str = "behavior",
    clip: Pair = (1.0, 0.28),
    cap_at_one: bool = False,
) -> Result:
    """k_t = clamp(w_t times the least w_s before it); nothing before it counts as 1."""

    def weight(A: float, y: Response, place: Place) -> float:
        before = [case.log_ratio(p, ratio) for p in y.places if p[1] < place[1]]
        least = min(before, default=0.0)
        if cap_at_one:
            least = min(least, 0.0)
        return min(max(power(case.log_ratio(place, ratio) + least), 1 - clip[0]), 1 + clip[1])

    return weighed(case, "standardized", weight)


def vespo(
    case: Case,
    ratio: str = "behavior",
    positive: Pair = (2.0, 3.0),
    negative: Pair = (3.0, 2.0),
) -> Result:
    """k = exp(λ + k log W − λ W), log W = Σ_t (l_t − b_t)."""

    def weight(A: float, y: Response, place: Place) -> float:
        k, rate = positive if A >= 0 else negative
        log_w = case.summed_log_ratio(y, ratio)
        return exp(rate + k * log_w - rate * power(log_w))

    return weighed(case, "standardized", weight)


def m2po(case: Case, ratio: str = "behavior", budget: float = 0.04, tokens: str = "all") -> Result:
    """−w A where not masked, so the derivative is the same. Masked is from the first square on with which the
    mean is above the budget."""
    counted: list[tuple[float, float]] = []
    for g, A in advantages(case, "standardized"):
        for y, a in zip(g.responses, A):
            logs = [case.log_ratio(p, ratio) for p in y.places]
            counted += [(x * x, g.weight) for x in logs if tokens == "all" or x * a > 0]
    least = inf
    for candidate in sorted({v for v, _ in counted}):
        if tokens == "all":  # the mean up to it, which grows
            left = [(v, w) for v, w in counted if v <= candidate]
        else:  # with what is above it counted as it
            left = [(min(v, candidate), w) for v, w in counted]
        if fsum(v * w for v, w in left) > budget * fsum(w for _, w in left):
            least = candidate
            break

    def token(A: float, y: Response, place: Place) -> Pair:
        x = case.log_ratio(place, ratio)
        masked = (tokens == "all" or x * A > 0) and x * x >= least
        return (0.0, 0.0) if masked else (-power(x) * A, -power(x) * A)

    return over_all_tokens(case, "standardized", token)


def raft_pp(
    case: Case, ratio: str = "behavior", clip: Pair = (0.2, 0.2), least_reward: float | None = None
) -> Result:
    """−min(w, 1 + ε₂) of positive responses; its derivative is −w below, 0 above."""

    def positive(r: list[float]) -> list[float]:
        if least_reward is not None:
            return [float(x >= least_reward) for x in r]
        return [float(x == max(r) > min(r)) for x in r]

    def token(A: float, y: Response, place: Place) -> Pair:
        return clipped(case.ratio(place, ratio), A, 0.0, 1 + clip[1])

    groups = case.groups(2 if least_reward is None else 1)
    return averaged(case, [(g, positive(g.rewards)) for g in groups], "response", token)


def nested_reft(case: Case, mismatch: str = "is", retrace: float = 1.0) -> Result:
    """−w A, or −k A l with k = λ min(1, w)."""

    def token(A: float, y: Response, place: Place) -> Pair:
        w = case.ratio(place, "old" if mismatch == "ignore" else "behavior")
        if mismatch == "retrace":
            k = retrace * min(1.0, w)
            return -k * A * float(case.logp[place]), -k * A
        return -w * A, -w * A

    return averaged(case, advantages(case, "standardized"), "response", token)


def opmd(case: Case, tau: float = 1.0, form: str = "simple", baseline: str = "mean") -> Result:
    """−c (r − b) l, mean over all tokens. As b = r̄ + (b − r̄), it is that of r − r̄ plus c (b − r̄) l."""
    c = 1 / (1 + tau) if form == "simple" else 2 * tau / max(1.0, tau)
    beyond: dict[Place, float] = {}
    for g in case.groups(2):
        r = g.rewards
        b = mean_of(r)
        if baseline == "soft":
            b = max(r) + tau * log(fsum(exp((x - max(r)) / tau) for x in r) / len(r))
        beyond |= {place: b - mean_of(r) for y in g.responses for place in y.places}

    def token(A: float, y: Response, place: Place) -> Pair:
        k = c * (A - beyond[place])
        return -k * float(case.logp[place]), -k

    return over_all_tokens(case, "mean", token)


def token_quadratic(case: Case, pull: float = 0.1, ratio: str = "behavior") -> Result:
    """−A l + ½ c e², e = l − b; the derivative is −A + c e."""

    def token(A: float, y: Response, place: Place) -> Pair:
        e = case.log_ratio(place, ratio)
        return -A * float(case.logp[place]) + 0.5 * pull * e * e, -A + pull * e

    return over_all_tokens(case, "mean", token)


def opmd_token(case: Case) -> Result:
    return token_quadratic(case, pull=0.2)


def mdpo(case: Case, step_size: float = 1.0, kl: str = "weighted", ratio: str = "behavior") -> Result:
    """−w A + (w e)/t or −w A + (½ e²)/t; d(w e)/dl = w (e + 1)."""

    def token(A: float, y: Response, place: Place) -> Pair:
        e = case.log_ratio(place, ratio)
        w = power(e)
        value, slope = (w * e, w * (e + 1)) if kl == "weighted" else (0.5 * e * e, e)
        return -w * A + value / step_size, -w * A + slope / step_size

    return over_all_tokens(case, "mean", token)


def props(case: Case, clip: float = 0.3) -> Result:
    """max(w, 1 - ε), w = exp(l - f), mean over all tokens; the slope is w where it is above 1 - ε, else 0."""

    def token(_: float, y: Response, place: Place) -> Pair:
        w = case.ratio(place, "reference")
        return max(w, 1 - clip), w if w > 1 - clip else 0.0

    return averaged(case, [(g, g.rewards) for g in case.groups(1)], "token", token)


def rec(
    case: Case,
    mask: str = "none",
    token_weight: str = "none",
    clip: Pair = (0.2, 0.2),
    ring: Pair = (0.6, 2.0),
    advantage: str = "mean",
) -> Result:
    """−k A l; k = 0 where masked, else 1 or exp(l − b)."""

    def k(A: float, y: Response, place: Place) -> float:
        if mask == "none" and token_weight == "none":
            return 1.0
        w = case.ratio(place)
        one = (A >= 0 and w <= 1 + clip[1]) or (A <= 0 and w >= 1 - clip[0])
        two = 1 - clip[0] <= w <= 1 + clip[1]
        again = (A >= 0 and w <= 1 - ring[0]) or (A <= 0 and w >= 1 + ring[1])
        kept = {"none": True, "one_side": one, "two_side": two, "ring": two or again}[mask]
        return (w if token_weight == "is" else 1.0) if kept else 0.0

    return weighed(case, advantage, k)


def rec_one_side(case: Case) -> Result:
    """k = 1 but where A > 0 and w > 1.2, or A < 0 and w < 0.8."""

    def k(A: float, y: Response, place: Place) -> float:
        w = case.ratio(place)
        return float(not ((A > 0 and w > 1.2) or (A < 0 and w < 0.8)))

    return weighed(case, "mean", k)


def rec_two_side(case: Case) -> Result:
    return rec(case, mask="two_side")


def rec_ring(case: Case) -> Result:
    """k = 1 where 0.8 ≤ w ≤ 1.2, and where A > 0 and w ≤ 0.4, or A < 0 and w ≥ 3."""

    def k(A: float, y: Response, place: Place) -> float:
        w = case.ratio(place)
        return float(0.8 <= w <= 1.2 or (A > 0 and w <= 0.4) or (A < 0 and w >= 3))

    return weighed(case, "mean", k)


def red_weight(case: Case, temperature: float = 1.0) -> Result:
    """k = exp(A/T)."""
    return weighed(case, "mean", lambda A, y, p: exp(A / temperature))


def red_drop(case: Case) -> Result:
    return rec(case, advantage="red_drop")


def with_clipped_weights(case: Case, found: Found) -> Result:
    """The gradient of −min(w A, clamp(w, 0.8, 1.2) A) is −w A where that is the first, else 0."""

    def token(A: float, y: Response, place: Place) -> Pair:
        _, slope = clipped(case.ratio(place), A, 0.8, 1.2)
        return slope * float(case.logp[place]), slope

    return averaged(case, found, "token", token)


def reinforce_pp(case: Case) -> Result:
    return with_clipped_weights(case, advantages(case, "reinforce_pp"))


def gdpo(case: Case) -> Result:
    return with_clipped_weights(case, advantages(case, "gdpo"))
