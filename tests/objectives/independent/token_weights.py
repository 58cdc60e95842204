"""See `independent.base`. A weight without gradient is a number: of −k A l it leaves the derivative −k A."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, fsum, inf, log

import numpy as np

from independent.advantages import advantages, mean_of
from independent.base import Case, Response, Result, groups_of

Place = tuple[int, int]
Pair = tuple[float, float]


def log_ratio(case: Case, place: Place, ratio: str = "behavior") -> float:
    anchor = case.behavior_logp if ratio == "behavior" else case.old_logp
    return float(case.logp[place]) - float(anchor[place])


def power(x: float) -> float:
    return exp(min(x, 700.0))


def over_all_tokens(case: Case, advantage: str, term: Callable[[Response, Place, float], Pair]) -> Result:
    """The mean over all tokens, a row's weight times, of terms of (response, token, A): their value and their
    derivative in l."""
    grad, loss = np.zeros(case.logp.shape), 0.0
    found = advantages(case, advantage)
    W = fsum(g.weight * len(y.places) for g, _ in found for y in g.responses)
    for g, A in found:
        for y, a in zip(g.responses, A):
            for place in y.places:
                value, slope = term(y, place, a)
                loss += g.weight / W * value
                grad[place] = g.weight / W * slope
    return loss, {"logp": grad}


def in_responses(
    case: Case, found: list[tuple[object, list[float]]], term: Callable[[Place, float], Pair]
) -> Result:
    """The same, the mean in a response, in a group, over groups."""
    grad, loss = np.zeros(case.logp.shape), 0.0
    W = fsum(g.weight for g, _ in found)  # type: ignore[attr-defined]
    for g, A in found:
        for y, a in zip(g.responses, A):  # type: ignore[attr-defined]
            share = g.weight / W / len(A) / len(y.places)  # type: ignore[attr-defined]
            for place in y.places:
                value, slope = term(place, a)
                loss += share * value
                grad[place] = share * slope
    return loss, {"logp": grad}


def weighed(case: Case, advantage: str, weight: Callable[[Response, Place, float], float]) -> Result:
    """−k A l, k a number."""

    def term(y: Response, place: Place, a: float) -> Pair:
        k = weight(y, place, a)
        return -k * a * float(case.logp[place]), -k * a

    return over_all_tokens(case, advantage, term)


def cispo(
    case: Case, ratio: str = "behavior", clip: Pair = (1.0, 0.28), advantage: str = "standardized"
) -> Result:
    """k = clamp(exp(l − b), 1 − ε₁, 1 + ε₂)."""
    low, high = 1 - clip[0], 1 + clip[1]
    return weighed(case, advantage, lambda y, p, a: min(max(power(log_ratio(case, p, ratio)), low), high))


def aipo(case: Case) -> Result:
    """k = min(exp(l − b), 4), A = r − r̄."""
    return weighed(case, "mean", lambda y, p, a: min(power(log_ratio(case, p)), 4.0))


def minpro(
    case: Case,
    ratio: str = "behavior",
    clip: Pair = (1.0, 0.28),
    advantage: str = "standardized",
    cap_at_one: bool = False,
) -> Result:
    """k_t = clamp(w_t times the least w_s before it); nothing before it counts as 1."""

    def weight(y: Response, place: Place, a: float) -> float:
        before = [log_ratio(case, p, ratio) for p in y.places if p[1] < place[1]]
        least = min(before, default=0.0)
        if cap_at_one:
            least = min(least, 0.0)
        return min(max(power(log_ratio(case, place, ratio) + least), 1 - clip[0]), 1 + clip[1])

    return weighed(case, advantage, weight)


def vespo(
    case: Case,
    ratio: str = "behavior",
    positive: Pair = (2.0, 3.0),
    negative: Pair = (3.0, 2.0),
    advantage: str = "standardized",
) -> Result:
    """k = exp(λ + k log W − λ W), log W = Σ_t (l_t − b_t)."""

    def weight(y: Response, place: Place, a: float) -> float:
        k, rate = positive if a >= 0 else negative
        log_w = fsum(log_ratio(case, p, ratio) for p in y.places)
        return exp(rate + k * log_w - rate * power(log_w))

    return weighed(case, advantage, weight)


def m2po(
    case: Case,
    ratio: str = "behavior",
    budget: float = 0.04,
    tokens: str = "all",
    advantage: str = "standardized",
) -> Result:
    """−w A where not masked, so the derivative is the same. Masked is from the first square on with which the
    mean is above the budget."""
    counted: list[tuple[float, float]] = []
    for g, A in advantages(case, advantage):
        for y, a in zip(g.responses, A):
            logs = [log_ratio(case, p, ratio) for p in y.places]
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

    def term(y: Response, place: Place, a: float) -> Pair:
        x = log_ratio(case, place, ratio)
        masked = (tokens == "all" or x * a > 0) and x * x >= least
        return (0.0, 0.0) if masked else (-power(x) * a, -power(x) * a)

    return over_all_tokens(case, advantage, term)


def raft_pp(
    case: Case, ratio: str = "behavior", clip: Pair = (0.2, 0.2), least_reward: float | None = None
) -> Result:
    """−min(w, 1 + ε₂) of positive responses; its derivative is −w below, 0 above."""

    def positive(r: list[float]) -> list[float]:
        if least_reward is not None:
            return [float(x >= least_reward) for x in r]
        return [float(x == max(r) > min(r)) for x in r]

    def term(place: Place, a: float) -> Pair:
        w = power(log_ratio(case, place, ratio))
        return -a * min(w, 1 + clip[1]), -a * w * (w <= 1 + clip[1])

    groups = groups_of(case, 2 if least_reward is None else 1)
    return in_responses(case, [(g, positive([y.reward for y in g.responses])) for g in groups], term)


def nested_reft(
    case: Case, mismatch: str = "is", retrace: float = 1.0, advantage: str = "standardized"
) -> Result:
    """−w A, or −k A l with k = λ min(1, w)."""

    def term(place: Place, a: float) -> Pair:
        w = power(log_ratio(case, place, "old" if mismatch == "ignore" else "behavior"))
        if mismatch == "retrace":
            k = retrace * min(1.0, w)
            return -k * a * float(case.logp[place]), -k * a
        return -w * a, -w * a

    return in_responses(case, list(advantages(case, advantage)), term)


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
