"""See `independent.base`."""

from __future__ import annotations

import math
from math import fsum

from independent.base import Case, Result, groups_of
from independent.consistency import descended, log_ratios
from independent.preference import log_sigmoid, sigmoid


def kto(
    case: Case,
    beta: float,
    threshold: float = 0.0,
    desirable: float = 1.0,
    undesirable: float = 1.0,
    kl: str = "step",
) -> Result:
    """λ (1 - σ(u)), u = ±β (ρ - z), z = max(0, mean ρ) a constant; d/dρ = ∓λ β σ(u) σ(-u)."""
    found = list(log_ratios(case, case.ref_logp, 1))
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
    for g, rho in log_ratios(case, case.ref_logp, 2):
        r = [y.reward for y in g.responses]
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
    """-log σ(z) + λ Var_W, z = β (ρ̄_W - ρ̄_L): slopes -β σ(-z)/n_W and +β σ(-z)/n_L, and 2λ (ρ - ρ̄_W)/n_W."""
    parts, factor = [], variance * (beta**2 if unit == "logit" else 1.0)
    if equivalent == "meaning":
        return by_meaning(case, beta, threshold, factor)
    for g, rho in log_ratios(case, case.ref_logp, 2):
        good = [y.reward > threshold for y in g.responses]
        W = [x for x, is_good in zip(rho, good) if is_good]
        L = [x for x, is_good in zip(rho, good) if not is_good]
        value, up, down = 0.0, 0.0, 0.0
        if W and L:
            z = beta * (fsum(W) / len(W) - fsum(L) / len(L))
            value, up, down = -log_sigmoid(z), -beta * sigmoid(-z) / len(W), beta * sigmoid(-z) / len(L)
        slopes = []
        for x, is_good in zip(rho, good):
            off = x - fsum(W) / len(W) if is_good else 0.0
            value += factor * off * off / len(W) if is_good else 0.0
            slopes.append(up + 2 * factor * off / len(W) if is_good else down)
        parts.append((g, value, slopes))
    return descended(case, parts)


def by_meaning(case: Case, beta: float, threshold: float, factor: float) -> Result:
    """The same over meanings: of m good ones each counts 1/m, and a response of k 1/(m k). The variance of a
    meaning has the slope 2 (ρ - its mean)/k."""
    parts = []
    for g, rho in log_ratios(case, case.ref_logp, 2):
        members: dict[float, list[int]] = {}
        for i, y in enumerate(g.responses):
            members.setdefault(y.meaning, []).append(i)
        W, L = [], []
        for rows in members.values():
            reward = fsum(g.responses[i].reward for i in rows) / len(rows)
            (W if reward > threshold else L).append(rows)
        value, slopes = 0.0, [0.0] * len(rho)
        if W and L:
            of_W = [fsum(rho[i] for i in rows) / len(rows) for rows in W]
            of_L = [fsum(rho[i] for i in rows) / len(rows) for rows in L]
            z = beta * (fsum(of_W) / len(W) - fsum(of_L) / len(L))
            value = -log_sigmoid(z)
            for kinds, sign in ((W, -1), (L, 1)):
                for rows in kinds:
                    for i in rows:
                        slopes[i] += sign * beta * sigmoid(-z) / (len(kinds) * len(rows))
        for rows in W:
            mean = fsum(rho[i] for i in rows) / len(rows)
            for i in rows:
                value += factor * (rho[i] - mean) ** 2 / (len(rows) * len(W))
                slopes[i] += 2 * factor * (rho[i] - mean) / (len(rows) * len(W))
        parts.append((g, value, slopes))
    return descended(case, parts)


def oorl(
    case: Case, beta: float, threshold: float = 0.0, share: float = 0.01, equivalent: str = "reward"
) -> Result:
    """The sum of two losses: of `reinforce_pp`, over all tokens of the step, and of `gepo`.

    In the first A = (r - m)/s of the step's tokens, and k = w where w A isn't above its clipped value, else
    0: -k A l, with -k A as its derivative.
    """
    every = [(g.weight, y, p) for g in groups_of(case, 2) for y in g.responses for p in y.places]
    W = fsum(weight for weight, _, _ in every)
    mean = fsum(weight / W * y.reward for weight, y, _ in every)
    spread = math.sqrt(max(1e-8, fsum(weight / W * (y.reward - mean) ** 2 for weight, y, _ in every)))
    differ = len({y.reward for _, y, _ in every}) > 1
    loss, grads = gepo(case, beta, threshold, equivalent=equivalent)
    grad, loss = share * grads["logp"], share * loss
    for weight, y, place in every:
        A = (y.reward - mean) / spread if differ else 0.0
        w = math.exp(min(700.0, float(case.logp[place]) - float(case.behavior_logp[place])))
        k = w if w * A <= min(max(w, 0.8), 1.2) * A else 0.0
        loss -= weight / W * k * A * float(case.logp[place])
        grad[place] -= weight / W * k * A
    return loss, {"logp": grad}
