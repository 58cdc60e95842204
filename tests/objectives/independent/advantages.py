"""Advantages a second time; see `independent.base`.

Where rewards are equal they are exactly 0. RED-Drop's mean is taken over all its drops, one by one.
"""

from __future__ import annotations

import itertools
import math
from math import fsum

from independent.base import Case, Group, groups_of, others_mean


def mean_of(values: list[float]) -> float:
    return fsum(values) / len(values)


def needed(kind: str) -> int:
    """Responses that a group must have."""
    return 1 if kind == "reinforce_pp" else 2


def advantages(case: Case, kind: str) -> list[tuple[Group, list[float]]]:
    """The groups, and the advantages of their responses."""
    groups = groups_of(case, needed(kind))
    per_group = [by_part(case, g) if kind == "gdpo" else of_group(kind, g) for g in groups]
    if kind in ("reinforce_pp", "reinforce_pp_baseline", "gdpo"):
        counts = [g.weight * len(y.places) for g in groups for y in g.responses]
        values = [a for group in per_group for a in group]
        mean = fsum(c * a for c, a in zip(counts, values)) / fsum(counts)
        variance = fsum(c * (a - mean) ** 2 for c, a in zip(counts, values)) / fsum(counts)
        if max(values) == min(values):
            return [(g, [0.0] * len(g.responses)) for g in groups]
        per_group = [[(a - mean) / math.sqrt(max(variance, 1e-8)) for a in group] for group in per_group]
    return list(zip(groups, per_group))


def of_group(kind: str, group: Group) -> list[float]:
    """Without what a step has in common."""
    r = [y.reward for y in group.responses]
    if kind == "reinforce_pp":
        return r
    if kind == "others":
        return [x - others_mean(r, i) for i, x in enumerate(r)]
    if kind == "opo":
        tokens = [len(y.places) for y in group.responses]
        b = fsum(t * x for t, x in zip(tokens, r)) / sum(tokens)
        return [x - b for x in r]
    off = [0.0 if max(r) == min(r) else x - mean_of(r) for x in r]
    if kind == "standardized":
        spread = math.sqrt(fsum(x * x for x in off) / (len(r) - 1))
        return [x / (spread + 1e-6) for x in off]
    if kind == "maxrl":
        return [x / abs(mean_of(r)) if x else 0.0 for x in off]
    if kind == "red_drop":
        return after_drops(r)
    return off


def by_part(case: Case, group: Group) -> list[float]:
    """Σ_k w_k of what `standardized` makes of the k-th part of the rewards."""
    rows = [y.places[0][0] for y in group.responses]
    weights = case.part_weights[rows[0]]
    total = [0.0] * len(rows)
    for k, weight in enumerate(weights):
        r = [case.reward_parts[row][k] for row in rows]
        off = [0.0 if max(r) == min(r) else x - mean_of(r) for x in r]
        spread = math.sqrt(fsum(x * x for x in off) / (len(r) - 1))
        total = [a + weight * x / (spread + 1e-6) for a, x in zip(total, off)]
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
