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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import exp, fsum
from typing import Any

import numpy as np

Result = tuple[float, dict[str, np.ndarray]]
Place = tuple[int, int]  # (row, token)


@dataclass
class Response:
    reward: float
    places: list[Place]  # in the mask
    role: str
    hinted: bool
    meaning: float

    @property
    def rows(self) -> list[int]:
        return sorted({row for row, _ in self.places})


@dataclass
class Group:
    weight: float
    responses: list[Response]

    @property
    def rewards(self) -> list[float]:
        return [y.reward for y in self.responses]


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
    pairs: Sequence[tuple[Hashable, Hashable]]  # responses, the better one first
    votes: Sequence[tuple[float, float]]
    role: Sequence[str]  # [B], of the response
    hinted: Sequence[float]  # [B], 1 where the response was written with a hint
    meaning: Sequence[float]  # [B], the number of the response's meaning
    proposal: np.ndarray  # [B,T]
    proposal_mean: np.ndarray  # [B,T]
    old_value: np.ndarray  # [B,T]
    ref_mean: np.ndarray  # [B,T]
    ref_square: np.ndarray  # [B,T]
    normalizer: np.ndarray  # [B,T]
    stored_quantile: Sequence[float]  # [B], one value a response
    reward_parts: Sequence[Sequence[float]]  # [B][K], one value a response
    part_weights: Sequence[Sequence[float]]  # [B][K], the same in all rows

    def anchor(self, name: str) -> np.ndarray:
        """[B,T] the log-probs of the reference, of the behavior, or of the policy before the step."""
        return {"reference": self.ref_logp, "behavior": self.behavior_logp, "old": self.old_logp}[name]

    def groups(self, least: int) -> list[Group]:
        """The groups with at least `least` responses."""
        found: dict[Hashable, dict[Hashable, Response]] = {}
        weights: dict[Hashable, float] = {}
        B, T = self.mask.shape
        for row in range(B):
            weights[self.group[row]] = float(self.weight[row])
            responses = found.setdefault(self.group[row], {})
            hinted = self.hinted[row] == 1
            new = Response(float(self.reward[row]), [], self.role[row], hinted, self.meaning[row])
            response = responses.setdefault(self.response[row], new)
            for t in range(T):
                if self.mask[row, t]:
                    response.places.append((row, t))
        groups = [Group(weights[name], list(responses.values())) for name, responses in found.items()]
        return [g for g in groups if len(g.responses) >= least]

    def log_ratio(self, place: Place, anchor: str = "behavior") -> float:
        """l - f of a token."""
        return float(self.logp[place]) - float(self.anchor(anchor)[place])

    def ratio(self, place: Place, anchor: str = "behavior") -> float:
        """exp(l - f), where that is a number."""
        return power(self.log_ratio(place, anchor))

    def summed_log_ratio(self, response: Response, anchor: str) -> float:
        """Σ_t (l_t - f_t), rounded once."""
        return sum_of_differences(self.logp, self.anchor(anchor), response)

    def stored(self, group: Group) -> float:
        return float(self.stored_value[group.responses[0].rows[0]])


Found = list[tuple[Group, list[float]]]  # groups, each with a number for each of its responses


def total(stream: np.ndarray, response: Response) -> float:
    return fsum(float(stream[place]) for place in response.places)


def power(x: float) -> float:
    return exp(min(x, 700.0))


def sum_of_differences(new: np.ndarray, old: np.ndarray, response: Response) -> float:
    return fsum(x for p in response.places for x in (float(new[p]), -float(old[p])))


def mean_of(values: list[float]) -> float:
    return fsum(values) / len(values)


def quantile(values: list[tuple[float, float]], share: float) -> float:
    """Of (value, weight): the first value up to which there is this share of the weights."""
    reached, every = 0.0, fsum(weight for _, weight in values)
    for value, weight in sorted(values):
        reached += weight
        if reached >= share * every:
            return value
    return max(values)[0]


def others_mean(values: list[float], i: int) -> float:
    """The leave-one-out mean."""
    return fsum(v for j, v in enumerate(values) if j != i) / (len(values) - 1)


def less_baseline(
    case: Case, groups: list[Group], i: int, R: list[list[float]], baseline: str
) -> list[float]:
    """R_j − b of group i, `R` of all groups; b is the mean of the group's others, the stored value, or for
    "step" Σ w g R / Σ w g of all other groups, g = Σ_t (1 − exp l_t)², w the weight of a group."""
    if baseline == "others":
        return [a - others_mean(R[i], j) for j, a in enumerate(R[i])]
    if baseline == "stored":
        return [a - case.stored(groups[i]) for a in R[i]]
    above, total = [], []
    for k, g in enumerate(groups):
        for y, a in zip(g.responses, R[k], strict=True):
            norm = g.weight * gradient_norm(case, y) * (k != i)
            above.append(norm * a)
            total.append(norm)
    b = fsum(above) / fsum(total) if any(total) else 0.0
    return [a - b for a in R[i]]


