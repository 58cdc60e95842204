"""Metrics of `agro eval`: accuracy, pass@k, best@k, majority@k, lengths, and records by prompt."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.io.numbers import none_if_nan
from agro.rewards import maker_of
from agro.rollout.evaluate import Heldout
from agro.stats.intervals import described
from agro.types import Sample

CHOICES = 1000  # maximal number of subsets of k responses; beyond it, as many are sampled


def lengths(result: Heldout) -> NDArray[np.float64]:
    """Count the policy's tokens in each response, [M,n]; NaN where unknown."""
    counts = [
        sum(math.nan if sample.action is None else float(sample.action.sum()) for sample in response)
        for response in result.responses
    ]
    return np.array(counts, dtype=np.float64).reshape(result.rewards.shape)


def truncated(result: Heldout) -> NDArray[np.float64]:
    """Return [M,n], 1 where a response was cut by the token limit."""
    ends = [float(response[-1].end == "cut") for response in result.responses]
    return np.array(ends).reshape(result.rewards.shape)


def answers(result: Heldout) -> list[Hashable | None]:
    """Return the answer that each response votes for, see `answer_of`."""
    numbers = sorted({int(sample.meta["index"]) for sample in result.samples})
    return [
        answer_of(response[-1], result.meanings.get(number), result.reward)
        for number, response in zip(numbers, result.responses, strict=True)
    ]


def summary(
    result: Heldout, threshold: float | None, along: Mapping[str, NDArray[np.float64]] | None = None
) -> dict[str, Any]:
    """Summarize mean reward, accuracy, pass@k (k = 1, 2, 4, … ≤ n), majority@k (k = 4, 8, …), length and
    share of truncated responses, with 95% intervals of means over prompts; and best@k (k = 2, 4, …) unless
    all rewards are 0 or 1, when it equals pass@k.

    Each is the mean over the prompts with k scored responses. `threshold`: the reward from which a response
    passes; None omits pass metrics. `along`: further [M,n] measurements of the responses, by name.
    """
    n = result.rewards.shape[1]
    sizes = [2**i for i in range(n.bit_length())]
    scored = [np.flatnonzero(~np.isnan(row)) for row in result.rewards]
    finite = [row[places] for row, places in zip(result.rewards, scored)]
    rows = {"reward_mean": result.means}
    if threshold is not None:
        passed = [(values >= threshold).tolist() for values in finite]
        counts = [(len(each), sum(each)) for each in passed]
        rows["accuracy"] = np.array([pass_at_k(*count, 1) for count in counts])
        rows |= {f"pass@{k}": np.array([pass_at_k(*count, k) for count in counts]) for k in sizes}
        voting = answers(result) if sizes[2:] else []
        for k in sizes[2:]:
            voted = [[voting[i * n + j] for j in places] for i, places in enumerate(scored)]
            shares = [majority_of_k(*prompt_votes, k) for prompt_votes in zip(passed, voted)]
            rows[f"majority@{k}"] = np.array(shares)
    if not np.isin(known_of(result.rewards), (0.0, 1.0)).all():
        rows |= {f"best@{k}": np.array([best_of_k(values, k) for values in finite]) for k in sizes[1:]}
    if result.samples:
        rows |= {"length": lengths(result).mean(1), "truncated": truncated(result).mean(1)}
    rows |= {name: values.mean(1) for name, values in (along or {}).items()}
    measured = {name: described(known_of(values)) for name, values in rows.items()}
    return {**measured, "pass_at": threshold, "unscored": result.unscored}


def by_prompt(result: Heldout) -> list[dict[str, Any]]:
    """Return one record per prompt: id, text, rewards (None where unknown), responses and their lengths."""
    records = []
    tables = (result.rewards.tolist(), lengths(result).tolist(), truncated(result).tolist())
    n = result.rewards.shape[1]
    for row, (rewards, tokens, cuts) in enumerate(zip(*tables, strict=True)):
        members = [response[-1] for response in result.responses[row * n : (row + 1) * n]]
        records.append(
            {
                "prompt_id": members[0].prompt_id,
                "prompt": members[0].prompt,
                "rewards": [none_if_nan(reward) for reward in rewards],
                "responses": [sample.response for sample in members],
                "lengths": [none_if_nan(length) for length in tokens],
                "truncated": [bool(is_cut) for is_cut in cuts],
            }
        )
    return records


def known_of(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Estimate without bias the probability that one of k responses passes (arXiv 2107.03374, eq. 1).

    `passed` of `n` responses passed; NaN if n < k.
    """
    if n < k:
        return math.nan
    return 1.0 - math.prod(1.0 - k / i for i in range(n - passed + 1, n + 1))


def best_of_k(rewards: NDArray[np.float64], k: int) -> float:
    """Estimate without bias the expected highest reward of k responses, from n of them; NaN if n < k.

    The i-th of the sorted rewards is the highest of k in C(i - 1, k - 1) of the C(n, k) choices.
    """
    n = len(rewards)
    if n < k:
        return math.nan
    ways = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    return float(np.sort(rewards) @ np.array(ways))


def answer_of(sample: Sample, meaning: float | None, reward: str) -> Hashable | None:
    """Return what identifies an answer: the reward's meaning of it, if any; else the final answer, if the
    reward extracts one, or the text. None, a missing final answer, votes for nothing."""
    if meaning is not None:
        return meaning
    maker = maker_of(reward)
    return sample.response.strip() if maker is None else maker.final(sample.response)


def majority_of_k(passed: Sequence[bool], voted: Sequence[Hashable | None], k: int) -> float:
    """Return the mean accuracy of majority votes over subsets of k of a prompt's n responses; NaN if n < k.

    Tied answers share the credit. An answer's accuracy is the share of its responses that passed.
    """
    n = len(voted)
    if n < k:
        return math.nan
    if math.comb(n, k) <= CHOICES:
        choices = [list(chosen) for chosen in combinations(range(n), k)]
    else:
        choices = np.random.default_rng(0).random((CHOICES, n)).argsort(1)[:, :k].tolist()
    shares = []
    for chosen in choices:
        right: dict[Hashable, list[bool]] = defaultdict(list)
        for i in chosen:
            if voted[i] is not None:
                right[voted[i]].append(passed[i])
        maximum = max(map(len, right.values()), default=0)
        winners = [votes for votes in right.values() if len(votes) == maximum]
        shares.append(sum(map(sum, winners)) / maximum / len(winners) if winners else 0.0)
    return float(np.mean(shares))
