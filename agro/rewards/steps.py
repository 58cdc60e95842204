"""Where in a response its reward came: with each token, step or turn (`reward.per_token`, `per_step`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from agro.types import Sample

TURN = "turn"  # of reward.per_step
Decode = Callable[[Sequence[int]], str]


def steps(response: str, end: str) -> list[tuple[str, int]]:
    """The steps of a response and where each ends, in characters: the parts between the texts `end` that
    aren't blank."""
    found, start = [], 0
    for part in response.split(end):
        if part.strip():
            found.append((part, start + len(part)))
        start += len(part) + len(end)
    return found


def turn_ends(sample: Sample) -> NDArray[np.intp]:
    """The place of the last token of each of the policy's turns: what it chose without a gap."""
    chosen = _chosen(sample)
    return chosen[np.append(np.diff(chosen) > 1, True)] if len(chosen) else chosen


def step_ends(sample: Sample, end: str, decode: Decode) -> NDArray[np.intp]:
    """The place of the last token of each step; the last step has the end token too."""
    assert sample.tokens is not None
    chosen = _chosen(sample)
    ids = sample.tokens[chosen].tolist()
    ends = [place for _, place in steps(sample.response, end)][:-1]
    found = [bisect_left(range(len(ids)), place, key=lambda i: len(decode(ids[: i + 1]))) for place in ends]
    return chosen[[*(min(i, len(ids) - 1) for i in found), len(ids) - 1]]


def by_token(samples: Sequence[Sample], per_step: str | None, decode: Decode) -> list[Sample]:
    """The encoded samples with the rewards of their tokens in place of the sum of these.

    A token in which several steps end has the sum of theirs.
    """
    result = list(samples)
    for i, sample in enumerate(samples):
        values = sample.meta.get("step_rewards" if per_step else "token_rewards")
        if values is None or sample.reward is None or sample.action is None:
            continue
        places = _chosen(sample)
        if per_step:
            places = turn_ends(sample) if per_step == TURN else step_ends(sample, per_step, decode)
        rewards = np.where(sample.action, np.float32(0 if per_step else np.nan), np.float32(np.nan))
        rewards[places] = 0
        np.add.at(rewards, places, values)
        result[i] = sample.replace(reward=None, token_reward=rewards)
    return result


def _chosen(sample: Sample) -> NDArray[np.intp]:
    """The places of the policy's tokens."""
    return np.empty(0, np.intp) if sample.action is None else np.flatnonzero(sample.action)
