"""See `independent.base`.

All are means over the tokens of the step, each as often as its row's weight says.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

import numpy as np

from independent.base import Case, Group, Pair, Place, Response, Result, averaged, imitated, mean_of, quantile


def over_all(case: Case, token: Callable[[Response, Place], Pair]) -> Result:
    found = [(g, g.rewards) for g in case.groups(1)]
    return averaged(case, found, "token", lambda _, y, place: token(y, place))


def sft(case: Case) -> Result:
    """-log-prob."""
    return imitated(case, case.groups(1))


def otr(
    case: Case, negative: float = -0.1, temperature: float = 1.0, draws: float = 0.0, seed: float = 0.0
) -> Result:
    """-[q l + β_o (m - q l)], m = Σ_a q(a) log π(a): -(1 - β_o) q in l and -β_o in m; q is a constant.

    The temperature and the draws are in the streams q and m.
    """
    q, mean = case.proposal, case.proposal_mean

    def token(_: Response, place: Place) -> Pair:
        right = float(q[place]) * float(case.logp[place])
        return -right - negative * (float(mean[place]) - right), -(1 - negative) * float(q[place])

    loss, grads = over_all(case, token)
    by_mean = over_all(case, lambda _, place: (0.0, -negative))[1]["logp"]
    return loss, {**grads, "proposal": np.zeros(case.logp.shape), "proposal_mean": by_mean}


def distill(
    case: Case, over: str = "samples", divergence: str | float = "reverse", ratio: str = "behavior"
) -> Result:
    """The loss is the mean of w h(u), u = f/π; the gradient in l is w (h - u h').

    h = -log u, u log u, and βu log(u/m) - (1-β) log m with m = βu + 1 - β, for which h - u h' is -log u
    (less a constant, which E_π ∇l = 0 takes), -u, and -(1-β) log m.
    """
    if over == "vocabulary":
        loss, grads = over_all(case, lambda _, place: (float(case.kl[place]), 1.0))
        return loss, {"logp": np.zeros(case.logp.shape), "kl": grads["logp"]}

    def token(_: Response, place: Place) -> Pair:
        logp, f = float(case.logp[place]), float(case.ref_logp[place])
        w = 1.0 if ratio == "none" else case.ratio(place, ratio)
        u = exp(f - logp)
        if divergence == "reverse":
            h, c = logp - f, logp - f
        elif divergence == "forward":
            h, c = u * (f - logp), -u
        else:
            beta = float(divergence)
            m = beta * u + 1 - beta
            h, c = beta * u * (f - logp - log(m)) - (1 - beta) * log(m), -(1 - beta) * log(m)
        return w * h, w * c

    return over_all(case, token)


def middle_band(case: Case, low: float, high: float) -> Result:
    """-l, mean over the tokens of responses whose mean of -l is between the quantiles, constants."""
    groups = case.groups(1)
    nll = [[-mean_of([float(case.logp[p]) for p in y.places]) for y in g.responses] for g in groups]
    weighed = [(value, g.weight) for g, values in zip(groups, nll) for value in values]
    least, most = quantile(weighed, low), quantile(weighed, high)
    kept = [
        Group(g.weight, [y for y, value in zip(g.responses, values) if least <= value <= most])
        for g, values in zip(groups, nll)
    ]
    return imitated(case, kept)


def sophia(case: Case) -> Result:
    """Of the responses that are left."""
    return sft(case)


def pear(case: Case) -> Result:
    """The slope of each token times min(2, π/μ of its response)."""
    loss, grads = sft(case)
    for y in (y for g in case.groups(1) for y in g.responses):
        ratio = case.summed_log_ratio(y, "behavior")
        for p in y.places:
            grads["logp"][p] *= min(2.0, exp(min(ratio, 1.0)))
    return loss, grads


def reward_conditioned(case: Case) -> Result:
    """Of the prompts with the reward in front."""
    return sft(case)
