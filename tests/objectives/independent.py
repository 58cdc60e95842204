"""The objectives a second time, written from the equations alone, to compare `agro.objectives` with.

Python floats and loops over groups, responses and tokens. No torch, no vectorized step, no import from
`agro`. Every gradient is a closed form derived by hand and stands beside its derivation. Numbers in brackets,
as in [9], are the statements of the paper's equations: off-policy estimator [9], on-policy [13] and [14], the
baseline of figure 1 [15]. Each function takes a `Case` and returns (loss, {stream: d loss / d stream}).

Notation: group g of G has the responses i = 1 … n. l_i is the log-prob of response i, a sum over its tokens
in the mask (of all its rows, where an episode has several). w_g is the group's weight, W = Σ_g w_g.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import exp, fsum, log

import numpy as np

Result = tuple[float, dict[str, np.ndarray]]


@dataclass
class Case:
    """Rows as they are given to `Batch.of`, in float64."""

    logp: np.ndarray  # [B,T]
    mask: np.ndarray  # [B,T]
    reward: Sequence[float]  # [B]
    group: Sequence[Hashable]  # [B]
    response: Sequence[Hashable]  # [B]
    weight: Sequence[float]  # [B], one value a group
    ref_logp: np.ndarray  # [B,T]
    behavior_logp: np.ndarray  # [B,T]
    old_logp: np.ndarray  # [B,T]
    kl: np.ndarray  # [B,T]
    prefix_value: np.ndarray  # [B,T]
    token_reward: np.ndarray  # [B,T]; NaN: none
    value: Sequence[float]  # [B]
    stored_value: Sequence[float]  # [B], one value a group
    pairs: Sequence[tuple[Hashable, Hashable]] = ()  # responses, the better one first
    votes: Sequence[tuple[float, float]] = ()


@dataclass
class Response:
    reward: float
    places: list[tuple[int, int]]  # (row, token) in the mask


@dataclass
class Group:
    weight: float
    responses: list[Response]


def groups_of(case: Case, least: int) -> list[Group]:
    """The groups with at least `least` responses."""
    found: dict[Hashable, dict[Hashable, Response]] = {}
    weights: dict[Hashable, float] = {}
    B, T = case.mask.shape
    for row in range(B):
        weights[case.group[row]] = float(case.weight[row])
        responses = found.setdefault(case.group[row], {})
        response = responses.setdefault(case.response[row], Response(float(case.reward[row]), []))
        for t in range(T):
            if case.mask[row, t]:
                response.places.append((row, t))
    groups = [Group(weights[name], list(responses.values())) for name, responses in found.items()]
    return [g for g in groups if len(g.responses) >= least]


def total(stream: np.ndarray, response: Response) -> float:
    return fsum(float(stream[place]) for place in response.places)


def others_mean(values: list[float], i: int) -> float:
    """The leave-one-out mean."""
    return fsum(v for j, v in enumerate(values) if j != i) / (len(values) - 1)


def half_variance(values: list[float]) -> float:
    """½ · sample variance (n-1), in its pairwise form: Σ_{i<j} (v_i - v_j)² / (2 n (n-1))."""
    n = len(values)
    return fsum((values[i] - values[j]) ** 2 for i in range(n) for j in range(i)) / (2 * n * (n - 1))


def regularized(case: Case, group: Group, beta: float, average: str = "sum") -> list[float]:
    """R_i = r_i - β Σ_t (l_it - f_it), or β times their mean; at β = 0 it is r_i, whatever the reference."""
    if beta == 0:
        return [y.reward for y in group.responses]
    out = []
    for y in group.responses:
        ratio = fsum(
            term for place in y.places for term in (float(case.logp[place]), -float(case.ref_logp[place]))
        )
        out.append(y.reward - beta * ratio / (len(y.places) if average == "token" else 1))
    return out


def weighted(case: Case, result: Result, weight: str, weight_max: float = 1.0) -> Result:
    """[25]: the part of response i in the gradient times min(c, exp Σ_t (l_it - f_it)), a constant.

    f is the reference or the recorded behavior.
    """
    loss, grads = result
    anchor = {"reference": case.ref_logp, "behavior": case.behavior_logp}[weight]
    grad = grads["logp"].copy()
    for g in groups_of(case, 1):
        for y in g.responses:
            ratio = fsum(x for p in y.places for x in (float(case.logp[p]), -float(anchor[p])))
            for place in y.places:
                grad[place] *= min(weight_max, exp(ratio))
    return loss, {**grads, "logp": grad}


def imitating(
    case: Case,
    result: Result,
    judged: bool,
    least: int,
    imitation: float,
    imitation_reward: float | None = None,
) -> Result:
    """Plus `imitation` times the mean of -l over the tokens of the imitated responses, each as often as its
    row's weight says.

    They are the winners where the objective is of judged pairs, else the best ones of groups with unequal
    rewards; with `imitation_reward` those of that reward or more. Groups of fewer than `least` responses, or
    without a pair where pairs are `judged`, aren't there.
    """
    loss, grads = result
    winners = {winner for winner, _ in case.pairs}
    places: list[tuple[int, int]] = []
    for g in groups_of(case, least):
        names = {case.response[y.places[0][0]]: y for y in g.responses}
        if judged and not names.keys() & winners:
            continue
        best = max(y.reward for y in g.responses)
        differ = any(y.reward < best for y in g.responses)
        for name, y in names.items():
            takes = name in winners if judged else differ and y.reward == best
            if imitation_reward is not None:
                takes = y.reward >= imitation_reward
            places += y.places if takes else []
    grad = grads["logp"].copy()
    W = fsum(float(case.weight[row]) for row, _ in places)
    for row, t in places:
        grad[row, t] -= imitation * float(case.weight[row]) / W
    loss -= imitation * fsum(float(case.weight[row]) / W * float(case.logp[row, t]) for row, t in places)
    return loss, {**grads, "logp": grad}


def agro(
    case: Case,
    beta: float,
    scale: str = "reward",
    average: str = "sum",
    regularizer: str = "sequence",
) -> Result:
    """[9]; [16] for average="token", where d R_i / d l_it = -β / T_i; [18], [19] for the other regularizers.
    d ½Var(R) / d R_i = (R_i - R̄) / (n-1) = (R_i - R̄_{-i}) / n, and d R_i / d l_it = -β.

    scale="reward" gives the gradient divided by β (its limit at β = 0); the loss stays ½Var(R).
    """
    grad, loss, groups = np.zeros(case.logp.shape), 0.0, groups_of(case, 2)
    kl_grad = np.zeros(case.logp.shape)
    W = fsum(g.weight for g in groups)
    for g in groups:
        R = regularized(case, g, beta, average)
        n = len(R)
        loss += g.weight / W * half_variance(R)
        for i, y in enumerate(g.responses):
            factor = (beta if scale == "loss" else 1.0) / (len(y.places) if average == "token" else 1)
            if regularizer != "sequence":
                r = [z.reward for z in g.responses]
                for k, place in enumerate(y.places):
                    later = y.places[k:] if regularizer == "triangular" else y.places[k + 1 :]
                    pull = fsum(
                        float(case.logp[p]) - float(case.ref_logp[p])
                        if regularizer == "triangular"
                        else float(case.kl[p])
                        for p in later
                    )
                    grad[place] = g.weight / W * factor / n * (-(r[i] - others_mean(r, i)) + beta * pull)
                    kl_grad[place] = g.weight / W * factor / n * beta if regularizer == "local" else 0.0
                continue
            for place in y.places:
                grad[place] = g.weight / W * -(factor / n) * (R[i] - others_mean(R, i))
    return loss, {"logp": grad} | ({"kl": kl_grad} if regularizer == "local" and beta else {})


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
    grad, loss, groups = np.zeros(case.logp.shape), 0.0, groups_of(case, 3 if baseline else 2)
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
            rho = [float(case.logp[p]) - float(case.ref_logp[p]) if beta else 0.0 for p in y.places]
            for t, place in enumerate(y.places):
                before, after = fsum(rho[:t]), fsum(rho[t + 1 :])
                cross = fsum(float(case.kl[p]) for p in y.places[t + 1 :]) if squared == "local" else after
                instead = (rho[t] + after) ** 2 + 2 * before * (rho[t] + cross)
                whole = fsum(rho) ** 2 if squared != "sequence" else instead
                here = second + 0.5 * beta**2 * (instead - whole)
                grad[place] = g.weight / W * (-beta * A[i] + c * here) / n
    return loss, {"logp": grad} | ({"kl": np.zeros(case.logp.shape)} if squared == "local" and beta else {})


def dro(case: Case, beta: float, scale: str = "reward") -> Result:
    """½ (r - β Σ_t (l_t - f_t) - V)², V the mean over a response's rows.

    d/dl_t = -β (…), or without the β; d/dV = -(…).
    """
    grad, value_grad, loss, groups = (
        np.zeros(case.logp.shape),
        np.zeros(len(case.mask)),
        0.0,
        groups_of(case, 1),
    )
    W = fsum(g.weight for g in groups)
    for g in groups:
        n = len(g.responses)
        for y, R in zip(g.responses, regularized(case, g, beta)):
            rows = sorted({row for row, _ in y.places})
            off = R - fsum(float(case.value[row]) for row in rows) / len(rows)
            loss += g.weight / W / n * 0.5 * off * off
            for row in rows:
                value_grad[row] = g.weight / W / n * -off / len(rows)
            for place in y.places:
                grad[place] = g.weight / W / n * -off * (beta if scale == "loss" else 1.0)
    return loss, {"logp": grad, "value": value_grad}


def prefix_consistency(case: Case, beta: float, scale: str = "reward") -> Result:
    """Mean of ½ (C_i - C_j)² over the pairs of positions of a response, written out pair by pair.

    C at the k-th token is V there, plus all token rewards before it in the row, minus β ρ of the tokens in
    the mask before it. After the last one it is r - β Σ ρ. d C_k / d l_t = -β (or -1, as `scale` says) for
    the tokens t before k.
    """
    grad, value_grad, loss = np.zeros(case.logp.shape), np.zeros(case.logp.shape), 0.0
    groups = groups_of(case, 1)
    W = fsum(g.weight for g in groups)
    for g in groups:
        for y in g.responses:
            share, K = g.weight / W / len(g.responses), len(y.places)
            rho = [float(case.logp[p]) - float(case.ref_logp[p]) if beta else 0.0 for p in y.places]
            C = []
            for k, (row, at) in enumerate(y.places):
                dense = fsum(float(x) for x in case.token_reward[row, :at] if not math.isnan(x))
                C.append(float(case.prefix_value[row, at]) + dense - beta * fsum(rho[:k]))
            C.append(y.reward - beta * fsum(rho))
            pairs = [(i, j) for j in range(K + 1) for i in range(j)]
            for i, j in pairs:
                off = (C[i] - C[j]) / len(pairs)
                loss += share * 0.5 * off * (C[i] - C[j])
                if i < K:
                    value_grad[y.places[i]] += share * off
                if j < K:
                    value_grad[y.places[j]] -= share * off
                for t in range(i, j):  # C_j has these tokens' ρ, C_i hasn't
                    grad[y.places[t]] += share * off * (beta if scale == "loss" else 1.0)
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

    b is the group's mean of a, β₁ log mean exp(r/β₁), or stored. d a_i / d l_it = -β. A mean b moves too:
    d (a_i - ā) / d a_j = δ_ij - 1/n, and Σ_i (a_i - ā) = 0 leaves δ_ij alone.
    """
    f = case.ref_logp if anchor == "reference" else case.behavior_logp
    grad, loss, groups = np.zeros(case.logp.shape), 0.0, groups_of(case, 1 if baseline == "stored" else 2)
    W = fsum(g.weight for g in groups)
    for g in groups:
        n = len(g.responses)
        a = [
            y.reward - beta * fsum(t for p in y.places for t in (float(case.logp[p]), -float(f[p])))
            for y in g.responses
        ]
        rewards, beta1 = [y.reward for y in g.responses], value_beta or beta
        most = max(rewards)
        soft = most + beta1 * log(fsum(exp((r - most) / beta1) for r in rewards) / n)
        stored = float(case.stored_value[g.responses[0].places[0][0]])
        b = {"mean": fsum(a) / n, "soft": soft, "stored": stored}[baseline]
        if scale == "half_variance":
            factor = 1 / (2 * (n - 1))
        else:
            factor = {"square": 1 / n, "trajectory": 1 / (n * beta * beta)}.get(scale) or n / (n - 1)
        loss += g.weight / W * factor * fsum((x - b) ** 2 for x in a)
        for x, y in zip(a, g.responses):
            for place in y.places:
                grad[place] = g.weight / W * factor * 2 * (x - b) * -beta
    return loss, {"logp": grad}


