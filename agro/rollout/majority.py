"""majority@k: how often the most frequent answer of k responses is right (self-consistency, 2203.11171)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from agro.rewards import answers
from agro.rewards.final import final
from agro.types import Sample

CHOICES = 1000  # of k responses; where there are more of them, so many are drawn


def answer_of(sample: Sample, meaning: float | None, reward: str) -> Hashable | None:
    """What counts as the same answer: the meaning, where the reward gives one; of math and regex the final
    answer; else the text. None where there is no final answer, which votes for nothing."""
    if meaning is not None:
        return meaning
    if reward == "math":
        return final(sample.response).text.casefold() or None
    if reward == "regex":
        return answers.after_marker(sample.response, answers.MARKER) or sample.response.strip()
    return sample.response.strip()


def majority_of_k(passed: Sequence[bool], voted: Sequence[Hashable | None], k: int, seed: int = 0) -> float:
    """The mean over the choices of k of n responses to a prompt; NaN where n < k.

    Answers with equally many votes share what they get. An answer is as right as the share of its responses
    that passed.
    """
    n = len(voted)
    if n < k:
        return math.nan
    if math.comb(n, k) <= CHOICES:
        choices = [list(chosen) for chosen in combinations(range(n), k)]
    else:
        choices = np.random.default_rng(seed).random((CHOICES, n)).argsort(1)[:, :k].tolist()
    return float(np.mean([_vote(passed, voted, chosen) for chosen in choices]))


def _vote(passed: Sequence[bool], voted: Sequence[Hashable | None], chosen: Sequence[int]) -> float:
    right: dict[Hashable, list[bool]] = defaultdict(list)
    for i in chosen:
        if voted[i] is not None:
            right[voted[i]].append(passed[i])
    most = max(map(len, right.values()), default=0)
    winners = [votes for votes in right.values() if len(votes) == most]
    if not winners:
        return 0.0
    return sum(map(sum, winners)) / most / len(winners)


def majority(
    rewards: NDArray[np.float64], voted: Sequence[Sequence[Hashable | None]], threshold: float, k: int
) -> NDArray[np.float64]:
    """Of each prompt with k scored responses. `rewards`: [M,n]; from `threshold` on a response passes."""
    of_prompts = []
    for row, labels in zip(rewards, voted, strict=True):
        scored = np.flatnonzero(~np.isnan(row)).tolist()
        of_prompts.append(
            majority_of_k([bool(row[i] >= threshold) for i in scored], [labels[i] for i in scored], k)
        )
    values = np.array(of_prompts)
    return np.asarray(values[~np.isnan(values)])
