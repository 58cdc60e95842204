"""See `independent.base`."""

from __future__ import annotations

from math import fsum

from independent.advantages import over_the_step
from independent.base import Case, Result, combined, mean_of
from independent.consistency import descended, log_ratios
from independent.preference import log_sigmoid, sigmoid
from independent.token_weights import with_clipped_weights


def kto(
    case: Case,
    beta: float,
    threshold: float = 0.0,
    desirable: float = 1.0,
    undesirable: float = 1.0,
    kl: str = "step",
) -> Result:
    """λ (1 - σ(u)), u = ±β (ρ - z), z = max(0, mean ρ) a constant; d/dρ = ∓λ β σ(u) σ(-u)."""
    found = list(log_ratios(case, "reference", 1))
    W = fsum(g.weight for g, _ in found)
    z = max(0.0, fsum(g.weight / W * x / len(rho) for g, rho in found for x in rho)) if kl == "step" else 0.0
    parts = []
    for g, rho in found:
        value, slopes = 0.0, []
        for y, x in zip(g.responses, rho):
            sign, weight = (1, desirable) if y.reward > threshold else (-1, undesirable)
            u = sign * beta * (x - z)
            value += weight * sigmoid(-u) / len(rho)
            slopes.append(-sign * weight * beta * sigmoid(u) * sigmoid(-u) / len(rho))
        parts.append((g, value, slopes))
    return descended(case, parts)


def online_dpo(case: Case, beta: float, label_smoothing: float = 0.0) -> Result:
    """Mean over all (best, worst) of -(1 - ε) log σ(z) - ε log σ(-z); slopes ±β (ε σ(z) - (1 - ε) σ(-z))."""
    parts, eps = [], label_smoothing
    for g, rho in log_ratios(case, "reference", 2):
        r = g.rewards
        every = [
            (i, j)
            for i in range(len(r))
            for j in range(len(r))
            if r[i] == max(r) and r[j] == min(r) and r[i] > r[j]
        ]
        value, slopes = 0.0, [0.0] * len(r)
        for i, j in every:
            z = beta * (rho[i] - rho[j])
            value += (-(1 - eps) * log_sigmoid(z) - eps * log_sigmoid(-z)) / len(every)
            slope = beta * (eps * sigmoid(z) - (1 - eps) * sigmoid(-z)) / len(every)
            slopes[i] += slope
            slopes[j] -= slope
        parts.append((g, value, slopes))
    return descended(case, parts)


def gepo(
    case: Case,
    beta: float,
    threshold: float = 0.0,
    variance: float = 1.0,
    unit: str = "logit",
    equivalent: str = "reward",
) -> Result:
    """-log σ(z) + λ Var_W, z = β (ρ̄_W - ρ̄_L): slopes -β σ(-z)/n_W and +β σ(-z)/n_L, and 2λ (ρ - ρ̄_W)/n_W.

    W are the good responses and L the others. Over meanings: of m good ones each counts 1/m, and a response
    of k 1/(m k). The variance of a meaning has the slope 2 (ρ - its mean)/k.
    """
    parts, factor = [], variance * (beta**2 if unit == "logit" else 1.0)
    for g, rho in log_ratios(case, "reference", 2):
        kinds: dict[float, list[int]] = {}
        for i, y in enumerate(g.responses):
            kinds.setdefault(y.meaning if equivalent == "meaning" else y.reward > threshold, []).append(i)
        W, L = [], []
        for rows in kinds.values():
            (W if mean_of([g.rewards[i] for i in rows]) > threshold else L).append(rows)
        value, slopes = 0.0, [0.0] * len(rho)
        if W and L:
            of_W, of_L = (mean_of([mean_of([rho[i] for i in rows]) for rows in X]) for X in (W, L))
            z = beta * (of_W - of_L)
            value = -log_sigmoid(z)
            for X, sign in ((W, -1), (L, 1)):
                for i, size in ((i, len(rows)) for rows in X for i in rows):
                    slopes[i] += sign * beta * sigmoid(-z) / (len(X) * size)
        for rows in W:
            mean = mean_of([rho[i] for i in rows])
            for i in rows:
                value += factor * (rho[i] - mean) ** 2 / (len(rows) * len(W))
                slopes[i] += 2 * factor * (rho[i] - mean) / (len(rows) * len(W))
        parts.append((g, value, slopes))
    return descended(case, parts)


def oorl(
    case: Case, beta: float, threshold: float = 0.0, share: float = 0.01, equivalent: str = "reward"
) -> Result:
    """The sum of two losses: of `reinforce_pp`, over all tokens of the step, and of `gepo`."""
    found = over_the_step([(g, g.rewards) for g in case.groups(2)])
    of_policy = with_clipped_weights(case, found)
    return combined((1.0, of_policy), (share, gepo(case, beta, threshold, equivalent=equivalent)))