def gradient_norm(case: Case, y: Response) -> float:
    """g = Σ_t (1 − exp l_t)²."""
    return fsum((1.0 - exp(float(case.logp[p]))) ** 2 for p in y.places)


def half_variance(values: list[float]) -> float:
    """½ · sample variance (n-1), in its pairwise form: Σ_{i<j} (v_i - v_j)² / (2 n (n-1))."""
    n = len(values)
    return fsum((values[i] - values[j]) ** 2 for i in range(n) for j in range(i)) / (2 * n * (n - 1))


def regularized(case: Case, group: Group, beta: float, average: str = "sum") -> list[float]:
    """R_i = r_i - β Σ_t (l_it - f_it), or β times their mean; at β = 0 it is r_i, whatever the reference."""
    if beta == 0:
        return group.rewards
    of_mean = average == "token"
    return [
        y.reward - beta * case.summed_log_ratio(y, "reference") / (len(y.places) if of_mean else 1)
        for y in group.responses
    ]


def weighted(
    case: Case, result: Result, weight: str = "none", weight_baseline: str = "mean", **bounds: Any
) -> Result:
    """[25, 26]: the part of response i in the gradient times w_i, a constant; see `ratio_weights`.

    A group's R are compared with R̄, or for "optimal" with their mean by w g, g = Σ_t (1 − exp l_t)².
    """
    loss, grads = result
    w = np.ones_like(case.logp, dtype=float)
    if weight != "none":
        w = ratio_weights(case, weight, **bounds)
    grad = grads["logp"].copy()
    for g in case.groups(1):
        by_wg = [float(w[y.places[0]]) * gradient_norm(case, y) for y in g.responses]
        below = [float(grads["logp"][y.places[0]]) for y in g.responses]  # R̄ − R_i, times a factor
        excess = mean_by(by_wg, below) if weight_baseline == "optimal" else 0.0
        for p in (p for y in g.responses for p in y.places):
            grad[p] = w[p] * (grad[p] - excess)  # the baseline is R̄ less this, times the factor
    return loss, {**grads, "logp": grad}


def shifted(case: Case, result: Result, least: int, baseline_shift: float) -> Result:
    """[28]: a baseline that is lower by s: −s Σ_t ∇l_t of each response, averaged as `shares` says."""
    loss, grads = result
    grad = grads["logp"].copy()
    for place, share in shares(case.groups(least), 1.0).items():
        grad[place] -= baseline_shift * share
    return loss, {**grads, "logp": grad}


def mean_by(shares: list[float], values: list[float]) -> float:
    """The mean of values by shares; 0 where these are 0."""
    total = fsum(shares)
    return fsum(a * b for a, b in zip(shares, values, strict=True)) / total if total else 0.0


def ratio_weights(
    case: Case,
    weight: str,
    weight_max: float | None = 1.0,
    weight_min: float = 0.0,
    weight_rule: str = "truncate",
    weight_power: float = 1.0,
    **level: str,
) -> Any:
    """[B,T] min(c, exp(power · log ratio)) at the tokens of a response; "mask" makes others 0.

    The ratio is to the reference or to the recorded behavior b; for "mismatch" it is o - b, whatever l.
    """
    new = case.old_logp if weight == "mismatch" else case.logp
    anchor = case.ref_logp if weight == "reference" else case.behavior_logp
    most = math.inf if weight_max is None else weight_max
    out = np.zeros_like(case.ref_logp, dtype=float)
    for place, log_w in by_level(case, new, anchor, **level).items():
        w = power(weight_power * log_w)
        if weight_rule == "truncate":
            out[place] = min(max(w, weight_min), most)
        elif weight_min <= w <= most:
            out[place] = w
    return out


def by_level(
    case: Case, new: Any, anchor: Any, weight_level: str = "sequence", weight_normalize: str = "none"
) -> dict[Place, float]:
    """By token its own new − anchor, or Σ_t of its response, or the mean of these.

    Normalized by group, less the largest one of a group in which all are below 0.
    """
    found = {}
    for group in case.groups(1):
        of_response = [
            sum_of_differences(new, anchor, y) / (len(y.places) if weight_level == "mean" else 1)
            for y in group.responses
        ]
        fallen = min(0.0, max(of_response)) if weight_normalize == "group" else 0.0
        for y, log_w in zip(group.responses, of_response, strict=True):
            for place in y.places:
                own = float(new[place]) - float(anchor[place])
                found[place] = own if weight_level == "token" else log_w - fallen
    return found


