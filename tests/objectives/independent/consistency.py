"""See `independent.base`."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import exp, fsum, log

import numpy as np

from independent.base import (
    Case,
    Found,
    Group,
    Place,
    Response,
    Result,
    half_variance,
    less_baseline,
    mean_of,
    others_mean,
    regularized,
    shares,
)


def agro(
    case: Case,
    beta: float,
    scale: str = "reward",
    average: str = "sum",
    regularizer: str = "sequence",
    baseline: str = "others",
) -> Result:
    """[9]; [16] for average="token", where d R_i / d l_it = -β / T_i; [18], [19] for the other regularizers,
    [20] for that under the reference.
    d ½Var(R) / d R_i = (R_i - R̄) / (n-1) = (R_i - R̄_{-i}) / n, and d R_i / d l_it = -β.

    scale="reward" gives the gradient divided by β (its limit at β = 0); the loss stays ½Var(R).
    Another baseline than the others: ½ (R_i - b)² / n, whose derivative is (R_i - b) / n · -β.
    """
    groups = case.groups(2 if baseline == "others" else 1)
    share = shares(groups, 1.0)
    loss, (grad, kl_grad, mean_grad, square_grad) = 0.0, np.zeros((4, *case.logp.shape))
    every = [regularized(case, g, beta, average) for g in groups]
    for at, (g, R) in enumerate(zip(groups, every, strict=True)):
        off = less_baseline(case, groups, at, every, baseline)
        of_group = half_variance(R) if baseline == "others" else fsum(a * a for a in off) / (2 * len(R))
        loss += g.weight / fsum(h.weight for h in groups) * of_group
        rho = [case.summed_log_ratio(y, "reference") for y in g.responses]
        for i, y in enumerate(g.responses):
            factor = (beta if scale == "loss" else 1.0) / (len(y.places) if average == "token" else 1)
            for k, place in enumerate(y.places):
                of_token = share[place] * factor
                if regularizer == "sequence" or not beta:
                    grad[place] = of_token * -off[i]
                    continue
                later = y.places[k + 1 :]
                if regularizer == "triangular":
                    pull = fsum(case.log_ratio(p, "reference") for p in (place, *later))
                elif regularizer == "local":
                    pull = fsum(float(case.kl[p]) for p in later)
                    kl_grad[place] = of_token * beta
                else:
                    pull = fsum(float(case.ref_mean[p]) for p in later)
                    before = fsum(case.log_ratio(p, "reference") for p in y.places[:k])
                    mean_grad[place] = of_token * beta * (before - others_mean(rho, i))
                    square_grad[place] = of_token * beta
                grad[place] = of_token * (-(y.reward - others_mean(g.rewards, i)) + beta * pull)
    others = {"local": {"kl": kl_grad}, "reference": {"ref_mean": mean_grad, "ref_square": square_grad}}
    return loss, {"logp": grad} | (others.get(regularizer, {}) if beta else {})


def agro_onpolicy(
    case: Case,
    beta: float,
    baseline: bool = False,
    likelihood_ratio: float | str = 1.0,
    squared: str = "sequence",
) -> Result:
    """[13]: (1/n) [-β A_i + c ½ A_i²], A_i = R_i - R̄_{-i}.

    With the baseline [14]: (1/n) [-β A_i + c (v_i - v̄_{-i})], v = ½A².
    c is 1 in the paper; "adaptive": the largest number up to 1 with c · A_i <= β for every i of the group.
    `squared` [21]: ½A² contains ½β²ρ², which at token t becomes
    ½β² ((Σ_{s>=t} ρ_s)² + 2 (Σ_{s<t} ρ_s) (Σ_{s>=t} ρ_s)); "local" has KL_s for the ρ_s of s > t in the cross
    term.
    """
    grad, loss, groups = np.zeros(case.logp.shape), 0.0, case.groups(3 if baseline else 2)
    W = fsum(g.weight for g in groups)
    for g in groups:
        R = regularized(case, g, beta)
        n = len(R)
        loss += g.weight / W * half_variance(R)
        A = [R[i] - others_mean(R, i) for i in range(n)]
        v = [0.5 * a * a for a in A]
        if likelihood_ratio == "adaptive":
            c = min([1.0] + [beta / a for a in A if a > 0])
        else:
            c = float(likelihood_ratio)
        for i, y in enumerate(g.responses):
            second = v[i] - others_mean(v, i) if baseline else v[i]
            rho = [case.log_ratio(p, "reference") if beta else 0.0 for p in y.places]
            for t, place in enumerate(y.places):
                before, after = fsum(rho[:t]), fsum(rho[t + 1 :])
                cross = fsum(float(case.kl[p]) for p in y.places[t + 1 :]) if squared == "local" else after
                instead = (rho[t] + after) ** 2 + 2 * before * (rho[t] + cross)
                whole = fsum(rho) ** 2 if squared != "sequence" else instead
                here = second + 0.5 * beta**2 * (instead - whole)
                grad[place] = g.weight / W * (-beta * A[i] + c * here) / n
    return loss, {"logp": grad} | ({"kl": np.zeros(case.logp.shape)} if squared == "local" and beta else {})


def dro(case: Case, beta: float) -> Result:
    """½ (r - β Σ_t (l_t - f_t) - V)², V the mean over a response's rows.

    d/dl_t = -β (…), here without the β; d/dV = -(…).
    """
    groups = case.groups(1)
    value, value_grad, parts = np.array(case.value), np.zeros(len(case.mask)), []
    W = fsum(g.weight for g in groups)
    for g in groups:
        n, slopes, loss = len(g.responses), [], 0.0
        for y, R in zip(g.responses, regularized(case, g, beta)):
            off = R - mean_of(value[y.rows].tolist())
            loss += 0.5 * off * off / n
            slopes.append(-off / n)
            value_grad[y.rows] = g.weight / W / n * -off / len(y.rows)
        parts.append((g, loss, slopes))
    loss, grads = descended(case, parts)
    return loss, {**grads, "value": value_grad}


def prefix_consistency(case: Case, beta: float, compared: str = "pairs") -> Result:
    """Mean of ½ (C_i - C_j)² over the pairs of positions of a response, written out pair by pair; with "end"
    over those with the last one, in which the ρ of i alone has a derivative.

    C at the k-th token is V there, plus all token rewards before it in the row, minus β ρ of the tokens in
    the mask before it. After the last one it is r - β Σ ρ. d C_k / d l_t = -β, here -1, for the tokens t
    before k.
    """
    grad, value_grad, loss = np.zeros(case.logp.shape), np.zeros(case.logp.shape), 0.0
    for share, y in responses(case):
        K, rho = len(y.places), [case.log_ratio(p, "reference") if beta else 0.0 for p in y.places]
        C = [
            float(case.prefix_value[place]) + earned(case, place) - beta * fsum(rho[:k])
            for k, place in enumerate(y.places)
        ]
        C.append(y.reward - beta * fsum(rho))
        pairs = [(i, j) for j in range(K + 1) for i in range(j) if compared == "pairs" or j == K]
        for i, j in pairs:
            off = (C[i] - C[j]) / len(pairs)
            loss += share * 0.5 * off * (C[i] - C[j])
            if i < K:
                value_grad[y.places[i]] += share * off
            if j < K:
                value_grad[y.places[j]] -= share * off
            for t in range(i, j if compared == "pairs" else i + 1):  # C_j has these tokens' ρ, C_i hasn't
                grad[y.places[t]] += share * off
    return loss, {"logp": grad, "prefix_value": value_grad}


def responses(case: Case) -> list[tuple[float, Response]]:
    """Each with its share of the mean in its group, over groups."""
    groups = case.groups(1)
    W = fsum(g.weight for g in groups)
    return [(g.weight / W / len(g.responses), y) for g in groups for y in g.responses]


def earned(case: Case, place: Place) -> float:
    """All token rewards of the row before it."""
    row, at = place
    return fsum(float(x) for x in case.token_reward[row, :at] if not math.isnan(x))


def oreo(case: Case, beta: float) -> Result:
    """Mean of ½ (r - β Σ_{s>=t} ρ_s - V_t)² over t; d/dl_t = -(…), the loss's slope over β, d/dV_t = -(…)."""
    grad, value_grad, loss = np.zeros(case.logp.shape), np.zeros(case.logp.shape), 0.0
    for share, y in responses(case):
        of_token = share / len(y.places)
        rho = [case.log_ratio(p, "reference") for p in y.places]
        for t, place in enumerate(y.places):
            off = y.reward - earned(case, place) - beta * fsum(rho[t:]) - float(case.prefix_value[place])
            loss += of_token * 0.5 * off * off
            grad[place] = value_grad[place] = -of_token * off
    return loss, {"logp": grad, "prefix_value": value_grad}


