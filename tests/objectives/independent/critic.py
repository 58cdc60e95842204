"""PPO a second time; see `independent.base`."""

from __future__ import annotations

import math
from math import fsum

import numpy as np

from independent.base import Case, Pair, Response, Result, clipped, shares


def advantages(case: Case, y: Response, gamma: float, trace: float) -> list[float]:
    """Σ_{k≥t} (γλ)^(k−t) δ_k of each token of a response, written out as the double sum.

    The reward of the k-th token is what stands at it and after it, up to the next one; the last one also has
    what of the response's reward stands nowhere.
    """
    row, T = y.places[0][0], len(y.places)
    dense = [0.0 if math.isnan(x) else float(x) for x in case.token_reward[row]]
    starts = [at for _, at in y.places] + [len(dense)]
    value = [float(case.old_value[place]) for place in y.places] + [0.0]
    error = []
    for k in range(T):
        reward = fsum(dense[starts[k] : starts[k + 1]])
        if k == T - 1:
            reward += y.reward - fsum(dense)
        error.append(reward + gamma * value[k + 1] - value[k])
    return [fsum((gamma * trace) ** (k - t) * error[k] for k in range(t, T)) for t in range(T)]


def ppo(
    case: Case,
    clip: Pair = (0.2, 0.2),
    value_clip: float | None = 0.2,
    gae_lambda: Pair = (0.95, 0.95),
    gamma: float = 1.0,
    average: str | float = "token",
) -> Result:
    """-min(w A, clamp(w) A): -w A where that isn't clipped. ½ max(a², b²), a = V - G, b = clamp(V) - G: its
    slope in V is a where a² is the larger one, b where b² is and V isn't clamped, else 0."""
    grad, value_grad, loss = np.zeros(case.logp.shape), np.zeros(case.logp.shape), 0.0
    groups = case.groups(1)
    share = shares(groups, average)
    for y in (y for g in groups for y in g.responses):
        first, second = (advantages(case, y, gamma, trace) for trace in gae_lambda)
        for place, A, B in zip(y.places, first, second):
            term, slope = clipped(case.ratio(place), A, 1 - clip[0], 1 + clip[1])
            loss += share[place] * term
            grad[place] = share[place] * slope
            V, old = float(case.prefix_value[place]), float(case.old_value[place])
            near = V if value_clip is None else min(max(V, old - value_clip), old + value_clip)
            a, b = V - (old + B), near - (old + B)
            loss += share[place] * 0.5 * max(a * a, b * b)
            value_grad[place] = share[place] * (a if a * a >= b * b else 0.0)
    return loss, {"logp": grad, "prefix_value": value_grad}