def shares(groups: list[Group], average: str | float) -> dict[Place, float]:
    """What the loss of each token counts in the step's: by responses, groups and their weights, or alike."""
    W = fsum(g.weight for g in groups)
    tokens = fsum(g.weight * len(y.places) for g in groups for y in g.responses)
    found = {}
    for g in groups:
        for y in g.responses:
            of_response = g.weight / W / len(g.responses)
            for place in y.places:
                if average == "token":
                    found[place] = g.weight / tokens
                elif average == "response":
                    found[place] = of_response / len(y.places)
                else:
                    found[place] = of_response / float(average)
    return found


def with_kl(
    case: Case,
    result: Result,
    share: dict[Place, float],
    ratio: str,
    beta: float,
    kl: str = "k3",
    unbiased_kl: bool = False,
) -> Result:
    """Plus β times an estimate k of each token's KL to the reference, d = l - f; `share`: see `shares`.

    k3 = exp(-d) - 1 + d has the slope 1 - exp(-d), k2 = d²/2 has d. Times w = exp(l - b) the slope of w k is
    w (k + k'), which is w d for k3.
    """
    loss, grads = result
    grad = grads["logp"].copy()
    for place, of_token in share.items():
        d = case.log_ratio(place, "reference")
        k, slope = (d * d / 2, d) if kl == "k2" else (math.expm1(-d) + d, -math.expm1(-d))
        if unbiased_kl:
            w = exp(case.log_ratio(place, ratio))
            k, slope = w * k, w * (d if kl == "k3" else k + slope)
        loss += of_token * beta * k
        grad[place] += of_token * beta * slope
    return loss, {**grads, "logp": grad}


def standardized(r: list[float], std: bool) -> list[float]:
    """r - r̄, over the standard deviation (n-1) + 1e-6 with `std`; 0 where all are equal, without rounding."""
    if max(r) == min(r):
        return [0.0] * len(r)
    mean = fsum(r) / len(r)
    spread = math.sqrt(fsum((x - mean) ** 2 for x in r) / (len(r) - 1)) + 1e-6 if std else 1.0
    return [(x - mean) / spread for x in r]


# (advantage, response, place) -> the loss of the token there, and its slope in l
Pair = tuple[float, float]
Token = Callable[[float, Response, Place], Pair]


def over_tokens(case: Case, token: Token, std: bool, average: str | float) -> Result:
    """Of each token with its response's reward less the mean, over the deviation with `std`."""
    found = [(g, standardized(g.rewards, std)) for g in case.groups(2)]
    return averaged(case, found, average, token)


def averaged(case: Case, found: Found, average: str | float, token: Token) -> Result:
    """The sum of the tokens' losses by their shares; `found` has the advantages of responses."""
    grad, loss = np.zeros(case.logp.shape), 0.0
    share = shares([g for g, _ in found], average)
    for A, y in ((A, y) for g, of_group in found for A, y in zip(of_group, g.responses, strict=True)):
        for place in y.places:
            term, slope = token(A, y, place)
            loss += share[place] * term
            grad[place] = share[place] * slope
    return loss, {"logp": grad}


def combined(*parts: tuple[float, Result]) -> Result:
    """The sum of results by factors."""
    streams = {stream for _, (_, grads) in parts for stream in grads}
    loss = fsum(factor * of_part for factor, (of_part, _) in parts)
    return loss, {s: sum(factor * grads.get(s, 0.0) for factor, (_, grads) in parts) for s in streams}


def imitated(case: Case, groups: list[Group]) -> Result:
    """The mean of -l over their tokens, each as often as its row's weight says."""
    found = [(g, g.rewards) for g in groups]
    return averaged(case, found, "token", lambda _, y, place: (-float(case.logp[place]), -1.0))


def clipped(w: float, A: float, low: float, high: float, dual: float | None = None) -> Pair:
    """-min(w A, clamp(w) A), for A < 0 at most -c A with c = `dual`; its slope in log w.

    That is -w A where it is the value, and 0 where a bound is.
    """
    gain = min(w * A, min(max(w, low), high) * A)
    if dual is not None and A < 0:
        gain = max(gain, dual * A)
    return -gain, -w * A if gain == w * A else 0.0


def imitating(case: Case, result: Result, judged: bool, least: int, imitation: float) -> Result:
    """Plus `imitation` times the mean of -l over the tokens of the imitated responses.

    They are the winners where the objective is of judged pairs, else the best ones of groups with unequal
    rewards. Groups of fewer than `least` responses, or without a pair where pairs are `judged`, aren't there.
    """
    winners = {winner for winner, _ in case.pairs}
    chosen = []
    for g in case.groups(least):
        names = {case.response[y.rows[0]]: y for y in g.responses}
        if judged and not names.keys() & winners:
            continue
        best = max(g.rewards) if max(g.rewards) > min(g.rewards) else math.inf
        of_group = [y for name, y in names.items() if (name in winners if judged else y.reward == best)]
        chosen.append(Group(g.weight, of_group))
    return combined((1.0, result), (imitation, imitated(case, chosen)))