def squared_consistency(
    case: Case,
    beta: float,
    anchor: str = "reference",
    baseline: str = "mean",
    value_beta: float | None = None,
    scale: str = "half_variance",
) -> Result:
    """(a_i - b)² times the scale's factor, a_i = r_i - β Σ_t (l_it - anchor_it).

    b is the group's mean of a, that of r, β₁ log mean exp(r/β₁), or stored. d a_i / d l_it = -β. The first
    moves too: d (a_i - ā) / d a_j = δ_ij - 1/n, and Σ_i (a_i - ā) = 0 leaves δ_ij alone.
    """
    parts = []
    for g, a in residuals(case, anchor, beta, 1 if baseline == "stored" else 2):
        n = len(a)
        b = {
            "mean": mean_of(a),
            "reward": mean_of(g.rewards),
            "soft": soft(g, value_beta or beta),
            "stored": case.stored(g),
        }[baseline]
        if scale == "half_variance":
            factor = 1 / (2 * (n - 1))
        else:
            factor = {"square": 1 / n, "trajectory": 1 / (n * beta * beta)}.get(scale) or n / (n - 1)
        parts.append((g, factor * fsum((x - b) ** 2 for x in a), [factor * 2 * (x - b) * -beta for x in a]))
    return descended(case, parts)