def rloo(case: Case, beta: float = 0.0) -> Result:
    """-(1/n) Σ_i (a_i - ā_{-i}) l_i, where a_i = r_i - β (l_i - f_i) is a number, not a function of l."""
    grad, loss, groups = np.zeros(case.logp.shape), 0.0, groups_of(case, 2)
    W = fsum(g.weight for g in groups)
    for g in groups:
        a = regularized(case, g, beta)
        n = len(a)
        for i, y in enumerate(g.responses):
            advantage = a[i] - others_mean(a, i)
            loss += g.weight / W * -advantage / n * total(case.logp, y)
            for place in y.places:
                grad[place] = g.weight / W * -advantage / n
    return loss, {"logp": grad}


def reinforce(case: Case, baseline: str | float = "none") -> Result:
    """-(1/n) Σ_i (r_i - b) l_i; b is 0, the mean reward of the group, or a number."""
    grad, loss, groups = np.zeros(case.logp.shape), 0.0, groups_of(case, 2 if baseline == "mean" else 1)
    W = fsum(g.weight for g in groups)
    for g in groups:
        n = len(g.responses)
        if baseline == "none":
            b = 0.0
        elif baseline == "mean":
            b = fsum(y.reward for y in g.responses) / n
        else:
            b = float(baseline)
        for y in g.responses:
            loss += g.weight / W * -(y.reward - b) / n * total(case.logp, y)
            for place in y.places:
                grad[place] = g.weight / W * -(y.reward - b) / n
    return loss, {"logp": grad}


