"""See `independent.base`."""

from __future__ import annotations

import math
from math import exp, fsum

import numpy as np

from independent.base import (
    Case,
    Group,
    Pair,
    Place,
    Response,
    Result,
    averaged,
    clipped,
    combined,
    mean_of,
    over_tokens,
    quantile,
    standardized,
)
from independent.preference import sigmoid


def of_own(group: Group) -> list[Response]:
    return [y for y in group.responses if y.role != "expert"]


def chord(
    case: Case,
    mu: float = 0.1,
    expert_weight: str = "phi",
    ratio: str = "behavior",
    clip: Pair = (0.2, 0.2),
) -> Result:
    """(1-μ)/W Σ w_g u over own tokens + μ/V Σ -w_g φ l over the expert's, W and V the sums of w_g.

    u = -min(w A, clamp(w) A), du/dl = -w A or 0; φ is a constant, so its term has the derivative -φ.
    """
    own, expert = [], []
    for g in case.groups(1):
        mine = of_own(g)
        if len(mine) == 1:  # left out, if it came so far
            continue
        own.append((Group(g.weight, mine), standardized([y.reward for y in mine], True) if mine else []))
        theirs = [y for y in g.responses if y.role == "expert"]
        expert.append((Group(g.weight, theirs), [0.0] * len(theirs)))

    def of_policy(A: float, _: Response, place: Place) -> Pair:
        return clipped(case.ratio(place, ratio), A, 1 - clip[0], 1 + clip[1])

    def of_expert(_: float, y: Response, place: Place) -> Pair:
        p = exp(float(case.logp[place]))
        phi = {"phi": p * (1 - p), "probability": p, "none": 1.0}[expert_weight]
        return -phi * float(case.logp[place]), -phi

    return combined(
        (1 - mu, averaged(case, own, "token", of_policy)), (mu, averaged(case, expert, "token", of_expert))
    )


def luffy(
    case: Case,
    gamma: float = 0.1,
    ratio: str = "behavior",
    clip: Pair = (1.0, math.inf),
    dual_clip: float | None = None,
) -> Result:
    """-A p/(p+γ) on the expert's tokens, whose derivative in log p is -A γ p/(p+γ)²; -A w on own ones."""

    def token(A: float, y: Response, place: Place) -> Pair:
        if y.role == "expert":
            f = sigmoid(float(case.logp[place]) - math.log(gamma))
            return -A * f, -A * f * (1 - f)
        return clipped(case.ratio(place, ratio), A, 1 - clip[0], 1 + clip[1], dual_clip)

    return over_tokens(case, token, False, 1.0)


def ampo(case: Case) -> Result:
    """The code's numbers: clip 0.2 on both sides, c = 3, γ = 0.1, no standard deviation."""
    return luffy(case, gamma=0.1, clip=(0.2, 0.2), dual_clip=3.0)


def guide(
    case: Case,
    gamma: str | float = "quantile",
    ratio: str = "behavior",
    clip: Pair = (0.2, 0.2),
) -> Result:
    """-A w/(w+γ) on hinted tokens, γ a constant: with f = w/(w+γ) its derivative in log w is -A f (1-f)."""
    hinted = [
        (case.log_ratio(place, ratio), g.weight)
        for g in case.groups(2)
        for y in g.responses
        if y.hinted
        for place in y.places
    ]
    log_gamma = quantile(hinted, 0.9) if hinted else 0.0
    if gamma != "quantile":
        log_gamma = math.log(gamma)

    def token(A: float, y: Response, place: Place) -> Pair:
        if y.hinted:
            f = sigmoid(case.log_ratio(place, ratio) - log_gamma)
            return -A * f, -A * f * (1 - f)
        return clipped(case.ratio(place, ratio), A, 1 - clip[0], 1 + clip[1])

    return over_tokens(case, token, True, 1.0)


def tempsamp_r1(
    case: Case,
    fix: str = "shape",
    fix_at: float | None = None,
    ratio: str = "behavior",
    clip: Pair = (0.2, 0.2),
    beta: float = 0.0,
) -> Result:
    """Own tokens as in GRPO; an expert's add -A to the loss and -A to the derivative in l.

    Token mean in a response, mean in a group. k3 = exp(f-l) - (f-l) - 1.
    """

    def token(A: float, y: Response, place: Place) -> Pair:
        term, slope = -A, -A
        if y.role != "expert":
            term, slope = clipped(case.ratio(place, ratio), A, 1 - clip[0], 1 + clip[1])
        if beta:
            u = -case.log_ratio(place, "reference")
            term += beta * (math.expm1(u) - u)
            slope -= beta * math.expm1(u)
        return term, slope

    return averaged(case, [(g, fixed(g, fix, fix_at)) for g in case.groups(2)], "response", token)


def fixed(group: Group, fix: str, at: float | None) -> list[float]:
    """Advantages of a group."""
    if fix == "anchor":
        own = standardized([y.reward for y in of_own(group)], True)
        rest = iter(own)
        factor = 1.2 if at is None else at
        return [factor * max(own) if y.role == "expert" else next(rest) for y in group.responses]
    tau = 0.8 if at is None else at
    rewards = group.rewards
    if fix == "cap":
        most = tau * max(rewards)
        rewards = [min(r, most) if y.role == "expert" else r for r, y in zip(rewards, group.responses)]
    else:
        rewards = [
            tau + 0.01 * math.log(r - tau + 1) if r >= tau else tau - (exp(tau - r) - 1) / (math.e - 1)
            for r in rewards
        ]
    return standardized(rewards, True)


def hnpg(case: Case, offline: float = 1.0) -> Result:
    """Σ w/W [-(r - V) l + ½ (r - V)²] over own responses, V in the first term a number, and ½ (r - V)² over
    the expert's, `offline` w/U each; W and U are the sums of the weights w of their groups.

    d/dl = -w/W (r - V), d/dV = -(r - V) of the squares; V is the mean over a response's rows.
    """
    grad, value_grad, loss = np.zeros(case.logp.shape), np.zeros(len(case.mask)), 0.0
    every = [(g.weight, y) for g in case.groups(1) for y in g.responses]
    for own in (True, False):
        part = [(w, y) for w, y in every if (y.role != "expert") == own]
        W = fsum(w for w, _ in part)
        for w, y in part:
            off = y.reward - mean_of([float(case.value[row]) for row in y.rows])
            share = w / W * (1.0 if own else offline)
            loss += share * 0.5 * off * off
            for row in y.rows:
                value_grad[row] = -share * off / len(y.rows)
            for place in y.places if own else []:
                loss -= share * off * float(case.logp[place])
                grad[place] = -share * off
    return loss, {"logp": grad, "value": value_grad}
