"""See `independent.base`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import exp, fsum

import numpy as np

from independent.base import Case, Result


@dataclass
class Judgment:
    share: float  # of the loss: the group's weight over all, over the pairs of the group
    rewards: tuple[float, float]
    rho: tuple[float, float]  # of the winner and of the loser
    votes: tuple[float, float]
    places: tuple[list[tuple[int, int]], list[tuple[int, int]]]

    @property
    def h(self) -> float:
        return self.rho[0] - self.rho[1]

    @property
    def p(self) -> float:
        """That the winner is the better one, by its votes."""
        return (self.votes[0] + 1) / (self.votes[0] + self.votes[1] + 2)


def judgments(case: Case, f: np.ndarray | None, average: str = "sum") -> list[Judgment]:
    """Groups without a pair are dropped; the others keep their weight, and the pairs in one are equal.

    ρ = Σ_t (l_t - f_t) of a response, or their mean over its tokens; f = 0 for None.
    """
    places: dict[Hashable, list[tuple[int, int]]] = {}
    reward, group = dict(zip(case.response, case.reward)), dict(zip(case.response, case.group))
    weight = dict(zip(case.group, case.weight))
    for row, t in np.argwhere(case.mask).tolist():
        places.setdefault(case.response[row], []).append((row, t))
    judged = [group[winner] for winner, _ in case.pairs]
    W = fsum(weight[g] for g in set(judged))

    def rho(y: Hashable) -> float:
        total = fsum(x for p in places[y] for x in (float(case.logp[p]), 0.0 if f is None else -float(f[p])))
        return total / len(places[y]) if average == "token" else total

    out = []
    for (winner, loser), votes in zip(case.pairs, case.votes):
        assert group[winner] == group[loser]
        out.append(
            Judgment(
                weight[group[winner]] / W / judged.count(group[winner]),
                (reward[winner], reward[loser]),
                (rho(winner), rho(loser)),
                votes,
                (places[winner], places[loser]),
            )
        )
    return out


Term = tuple[Judgment, float, float, float]  # value, and slopes in ρ of the winner and of the loser


def on_pairs(case: Case, terms: Sequence[Term], average: str = "sum") -> Result:
    """Σ share · value; d ρ / d l_t = 1, or 1/T with average "token"."""
    grad = np.zeros(case.logp.shape)
    for j, _, *slopes in terms:
        for slope, places in zip(slopes, j.places):
            for place in places:
                grad[place] += j.share * slope / (len(places) if average == "token" else 1)
    return fsum(j.share * value for j, value, _, _ in terms), {"logp": grad}


def of_anchor(case: Case, anchor: str) -> np.ndarray | None:
    return {"reference": case.ref_logp, "behavior": case.behavior_logp, "none": None}[anchor]


def pair_consistency(
    case: Case, beta: float, gap: float | str = 0.5, votes: str = "ignore", anchor: str = "reference"
) -> Result:
    """[23] squared: ¼ (gap - β h)².

    The gap is r_w - r_l; of a number c it is c, or with votes c (v_w - v_l) / (v_w + v_l + 2).
    """
    terms: list[Term] = []
    for j in judgments(case, of_anchor(case, anchor)):
        if gap == "reward":
            off = j.rewards[0] - j.rewards[1] - beta * j.h
        else:
            w, x = j.votes
            off = float(gap) * ((w - x) / (w + x + 2) if votes == "mean" else 1.0) - beta * j.h
        slope = off / 2 * -beta
        terms.append((j, off * off / 4, slope, -slope))
    return on_pairs(case, terms)


def log_sigmoid(z: float) -> float:
    return -math.log1p(exp(-z)) if z > 0 else z - math.log1p(exp(z))


def sigmoid(z: float) -> float:
    return exp(log_sigmoid(z))


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
    terms: list[Term] = []
    for j in judgments(case, of_anchor(case, anchor)):
        share = 1 - j.p if votes == "mean" else 0.0  # of those who would have it the other way round
        q = share * (1 - label_smoothing) + (1 - share) * label_smoothing
        z, chosen = beta * j.h, beta * j.rho[0]
        value = -(1 - q) * log_sigmoid(z) - q * log_sigmoid(-z) - winner * log_sigmoid(chosen)
        slope = beta * (q * sigmoid(z) - (1 - q) * sigmoid(-z))
        terms.append((j, value, slope - winner * beta * sigmoid(-chosen), -slope))
    return on_pairs(case, terms)


def gpo(case: Case, beta: float, loss: str = "exponential") -> Result:
    """f(z), z = β h. The slope is -exp(-z) for exp(-z), -2 max(0, 1 - z) for its square, and
    -2 σ(-z)² σ(z) for σ(-z)²."""
    terms: list[Term] = []
    for j in judgments(case, case.ref_logp):
        z = beta * j.h
        value, slope = {
            "exponential": (exp(-z), -exp(-z)),
            "truncated_square": (max(0.0, 1 - z) ** 2, -2 * max(0.0, 1 - z)),
            "savage": (sigmoid(-z) ** 2, -2 * sigmoid(-z) ** 2 * sigmoid(z)),
        }[loss]
        terms.append((j, value, beta * slope, -beta * slope))
    return on_pairs(case, terms)


def ipo(
    case: Case, beta: float, votes: str = "ignore", anchor: str = "reference", average: str = "sum"
) -> Result:
    """(h - 1/(2τ))², or with votes (h - (2p - 1)/(2τ))²; d/dh = 2 (…)."""
    terms: list[Term] = []
    for j in judgments(case, of_anchor(case, anchor), average):
        p = j.p if votes == "mean" else 1.0
        off = j.h - (2 * p - 1) / (2 * beta)
        terms.append((j, off * off, 2 * off, -2 * off))
    return on_pairs(case, terms, average)


def vipo(case: Case, beta: float) -> Result:
    """p (h - 1/(2τ))² + (1 - p)(h + 1/(2τ))² less its least value, which is p (1 - p)/τ²."""
    terms: list[Term] = []
    for j in judgments(case, case.ref_logp):
        p, up, down = j.p, j.h - 1 / (2 * beta), j.h + 1 / (2 * beta)
        value = p * up * up + (1 - p) * down * down - p * (1 - p) / beta**2
        slope = 2 * (p * up + (1 - p) * down)
        terms.append((j, value, slope, -slope))
    return on_pairs(case, terms)


def vdpo(case: Case, beta: float) -> Result:
    """-p log σ(βh) - (1 - p) log σ(-βh)."""
    terms: list[Term] = []
    for j in judgments(case, case.ref_logp):
        p, z = j.p, beta * j.h
        slope = beta * ((1 - p) * sigmoid(z) - p * sigmoid(-z))
        terms.append((j, -p * log_sigmoid(z) - (1 - p) * log_sigmoid(-z), slope, -slope))
    return on_pairs(case, terms)


def agent_q(case: Case, beta: float) -> Result:
    """-log σ(βh), h to the recorded log-probs."""
    terms: list[Term] = []
    for j in judgments(case, case.behavior_logp):
        slope = -beta * sigmoid(-beta * j.h)
        terms.append((j, -log_sigmoid(beta * j.h), slope, -slope))
    return on_pairs(case, terms)


def opa_dpo(case: Case, beta: float = 0.1) -> Result:
    """-log σ(βh) - log σ(βρ_w)."""
    terms: list[Term] = []
    for j in judgments(case, case.ref_logp):
        slope, own = -beta * sigmoid(-beta * j.h), -beta * sigmoid(-beta * j.rho[0])
        value = -log_sigmoid(beta * j.h) - log_sigmoid(beta * j.rho[0])
        terms.append((j, value, slope + own, -slope))
    return on_pairs(case, terms)


def slic(case: Case, beta: float, margin: float = 1.0, anchor: str = "reference") -> Result:
    """max(0, δ - βh); slope -β below δ."""
    terms: list[Term] = []
    for j in judgments(case, of_anchor(case, anchor)):
        short = margin - beta * j.h
        slope = -beta if short > 0 else 0.0
        terms.append((j, max(0.0, short), slope, -slope))
    return on_pairs(case, terms)


def seppo(case: Case, beta: float, doubt: str = "flip") -> Result:
    """-log σ(z), z = β(ρ_w - s ρ_0), s = 1, or -1 or 0 where ρ_w < 0; d z / d ρ_0 = -β s."""
    terms: list[Term] = []
    for j in judgments(case, case.ref_logp):
        s = 1.0
        if j.rho[0] < 0:
            s = -1.0 if doubt == "flip" else 0.0
        z = beta * (j.rho[0] - s * j.rho[1])
        terms.append((j, -log_sigmoid(z), -beta * sigmoid(-z), beta * s * sigmoid(-z)))
    return on_pairs(case, terms)
