"""See `independent.base`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import exp, fsum

import numpy as np

from independent.base import Case, Pair, Place, Result


@dataclass
class Judgment:
    share: float  # of the loss: the group's weight over all, over the pairs of the group
    rewards: tuple[float, float]
    rho: tuple[float, float]  # of the winner and of the loser
    votes: tuple[float, float]
    places: tuple[list[Place], list[Place]]

    @property
    def h(self) -> float:
        return self.rho[0] - self.rho[1]

    @property
    def p(self) -> float:
        """That the winner is the better one, by its votes."""
        return (self.votes[0] + 1) / (self.votes[0] + self.votes[1] + 2)


def judgments(case: Case, anchor: str, average: str) -> list[Judgment]:
    """Groups without a pair are dropped; the others keep their weight, and the pairs in one are equal.

    ρ = Σ_t (l_t - f_t) of a response, or their mean over its tokens; f = 0 for "none".
    """
    places: dict[Hashable, list[Place]] = {}
    reward, group = dict(zip(case.response, case.reward)), dict(zip(case.response, case.group))
    weight = dict(zip(case.group, case.weight))
    for row, t in np.argwhere(case.mask).tolist():
        places.setdefault(case.response[row], []).append((row, t))
    judged = [group[winner] for winner, _ in case.pairs]
    W = fsum(weight[g] for g in set(judged))
    f = np.zeros_like(case.logp) if anchor == "none" else case.anchor(anchor)

    def rho(y: Hashable) -> float:
        total = fsum(x for p in places[y] for x in (float(case.logp[p]), -float(f[p])))
        return total / len(places[y]) if average == "token" else total

    out = []
    for (winner, loser), votes in zip(case.pairs, case.votes):
        assert group[winner] == group[loser]
        share = weight[group[winner]] / W / judged.count(group[winner])
        rewards, of_both = (reward[winner], reward[loser]), (places[winner], places[loser])
        out.append(Judgment(share, rewards, (rho(winner), rho(loser)), votes, of_both))
    return out


def on_pairs(
    case: Case,
    term: Callable[[Judgment], tuple[float, float, float]],
    anchor: str = "reference",
    average: str = "sum",
) -> Result:
    """Σ share · value; a term is its value, and its slopes in ρ of the winner and of the loser.

    d ρ / d l_t = 1, or 1/T with average "token".
    """
    grad, loss = np.zeros(case.logp.shape), 0.0
    for j in judgments(case, anchor, average):
        value, *slopes = term(j)
        loss += j.share * value
        for slope, places in zip(slopes, j.places):
            for place in places:
                grad[place] += j.share * slope / (len(places) if average == "token" else 1)
    return loss, {"logp": grad}


def of_gap(
    case: Case, term: Callable[[Judgment], Pair], anchor: str = "reference", average: str = "sum"
) -> Result:
    """Terms of h alone: their value and their slope in h."""

    def of_both(j: Judgment) -> tuple[float, float, float]:
        value, slope = term(j)
        return value, slope, -slope

    return on_pairs(case, of_both, anchor, average)


def log_sigmoid(z: float) -> float:
    return -math.log1p(exp(-z)) if z > 0 else z - math.log1p(exp(z))


def sigmoid(z: float) -> float:
    return exp(log_sigmoid(z))


def pair_consistency(
    case: Case, beta: float, gap: float | str = 0.5, votes: str = "ignore", anchor: str = "reference"
) -> Result:
    """[23] squared: ¼ (gap - β h)².

    The gap is r_w - r_l; of a number c it is c, or with votes c (v_w - v_l) / (v_w + v_l + 2).
    """

    def term(j: Judgment) -> Pair:
        if gap == "reward":
            off = j.rewards[0] - j.rewards[1] - beta * j.h
        else:
            w, x = j.votes
            off = float(gap) * ((w - x) / (w + x + 2) if votes == "mean" else 1.0) - beta * j.h
        return off * off / 4, off / 2 * -beta

    return of_gap(case, term, anchor)


def dpo(
    case: Case,
    beta: float,
    label_smoothing: float = 0.0,
    votes: str = "ignore",
    anchor: str = "reference",
    winner: float = 0.0,
) -> Result:
    """-p log σ(z) - q log σ(-z), z = β h, q = 1 - p, and -k log σ(β ρ_w).

    d log σ(z) / dz = σ(-z), so the slope is q σ(z) - p σ(-z), and -k σ(-β ρ_w) in ρ_w.
    """

    def term(j: Judgment) -> tuple[float, float, float]:
        share = 1 - j.p if votes == "mean" else 0.0  # of those who would have it the other way round
        q = share * (1 - label_smoothing) + (1 - share) * label_smoothing
        z, chosen = beta * j.h, beta * j.rho[0]
        value = -(1 - q) * log_sigmoid(z) - q * log_sigmoid(-z) - winner * log_sigmoid(chosen)
        slope = beta * (q * sigmoid(z) - (1 - q) * sigmoid(-z))
        return value, slope - winner * beta * sigmoid(-chosen), -slope

    return on_pairs(case, term, anchor)


def gpo(case: Case, beta: float, loss: str = "exponential") -> Result:
    """f(z), z = β h. The slope is -exp(-z) for exp(-z), -2 max(0, 1 - z) for its square, and
    -2 σ(-z)² σ(z) for σ(-z)²."""

    def term(j: Judgment) -> Pair:
        z = beta * j.h
        value, slope = {
            "exponential": (exp(-z), -exp(-z)),
            "truncated_square": (max(0.0, 1 - z) ** 2, -2 * max(0.0, 1 - z)),
            "savage": (sigmoid(-z) ** 2, -2 * sigmoid(-z) ** 2 * sigmoid(z)),
        }[loss]
        return value, beta * slope

    return of_gap(case, term)


def ipo(
    case: Case, beta: float, votes: str = "ignore", anchor: str = "reference", average: str = "sum"
) -> Result:
    """(h - 1/(2τ))², or with votes (h - (2p - 1)/(2τ))²; d/dh = 2 (…)."""

    def term(j: Judgment) -> Pair:
        off = j.h - (2 * (j.p if votes == "mean" else 1.0) - 1) / (2 * beta)
        return off * off, 2 * off

    return of_gap(case, term, anchor, average)


def vipo(case: Case, beta: float) -> Result:
    """p (h - 1/(2τ))² + (1 - p)(h + 1/(2τ))² less its least value, which is p (1 - p)/τ²."""

    def term(j: Judgment) -> Pair:
        p, up, down = j.p, j.h - 1 / (2 * beta), j.h + 1 / (2 * beta)
        value = p * up * up + (1 - p) * down * down - p * (1 - p) / beta**2
        return value, 2 * (p * up + (1 - p) * down)

    return of_gap(case, term)


def vdpo(case: Case, beta: float) -> Result:
    """-p log σ(βh) - (1 - p) log σ(-βh)."""

    def term(j: Judgment) -> Pair:
        p, z = j.p, beta * j.h
        value = -p * log_sigmoid(z) - (1 - p) * log_sigmoid(-z)
        return value, beta * ((1 - p) * sigmoid(z) - p * sigmoid(-z))

    return of_gap(case, term)


def agent_q(case: Case, beta: float) -> Result:
    """-log σ(βh), h to the recorded log-probs."""
    return of_gap(case, lambda j: (-log_sigmoid(beta * j.h), -beta * sigmoid(-beta * j.h)), "behavior")


def opa_dpo(case: Case, beta: float = 0.1) -> Result:
    """-log σ(βh) - log σ(βρ_w)."""

    def term(j: Judgment) -> tuple[float, float, float]:
        slope, own = -beta * sigmoid(-beta * j.h), -beta * sigmoid(-beta * j.rho[0])
        value = -log_sigmoid(beta * j.h) - log_sigmoid(beta * j.rho[0])
        return value, slope + own, -slope

    return on_pairs(case, term)


def slic(case: Case, beta: float, margin: float = 1.0, anchor: str = "reference") -> Result:
    """max(0, δ - βh); slope -β below δ."""

    def term(j: Judgment) -> Pair:
        short = margin - beta * j.h
        return max(0.0, short), -beta if short > 0 else 0.0

    return of_gap(case, term, anchor)


def seppo(case: Case, beta: float, doubt: str = "flip") -> Result:
    """-log σ(z), z = β(ρ_w - s ρ_0), s = 1, or -1 or 0 where ρ_w < 0; d z / d ρ_0 = -β s."""

    def term(j: Judgment) -> tuple[float, float, float]:
        s = 1.0
        if j.rho[0] < 0:
            s = -1.0 if doubt == "flip" else 0.0
        z = beta * (j.rho[0] - s * j.rho[1])
        return -log_sigmoid(z), -beta * sigmoid(-z), beta * s * sigmoid(-z)

    return on_pairs(case, term)