def kl_pg(case: Case, beta: float) -> Result:
    """[15]: -(1/n) Σ_i (r_i - r̄_{-i}) l_i + (β/n) Σ_i Σ_t KL_it; the second sum is a stream of its own."""
    grad, kl_grad, loss, groups = (
        np.zeros(case.logp.shape),
        np.zeros(case.logp.shape),
        0.0,
        groups_of(case, 2),
    )
    W = fsum(g.weight for g in groups)
    for g in groups:
        r = [y.reward for y in g.responses]
        n = len(r)
        for i, y in enumerate(g.responses):
            advantage = r[i] - others_mean(r, i)
            loss += g.weight / W * (-advantage * total(case.logp, y) + beta * total(case.kl, y)) / n
            for place in y.places:
                grad[place] = g.weight / W * -advantage / n
                kl_grad[place] = g.weight / W * beta / n
    return loss, {"logp": grad, "kl": kl_grad}


def grpo(
    case: Case,
    ratio: str = "behavior",
    clip: tuple[float, float] = (0.2, 0.2),
    std: bool = True,
    beta: float = 0.0,
) -> Result:
    """Tokens: -min(w A, clamp(w, 1-ε₁, 1+ε₂) A) + β k3, w = exp(l - b).

    The mean in a response, in a group, over groups. A = (r - r̄) / (std + 1e-6). d(w A)/dl = w A where the
    first branch of the min is taken, 0 where the clamp is taken and limits w. k3 = exp(f-l) - (f-l) - 1, so d
    k3/dl = 1 - exp(f-l).
    """
    grad, loss, groups = np.zeros(case.logp.shape), 0.0, groups_of(case, 2)
    W = fsum(g.weight for g in groups)
    anchor = case.behavior_logp if ratio == "behavior" else case.old_logp
    low, high = 1 - clip[0], 1 + clip[1]
    for g in groups:
        r = [y.reward for y in g.responses]
        n = len(r)
        mean = fsum(r) / n
        spread = math.sqrt(fsum((x - mean) ** 2 for x in r) / (n - 1)) + 1e-6 if std else 1.0
        for i, y in enumerate(g.responses):
            A = (r[i] - mean) / spread
            share = g.weight / W / n / len(y.places)
            for place in y.places:
                w = exp(float(case.logp[place]) - float(anchor[place]))
                clamped = min(max(w, low), high)
                term, slope = (-w * A, -w * A) if w * A <= clamped * A else (-clamped * A, 0.0)
                if beta:
                    u = float(case.ref_logp[place]) - float(case.logp[place])
                    term += beta * (math.expm1(u) - u)
                    slope += beta * -math.expm1(u)
                loss += share * term
                grad[place] = share * slope
    return loss, {"logp": grad}