def soft(g: Group, beta: float) -> float:
    """β log mean exp(r/β)."""
    most = max(g.rewards)
    return most + beta * log(mean_of([exp((r - most) / beta) for r in g.rewards]))


def log_ratios(case: Case, anchor: str, least: int = 2) -> Found:
    """Each group with Σ_t (l_t - f_t) of its responses."""
    return [(g, [case.summed_log_ratio(y, anchor) for y in g.responses]) for g in case.groups(least)]


def residuals(case: Case, anchor: str, beta: float, least: int = 2) -> Found:
    """Each group with its r_i - β Σ_t (l_it - f_it)."""
    return [
        (g, [r - beta * x for r, x in zip(g.rewards, ratios)])
        for g, ratios in log_ratios(case, anchor, least)
    ]


def descended(case: Case, parts: list[tuple[Group, float, list[float]]]) -> Result:
    """Mean over groups of their losses; each response's slope is that of all its tokens."""
    grad, W = np.zeros(case.logp.shape), fsum(g.weight for g, _, _ in parts)
    for g, _, slopes in parts:
        for y, slope in zip(g.responses, slopes):
            for place in y.places:
                grad[place] = g.weight / W * slope
    return fsum(g.weight / W * loss for g, loss, _ in parts), {"logp": grad}


def gvpo(case: Case, beta: float = 0.1) -> Result:
    """½ · sample variance, in its pairwise form; d/dl_i = -β/(n-1) (a_i - ā)."""
    parts = []
    for g, a in residuals(case, "behavior", beta):
        parts.append((g, half_variance(a), [-beta / (len(a) - 1) * (x - mean_of(a)) for x in a]))
    return descended(case, parts)


def vargrad(case: Case, beta: float) -> Result:
    return squared_consistency(case, beta, scale="trajectory")


def copg(case: Case, beta: float) -> Result:
    return squared_consistency(case, beta, scale="pairs")


def rebel(case: Case, beta: float) -> Result:
    """To the policy before the update, β = 1/η.

    Σ_{i<j} (a_i - a_j)²/(n-1); d/dl_i = -2β/(n-1) Σ_j (a_i - a_j).
    """
    parts = []
    for g, a in residuals(case, "old", beta):
        n = len(a)
        loss = fsum((a[i] - a[j]) ** 2 for i in range(n) for j in range(i)) / (n - 1)
        parts.append((g, loss, [-2 * beta / (n - 1) * fsum(x - y for y in a) for x in a]))
    return descended(case, parts)


def _to_value(
    case: Case, anchor: str, beta: float, value: Callable[[Group], float], least: int = 2
) -> Result:
    """Mean of (a_i - V)²; d/dl_i = -2β/n (a_i - V)."""
    parts = []
    for g, a in residuals(case, anchor, beta, least):
        off = [x - value(g) for x in a]
        parts.append((g, mean_of([x * x for x in off]), [-2 * beta / len(a) * x for x in off]))
    return descended(case, parts)


def kimi(case: Case, beta: float) -> Result:
    """V is the mean reward, β = τ."""
    return _to_value(case, "behavior", beta, lambda g: mean_of(g.rewards))


def oapl(case: Case, beta: float = 1e-3, value_beta: float = 1.0) -> Result:
    """V = β₁ log mean exp(r/β₁)."""
    return _to_value(case, "behavior", beta, lambda g: soft(g, value_beta))


def apo(case: Case, beta: float = 1e-3, value_beta: float = 0.5) -> Result:
    """V is stored; β₁ is of the samples that it was made of."""
    return _to_value(case, "reference", beta, lambda g: case.stored(g), 1)


def qrpo(case: Case, beta: float) -> Result:
    """Mean of (q_i - β log Z - β ρ_i)², Z = ∫_0^1 exp(q/β) dq = β (exp(1/β) - 1); d/dl_i = -2β/n (…)."""
    parts, log_Z = [], log(beta * (exp(1 / beta) - 1))
    for g, ratios in log_ratios(case, "reference", 1):
        quantiles = [float(case.stored_quantile[y.rows[0]]) for y in g.responses]
        off = [q - beta * log_Z - beta * rho for q, rho in zip(quantiles, ratios, strict=True)]
        parts.append((g, mean_of([x * x for x in off]), [-2 * beta / len(off) * x for x in off]))
    return descended(case, parts)


def tbrm(case: Case, beta: float) -> Result:
    """½β mean of (ρ_i + V_i - r_i/β)²; d/dl_i = d/dV_i = β/n (…), V_i the normalizer at the first token."""
    parts, by_start = [], np.zeros(case.logp.shape)
    everything = log_ratios(case, "reference", 1)
    W = fsum(g.weight for g, _ in everything)
    for g, ratios in everything:
        n, off = len(g.responses), []
        for y, rho in zip(g.responses, ratios):
            off.append(rho + float(case.normalizer[y.places[0]]) - y.reward / beta)
            by_start[y.places[0]] = g.weight / W * beta / n * off[-1]
        parts.append((g, 0.5 * beta * fsum(x * x for x in off) / n, [beta / n * x for x in off]))
    loss, grads = descended(case, parts)
    return loss, {**grads, "normalizer": by_start}
