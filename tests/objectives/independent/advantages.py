"""Advantages a second time; see `independent.base`.

Where rewards are equal they are exactly 0. RED-Drop's mean is taken over all its drops, one by one.
"""

from __future__ import annotations

import itertools
import math
from math import fsum

from independent.base import Case, Found, Group, mean_of, others_mean, standardized


def needed(kind: str) -> int:
    """Responses that a group must have."""
    return 1 if kind == "reinforce_pp" else 2


def advantages(case: Case, kind: str) -> Found:
    """The groups, and the advantages of their responses."""
    groups = case.groups(needed(kind))
    found = [(g, by_part(case, g) if kind == "gdpo" else of_group(kind, g)) for g in groups]
    return over_the_step(found) if kind in ("reinforce_pp", "reinforce_pp_baseline", "gdpo") else found


def over_the_step(found: Found) -> Found:
    """Less the mean over all tokens, over the standard deviation."""
    every = [(g.weight * len(y.places), a) for g, A in found for y, a in zip(g.responses, A, strict=True)]
    total = fsum(count for count, _ in every)
    mean = fsum(count * a for count, a in every) / total
    variance = fsum(count * (a - mean) ** 2 for count, a in every) / total
    if len({a for _, a in every}) == 1:
        return [(g, [0.0] * len(A)) for g, A in found]
    return [(g, [(a - mean) / math.sqrt(max(variance, 1e-8)) for a in A]) for g, A in found]


def of_group(kind: str, group: Group) -> list[float]:
    """Without what a step has in common."""
    r = group.rewards
    if kind == "reinforce_pp":
        return r
    if kind == "others":
        return [x - others_mean(r, i) for i, x in enumerate(r)]
    if kind == "opo":
        tokens = [len(y.places) for y in group.responses]
        b = fsum(t * x for t, x in zip(tokens, r)) / sum(tokens)
        return [x - b for x in r]
    if kind == "red_drop":
        return after_drops(r)
    off = standardized(r, std=kind == "standardized")
    if kind == "maxrl":
        return [x / abs(mean_of(r)) if x else 0.0 for x in off]
    return off


def by_part(case: Case, group: Group) -> list[float]:
    """Σ_k w_k of what `standardized` makes of the k-th part of the rewards."""
    rows = [y.places[0][0] for y in group.responses]
    weights = case.part_weights[rows[0]]
    total = [0.0] * len(rows)
    for k, weight in enumerate(weights):
        part = standardized([case.reward_parts[row][k] for row in rows], True)
        total = [a + weight * x for a, x in zip(total, part)]
    return total


def after_drops(r: list[float]) -> list[float]:
    """The mean of r minus the mean of what is left, 0 where dropped, over all choices of the negatives that
    are left, as many as there are positives."""
    m, width = mean_of(r), max(r) - min(r)
    negative = [i for i, x in enumerate(r) if width > 0 and m - x > 1e-9 * width]
    positive = [i for i in range(len(r)) if i not in negative]
    if len(negative) <= len(positive):
        return [x - m for x in r]
    choices = list(itertools.combinations(negative, len(positive)))
    total = [0.0] * len(r)
    for chosen in choices:
        left = [*positive, *chosen]
        center = mean_of([r[i] for i in left])
        for i in left:
            total[i] += r[i] - center
    return [x / len(choices) for x in total]