def gspo(
    case: Case, ratio: str = "behavior", clip: tuple[float, float] = (3e-4, 4e-4), std: bool = True
) -> Result:
    """-min(s A, clamp(s) A), s = exp(mean_t (l_t - b_t)).

    ds/dl_t = s/T; 0 where the clamp is taken and s is outside its limits.
    """
    grad, loss, groups = np.zeros(case.logp.shape), 0.0, groups_of(case, 2)
    W = fsum(g.weight for g in groups)
    anchor = case.behavior_logp if ratio == "behavior" else case.old_logp
    for g in groups:
        r = [y.reward for y in g.responses]
        n = len(r)
        mean = fsum(r) / n
        spread = math.sqrt(fsum((x - mean) ** 2 for x in r) / (n - 1)) + 1e-6 if std else 1.0
        for y, reward in zip(g.responses, r):
            A, T, share = (reward - mean) / spread, len(y.places), g.weight / W / n
            s = exp(fsum(x for p in y.places for x in (float(case.logp[p]), -float(anchor[p]))) / T)
            clamped = min(max(s, 1 - clip[0]), 1 + clip[1])
            loss -= share * min(s * A, clamped * A)
            for place in y.places:
                grad[place] = -share * s * A / T if s * A <= clamped * A else 0.0
    return loss, {"logp": grad}


