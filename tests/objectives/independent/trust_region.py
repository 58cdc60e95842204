"""See `independent.base`."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, expm1, fsum, inf, log

import numpy as np

from independent.base import (
    Case,
    Response,
    Result,
    advantages,
    groups_of,
    over_tokens,
    shares,
    token_log_ratio,
)

Bound = tuple[float, float, float]  # start, maximum, step
Place = tuple[int, int]


def deepseek_v32(
    case: Case,
    ratio: str = "behavior",
    clip: tuple[float, float] = (0.2, 0.2),
    std: bool = False,
    average: str | float = "response",
    off_policy: float = 0.5,
) -> Result:
    """GRPO's token, and 0 where A < 0 and the mean of b - l of the response is above δ."""

    def token(A: float, y: Response, place: tuple[int, int]) -> tuple[float, float]:
        if A < 0 and -fsum(token_log_ratio(case, p) for p in y.places) / len(y.places) > off_policy:
            return 0.0, 0.0
        w = exp(token_log_ratio(case, place, ratio))
        clamped = min(max(w, 1 - clip[0]), 1 + clip[1])
        return (-w * A, -w * A) if w * A <= clamped * A else (-clamped * A, 0.0)

    return over_tokens(case, token, std, average)


def kimi_k25(case: Case, std: bool = False, average: str | float = "token", pull: float = 1e-3) -> Result:
    """-w A + τ e² has the slope -w A + 2 τ e."""

    def token(A: float, _: Response, place: tuple[int, int]) -> tuple[float, float]:
        e = token_log_ratio(case, place)
        return -exp(e) * A + pull * e * e, -exp(e) * A + 2 * pull * e

    return over_tokens(case, token, std, average)


def sapo(
    case: Case,
    ratio: str = "behavior",
    temperature: tuple[float, float] = (1.0, 1.05),
    std: bool = True,
    average: str | float = "response",
) -> Result:
    """-(4/τ) σ A, σ = 1/(1 + exp(-τ (w - 1))), has the slope -4 σ (1 - σ) w A."""

    def token(A: float, _: Response, place: tuple[int, int]) -> tuple[float, float]:
        tau, w = temperature[0] if A > 0 else temperature[1], exp(token_log_ratio(case, place, ratio))
        other = exp(-min(tau * (w - 1), 700.0))  # (1 - σ)/σ
        sigma = 1 / (1 + other)
        return -4 / tau * sigma * A, -4 * sigma * (other * sigma) * w * A

    return over_tokens(case, token, std, average)


def dppo(
    case: Case, divergence: str = "tv", limit: float = 0.2, std: bool = False, average: str | float = "token"
) -> Result:
    """-w A has the slope -w A; both are 0 where A and l - b have one sign and the divergence is large."""

    def token(A: float, _: Response, place: tuple[int, int]) -> tuple[float, float]:
        new, b = float(case.logp[place]), float(case.behavior_logp[place])
        far = abs(exp(new) - exp(b)) if divergence == "tv" else _bernoulli(b, new)
        if A * (new - b) > 0 and far > limit:
            return 0.0, 0.0
        return -exp(new - b) * A, -exp(new - b) * A

    return over_tokens(case, token, std, average)


def _bernoulli(b: float, new: float) -> float:
    """p log(p/q) + (1-p) log((1-p)/(1-q)) of the log-probs b and `new`; 0 log 0 = 0."""
    rest_p, rest_q = -expm1(b), -expm1(new)
    if rest_p == 0:
        return exp(b) * (b - new)
    return inf if rest_q == 0 else exp(b) * (b - new) + rest_p * log(rest_p / rest_q)


def dppo_kl(case: Case) -> Result:
    """The same with the KL and δ = 0.05."""
    return dppo(case, "kl", 0.05)


