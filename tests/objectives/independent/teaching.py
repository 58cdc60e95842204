"""See `independent.base`.

All are means over the tokens of the step, each as often as its row's weight says.
"""

from __future__ import annotations

from math import exp, fsum, log

import numpy as np

from independent.base import Case, Result, groups_of


def tokens(case: Case) -> list[tuple[float, tuple[int, int]]]:
    """Each token's share in the mean, and its place."""
    B, T = case.mask.shape
    found = [(float(case.weight[i]), (i, t)) for i in range(B) for t in range(T) if case.mask[i, t]]
    W = fsum(weight for weight, _ in found)
    return [(weight / W, place) for weight, place in found]


def sft(case: Case) -> Result:
    """-log-prob."""
    grad, loss = np.zeros(case.logp.shape), 0.0
    for share, place in tokens(case):
        loss -= share * float(case.logp[place])
        grad[place] = -share
    return loss, {"logp": grad}


def otr(
    case: Case, negative: float = -0.1, temperature: float = 1.0, draws: float = 0.0, seed: float = 0.0
) -> Result:
    """-[q l + β_o (m - q l)], m = Σ_a q(a) log π(a): -(1 - β_o) q in l and -β_o in m; q is a constant.

    The temperature and the draws are in the streams q and m.
    """
    assert case.proposal is not None
    assert case.proposal_mean is not None
    grad, by_mean, loss = np.zeros(case.logp.shape), np.zeros(case.logp.shape), 0.0
    for share, place in tokens(case):
        q = float(case.proposal[place])
        right = q * float(case.logp[place])
        loss -= share * (right + negative * (float(case.proposal_mean[place]) - right))
        grad[place] = -share * (1 - negative) * q
        by_mean[place] = -share * negative
    return loss, {"logp": grad, "proposal": np.zeros(case.logp.shape), "proposal_mean": by_mean}


def distill(
    case: Case, over: str = "samples", divergence: str | float = "reverse", ratio: str = "behavior"
) -> Result:
    """The loss is the mean of w h(u), u = f/π; the gradient in l is w (h - u h').

    h = -log u, u log u, and βu log(u/m) - (1-β) log m with m = βu + 1 - β, for which h - u h' is -log u
    (less a constant, which E_π ∇l = 0 takes), -u, and -(1-β) log m.
    """
    grad, loss = np.zeros(case.logp.shape), 0.0
    if over == "vocabulary":
        by_kl = np.zeros(case.logp.shape)
        for share, place in tokens(case):
            loss += share * float(case.kl[place])
            by_kl[place] = share
        return loss, {"logp": grad, "kl": by_kl}
    anchor = case.old_logp if ratio == "old" else case.behavior_logp
    for share, place in tokens(case):
        logp, f = float(case.logp[place]), float(case.ref_logp[place])
        w = 1.0 if ratio == "none" else exp(logp - float(anchor[place]))
        u = exp(f - logp)
        if divergence == "reverse":
            h, c = logp - f, logp - f
        elif divergence == "forward":
            h, c = u * (f - logp), -u
        else:
            beta = float(divergence)
            m = beta * u + 1 - beta
            h, c = beta * u * (f - logp - log(m)) - (1 - beta) * log(m), -(1 - beta) * log(m)
        loss += share * w * h
        grad[place] = share * w * c
    return loss, {"logp": grad}


def middle_band(case: Case, low: float, high: float) -> Result:
    """-l, mean over the tokens of responses whose mean of -l is between the quantiles, constants."""
    groups = groups_of(case, 1)
    nll = []
    for g in groups:
        for y in g.responses:
            nll.append((-fsum(float(case.logp[p]) for p in y.places) / len(y.places), g.weight, y))
    nll.sort(key=lambda item: item[0])
    every = sum(weight for _, weight, _ in nll)

    def at(share: float) -> float:
        reached = 0.0
        for value, weight, _ in nll:
            reached += weight
            if reached >= share * every:
                return value
        return nll[-1][0]

    kept = [(w, p) for value, w, y in nll if at(low) <= value <= at(high) for p in y.places]
    W = fsum(weight for weight, _ in kept)
    grad, loss = np.zeros(case.logp.shape), 0.0
    for weight, place in kept:
        share = weight / W if W else 0.0
        loss -= share * float(case.logp[place])
        grad[place] = -share
    return loss, {"logp": grad}


def sophia(case: Case) -> Result:
    """Of the responses that are left."""
    return sft(case)


def pear(case: Case) -> Result:
    """The slope of each token times min(2, π/μ of its response)."""
    loss, grads = sft(case)
    for y in (y for g in groups_of(case, 1) for y in g.responses):
        ratio = fsum(t for p in y.places for t in (float(case.logp[p]), -float(case.behavior_logp[p])))
        for p in y.places:
            grads["logp"][p] *= min(2.0, exp(min(ratio, 1.0)))
    return loss, grads


def reward_conditioned(case: Case) -> Result:
    """Of the prompts with the reward in front."""
    return sft(case)