def topr(
    case: Case,
    baseline: float = 0.0,
    positive: tuple[float, float] = (1.0, 1.0),
    negative: tuple[float, float] = (0.0, 1.0),
    ratio: str = "sequence",
) -> Result:
    """-(r - b) mean_t k_t l_t.

    k is a number: exp of Σ (l - b), of its mean or of a token's, within the limits of r's sign.
    """
    grad, loss, groups = np.zeros(case.logp.shape), 0.0, groups_of(case, 1)
    W = fsum(g.weight for g in groups)
    for g in groups:
        for y in g.responses:
            T, signal = len(y.places), y.reward - baseline
            low, high = positive if signal > 0 else negative
            logs = [float(case.logp[p]) - float(case.behavior_logp[p]) for p in y.places]
            whole = fsum(x for p in y.places for x in (float(case.logp[p]), -float(case.behavior_logp[p])))
            for place, own in zip(y.places, logs):
                log_k = {"sequence": whole, "mean": whole / T, "token": own}[ratio]
                k = min(max(exp(min(log_k, 700.0)), low), high)
                share = g.weight / W / len(g.responses) * signal * k / T
                loss -= share * float(case.logp[place])
                grad[place] = -share
    return loss, {"logp": grad}


@dataclass
class Judgment:
    share: float  # of the loss: the group's weight over all, over the pairs of the group
    rewards: tuple[float, float]
    margin: float  # β h, h = ρ of the winner - ρ of the loser
    votes: tuple[float, float]
    places: tuple[list[tuple[int, int]], list[tuple[int, int]]]


