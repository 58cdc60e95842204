"""See `independent.base`."""

from __future__ import annotations

from math import exp, expm1, fsum, inf, log

from independent.base import Case, Pair, Place, Response, Result, clipped, over_tokens, standardized

Bound = tuple[float, float, float]  # start, maximum, step
Counted = list[tuple[float, float, float]]  # of tokens: how much they count, A, w


def deepseek_v32(
    case: Case,
    ratio: str = "behavior",
    clip: Pair = (0.2, 0.2),
    off_policy: float = 0.5,
) -> Result:
    """GRPO's token, and 0 where A < 0 and the mean of b - l of the response is above δ."""

    def token(A: float, y: Response, place: Place) -> Pair:
        if A < 0 and -case.summed_log_ratio(y, "behavior") / len(y.places) > off_policy:
            return 0.0, 0.0
        return clipped(case.ratio(place, ratio), A, 1 - clip[0], 1 + clip[1])

    return over_tokens(case, token, False, "response")


def kimi_k25(case: Case, pull: float = 1e-3) -> Result:
    """-w A + τ e² has the slope -w A + 2 τ e."""

    def token(A: float, _: Response, place: Place) -> Pair:
        e = case.log_ratio(place)
        return -exp(e) * A + pull * e * e, -exp(e) * A + 2 * pull * e

    return over_tokens(case, token, False, "token")


def sapo(
    case: Case,
    ratio: str = "behavior",
    temperature: Pair = (1.0, 1.05),
    average: str | float = "response",
) -> Result:
    """-(4/τ) σ A, σ = 1/(1 + exp(-τ (w - 1))), has the slope -4 σ (1 - σ) w A."""

    def token(A: float, _: Response, place: Place) -> Pair:
        tau, w = temperature[0] if A > 0 else temperature[1], case.ratio(place, ratio)
        other = exp(-min(tau * (w - 1), 700.0))  # (1 - σ)/σ
        sigma = 1 / (1 + other)
        return -4 / tau * sigma * A, -4 * sigma * (other * sigma) * w * A

    return over_tokens(case, token, True, average)


def dppo(case: Case, divergence: str = "tv", limit: float = 0.2, average: str | float = "token") -> Result:
    """-w A has the slope -w A; both are 0 where A and l - b have one sign and the divergence is large."""

    def token(A: float, _: Response, place: Place) -> Pair:
        new, b = float(case.logp[place]), float(case.behavior_logp[place])
        far = abs(exp(new) - exp(b)) if divergence == "tv" else _bernoulli(b, new)
        if A * (new - b) > 0 and far > limit:
            return 0.0, 0.0
        return -exp(new - b) * A, -exp(new - b) * A

    return over_tokens(case, token, False, average)


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
    clip: Pair = (0.2, 0.2),
    beta: float = 0.0,
    base_share: float = 0.5,
) -> Result:
    """-min(w A, clamp(w, κ-ε₁, κ+ε₂) A), w = exp(l - b), κ = exp(o - b).

    Plus β (λ k(l - f) + (1-λ) k(l - o)), k(d) = exp(-d) - 1 + d with the slope 1 - exp(-d).
    """

    def token(A: float, _: Response, place: Place) -> Pair:
        kappa = exp(float(case.old_logp[place]) - float(case.behavior_logp[place]))
        term, slope = clipped(case.ratio(place), A, kappa - clip[0], kappa + clip[1])
        if beta:
            for share, anchor in ((base_share, "reference"), (1 - base_share, "old")):
                d = case.log_ratio(place, anchor)
                term += beta * share * (expm1(-d) + d)
                slope -= beta * share * expm1(-d)
        return term, slope

    return over_tokens(case, token, True, "token")


def _tokens(case: Case, ratio: str, *, by_chance: bool) -> Counted:
    """They count by the weight of their group, and `by_chance` by exp(b) too."""
    return [
        (
            g.weight * (exp(float(case.behavior_logp[place])) if by_chance else 1.0),
            A,
            case.ratio(place, ratio),
        )
        for g in case.groups(2)
        for A, y in zip(standardized(g.rewards, True), g.responses, strict=True)
        for place in y.places
    ]


def _short(counted: Counted, criterion: str, odds: float, low: float, high: float) -> bool:
    """P < odds N."""
    value = criterion == "value"
    P = fsum(c * A * (min(w, high) if value else w * (w <= high)) for c, A, w in counted if A > 0)
    N = fsum(-c * A * (max(w, low) if value else w * (w >= low)) for c, A, w in counted if A < 0)
    return odds * N > P


def _within(case: Case, ratio: str, low: float, high: float, dual: float | None = None) -> Result:
    """Between the bounds, with A over the deviation; the mean over all tokens."""

    def token(A: float, _: Response, place: Place) -> Pair:
        return clipped(case.ratio(place, ratio), A, low, high, dual)

    return over_tokens(case, token, True, "token")


def bapo(
    case: Case,
    ratio: str = "behavior",
    criterion: str = "value",
    target: float = 0.4,
    low: Bound = (0.6, 0.9, 0.02),
    high: Bound = (1.2, 3.0, 0.05),
) -> Result:
    """The upper bound first, then the lower one, until P/(P+N) reaches the target; tokens count by exp(b)."""
    counted = _tokens(case, ratio, by_chance=True)
    odds, c_low, c_high = target / (1 - target), low[0], high[0]
    while c_high < high[1] and _short(counted, criterion, odds, c_low, c_high):
        c_high = min(c_high + high[2], high[1])
    while c_low < low[1] and _short(counted, criterion, odds, c_low, c_high):
        c_low = min(c_low + low[2], low[1])
    return _within(case, ratio, c_low, c_high)


def bapo_code(
    case: Case,
    ratio: str = "behavior",
    criterion: str = "value",
    target: float = 0.5,
    low: Bound = (0.8, 0.95, 0.05),
    high: Bound = (1.2, 2.0, 0.1),
) -> Result:
    """The lower bound first, until P/N reaches the target; tokens count alike."""
    counted = _tokens(case, ratio, by_chance=False)
    c_low, c_high = low[0], high[0]
    while c_low < low[1] and _short(counted, criterion, target, c_low, c_high):
        c_low = min(c_low + low[2], low[1])
    while c_high < high[1] and _short(counted, criterion, target, c_low, c_high):
        c_high = min(c_high + high[2], high[1])
    return _within(case, ratio, c_low, c_high, dual=3.0)