def remix(
    case: Case,
    clip: tuple[float, float] = (0.2, 0.2),
    std: bool = True,
    average: str | float = "token",
    beta: float = 0.0,
    base_share: float = 0.5,
) -> Result:
    """-min(w A, clamp(w, κ-ε₁, κ+ε₂) A), w = exp(l - b), κ = exp(o - b).

    Plus β (λ k(l - f) + (1-λ) k(l - o)), k(d) = exp(-d) - 1 + d with the slope 1 - exp(-d).
    """

    def token(A: float, _: Response, place: tuple[int, int]) -> tuple[float, float]:
        w, u = exp(token_log_ratio(case, place)), token_log_ratio(case, place, "old")
        kappa = exp(float(case.old_logp[place]) - float(case.behavior_logp[place]))
        clamped = min(max(w, kappa - clip[0]), kappa + clip[1])
        term, slope = (-w * A, -w * A) if w * A <= clamped * A else (-clamped * A, 0.0)
        if beta:
            d = float(case.logp[place]) - float(case.ref_logp[place])
            for lam, x in ((base_share, d), (1 - base_share, u)):
                term += beta * lam * (expm1(-x) + x)
                slope -= beta * lam * expm1(-x)
        return term, slope

    return over_tokens(case, token, std, average)


def _tokens(case: Case, ratio: str) -> Iterator[tuple[Place, float, float, float]]:
    """(place, weight of the group, A, w) of each token."""
    anchor = case.behavior_logp if ratio == "behavior" else case.old_logp
    for g in groups_of(case, 2):
        for A, y in zip(advantages(g, True), g.responses):
            for place in y.places:
                yield place, g.weight, A, exp(float(case.logp[place]) - float(anchor[place]))


def _short(
    counted: list[tuple[float, float, float]], criterion: str, odds: float, low: float, high: float
) -> bool:
    """P < odds N of tokens (count, A, w)."""
    value = criterion == "value"
    P = fsum(c * A * (min(w, high) if value else w * (w <= high)) for c, A, w in counted if A > 0)
    N = fsum(-c * A * (max(w, low) if value else w * (w >= low)) for c, A, w in counted if A < 0)
    return odds * N > P


def _within(case: Case, ratio: str, low: float, high: float, dual: bool) -> Result:
    """-min(w A, clamp(w, low, high) A), with `dual` at most -3 A where A < 0; the mean over all tokens.

    The slope is -w A, and 0 for A > 0, w > high, for A < 0, w < low, and with `dual` for A < 0, w > 3.
    """
    grad, loss = np.zeros(case.logp.shape), 0.0
    share = shares(groups_of(case, 2), "token")
    for place, _, A, w in _tokens(case, ratio):
        kept = min(w, high) if A > 0 else max(w, low)
        if dual and A < 0:
            kept = min(kept, 3.0)
        loss -= share[place] * kept * A
        grad[place] = -share[place] * w * A if kept == w else 0.0
    return loss, {"logp": grad}


def bapo(
    case: Case,
    ratio: str = "behavior",
    criterion: str = "value",
    target: float = 0.4,
    low: Bound = (0.6, 0.9, 0.02),
    high: Bound = (1.2, 3.0, 0.05),
) -> Result:
    """The upper bound first, then the lower one, until P/(P+N) reaches the target; tokens count by exp(b)."""
    counted = [
        (weight * exp(float(case.behavior_logp[place])), A, w) for place, weight, A, w in _tokens(case, ratio)
    ]
    odds, c_low, c_high = target / (1 - target), low[0], high[0]
    while c_high < high[1] and _short(counted, criterion, odds, c_low, c_high):
        c_high = min(c_high + high[2], high[1])
    while c_low < low[1] and _short(counted, criterion, odds, c_low, c_high):
        c_low = min(c_low + low[2], low[1])
    return _within(case, ratio, c_low, c_high, dual=False)


def bapo_code(
    case: Case,
    ratio: str = "behavior",
    criterion: str = "value",
    target: float = 0.5,
    low: Bound = (0.8, 0.95, 0.05),
    high: Bound = (1.2, 2.0, 0.1),
) -> Result:
    """The lower bound first, until P/N reaches the target; tokens count alike."""
    counted = [(weight, A, w) for _, weight, A, w in _tokens(case, ratio)]
    c_low, c_high = low[0], high[0]
    while c_low < low[1] and _short(counted, criterion, target, c_low, c_high):
        c_low = min(c_low + low[2], low[1])
    while c_high < high[1] and _short(counted, criterion, target, c_low, c_high):
        c_high = min(c_high + high[2], high[1])
    return _within(case, ratio, c_low, c_high, dual=True)