def judgments(case: Case, beta: float) -> list[Judgment]:
    """Groups without a pair are dropped; the others keep their weight, and the pairs in one are equal."""
    places: dict[Hashable, list[tuple[int, int]]] = {}
    reward, group = dict(zip(case.response, case.reward)), dict(zip(case.response, case.group))
    weight = dict(zip(case.group, case.weight))
    for row, t in np.argwhere(case.mask).tolist():
        places.setdefault(case.response[row], []).append((row, t))
    judged = [group[winner] for winner, _ in case.pairs]
    W = fsum(weight[g] for g in set(judged))
    out = []
    for (winner, loser), votes in zip(case.pairs, case.votes):
        assert group[winner] == group[loser]
        h = fsum(
            sign * term
            for sign, y in ((1, winner), (-1, loser))
            for p in places[y]
            for term in (float(case.logp[p]), -float(case.ref_logp[p]))
        )
        g = group[winner]
        out.append(
            Judgment(
                weight[g] / W / judged.count(g),
                (reward[winner], reward[loser]),
                beta * h,
                votes,
                (places[winner], places[loser]),
            )
        )
    return out


def on_pairs(case: Case, terms: Sequence[tuple[Judgment, float, float]], beta: float) -> Result:
    """Σ share · value. `terms`: value and slope in β h; d (β h) / d l_wt = β and d (β h) / d l_lt = -β."""
    grad = np.zeros(case.logp.shape)
    for j, _, slope in terms:
        for sign, places in zip((1, -1), j.places):
            for place in places:
                grad[place] += j.share * slope * sign * beta
    return fsum(j.share * value for j, value, _ in terms), {"logp": grad}


def pair_consistency(case: Case, beta: float, gap: float | str = 0.5, votes: str = "ignore") -> Result:
    """[23] squared: ¼ (gap - β h)².

    The gap is r_w - r_l; of a number c it is c, or with votes c (v_w - v_l) / (v_w + v_l + 2).
    """
    terms = []
    for j in judgments(case, beta):
        if gap == "reward":
            off = j.rewards[0] - j.rewards[1] - j.margin
        else:
            w, x = j.votes
            off = float(gap) * ((w - x) / (w + x + 2) if votes == "mean" else 1.0) - j.margin
        terms.append((j, off * off / 4, -off / 2))
    return on_pairs(case, terms, beta)


def log_sigmoid(z: float) -> float:
    return -math.log1p(exp(-z)) if z > 0 else z - math.log1p(exp(z))


def dpo(case: Case, beta: float, label_smoothing: float = 0.0, votes: str = "ignore") -> Result:
    """-p log σ(z) - q log σ(-z), z = β h, q = 1 - p.

    d log σ(z) / dz = σ(-z), so the slope is q σ(z) - p σ(-z).
    """
    terms = []
    for j in judgments(case, beta):
        w, x = j.votes
        share = (
            (x + 1) / (w + x + 2) if votes == "mean" else 0.0
        )  # of those who would have it the other way round
        q = share * (1 - label_smoothing) + (1 - share) * label_smoothing
        z = j.margin
        value = -(1 - q) * log_sigmoid(z) - q * log_sigmoid(-z)
        terms.append((j, value, q * exp(log_sigmoid(z)) - (1 - q) * exp(log_sigmoid(-z))))
    return on_pairs(case, terms, beta)


def sft(case: Case) -> Result:
    """-log-prob, mean over all tokens of the step; a token counts as often as its row's weight says."""
    grad, B = np.zeros(case.logp.shape), len(case.mask)
    places = [(i, t) for i in range(B) for t in range(case.mask.shape[1]) if case.mask[i, t]]
    W = fsum(float(case.weight[i]) for i, _ in places)
    loss = fsum(-float(case.weight[i]) / W * float(case.logp[i, t]) for i, t in places)
    for i, t in places:
        grad[i, t] = -float(case.weight[i]) / W
    return loss, {"logp": grad}
