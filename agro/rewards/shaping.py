"""From the values of reward functions to training rewards: several parts, a meaning, places in the response.

Caps, gates and weights produce the stored reward. Whitening and clipping compare the responses of a step with
each other, so each step applies them to its samples, and held-out rewards are without them.

A meaning is a number, equal for two spellings of an answer or two programs that do the same. A user's
function returns it, called like a reward. For a canonical form it is a hash:

    def meaning(completions, **columns):
        return [number(text.lower().strip(" .")) for text in completions]

For unit tests it is the results as bits: `sum(passed << i for i, passed in enumerate(results))`.

With `reward.places` a function returns the reward of each token, turn or step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.config import RewardConfig, RewardPart
from agro.errors import Refused
from agro.rewards.protocol import Reward, Score
from agro.types import Sample

BITS = 53  # of the integers that a float represents exactly
TOKEN, TURN = "token", "turn"  # values of reward.places; any other text separates steps
Values = NDArray[np.float64]
Decode = Callable[[Sequence[int]], str]


def labeled(parts: Sequence[RewardPart]) -> dict[str, RewardPart]:
    """The parts by their names in store and metrics."""
    return {part.label or part.name: part for part in parts}


def counted(values: Mapping[str, float], parts: Mapping[str, RewardPart]) -> dict[str, float]:
    """Each part's value within its caps, before its weight.

    If a part with a `gate` is below its gate, the parts without gates count 0.
    """
    is_open = all(values[name] >= part.gate for name, part in parts.items() if part.gate is not None)
    amounts = {}
    for name, part in parts.items():
        if part.weight:
            capped = float(np.clip(values[name], part.at_least, part.at_most))
            amounts[name] = capped if is_open or part.gate is not None else 0.0
    return amounts


class CombinedReward:
    """Σ weight · value over `rewards`, within caps and behind gates, see `counted`.

    The reward is unknown if a part with a weight or a gate is unknown. Other parts are measured but don't
    count. `Score.parts` has the values before caps and gates.
    """

    def __init__(self, name: str, rewards: Mapping[str, Reward], parts: Mapping[str, RewardPart]) -> None:
        """`parts`: how each of the `rewards` counts, by its name."""
        self.name, self._rewards, self._parts = name, dict(rewards), dict(parts)
        self._needed = [name for name, part in parts.items() if part.weight or part.gate is not None]

    @property
    def maximum(self) -> float | None:
        total = 0.0
        for name, part in self._parts.items():
            if not part.weight:
                continue
            bounds = [x for x in (self._rewards[name].maximum, part.at_most) if x is not None]
            if not bounds or part.weight < 0:
                return None
            total += part.weight * min(bounds)
        return total

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        columns = [reward.score(samples) for reward in self._rewards.values()]
        return [self._sum(dict(zip(self._rewards, scores))) for scores in zip(*columns)]

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        problems = [self._rewards[name].problem(columns) for name in self._needed]
        return next(filter(None, problems), None)

    def _sum(self, scores: Mapping[str, Score]) -> Score:
        values = {name: score.value for name, score in scores.items()}
        scored = {name: value for name, value in values.items() if value is not None}
        missing = [name for name in self._needed if name not in scored]
        if missing:
            causes = (f"{name}: {scores[name].error or 'no reason given'}" for name in missing)
            return Score(None, "; ".join(causes), values)
        total = sum(self._parts[name].weight * value for name, value in counted(scored, self._parts).items())
        if not math.isfinite(total):
            return Score(None, f"the sum is {total}", values)
        return Score(total, None, values)

    def close(self) -> None:
        for reward in self._rewards.values():
            reward.close()


def number(canonical: str) -> float:
    """The number of a canonical form, the same on every machine: 53 bits of a hash."""
    digest = blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") >> (64 - BITS))


class MeaningfulReward:
    """Adds the number of each response's meaning to the scores of `reward`.

    If the meaning is unknown, so is the reward.
    """

    def __init__(self, reward: Reward, meaning: Reward) -> None:
        self.reward, self.meaning = reward, meaning
        self.name = reward.name

    @property
    def maximum(self) -> float | None:
        return self.reward.maximum

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        scores = []
        for score, meaning in zip(self.reward.score(samples), self.meaning.score(samples), strict=True):
            if meaning.value is None:
                error = score.error or f"meaning: {meaning.error}"
                scores.append(replace(score, value=None, error=error))
            else:
                scores.append(replace(score, meaning=meaning.value))
        return scores

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        return self.reward.problem(columns) or self.meaning.problem(columns)

    def close(self) -> None:
        self.reward.close()
        self.meaning.close()


def shaped(samples: Sequence[Sample], config: RewardConfig) -> list[Sample]:
    """Whiten and clip the rewards of a step's samples, see `reward.whiten` and `reward.clip`.

    A sample without a reward stays without one.
    """
    scored = [i for i, sample in enumerate(samples) if sample.reward is not None]
    reward = np.array([samples[i].reward for i in scored], dtype=np.float64)
    if config.whiten != "none":
        import torch  # here, since scoring alone doesn't need it

        from agro.objectives.reduce import standardize

        subset = [samples[i] for i in scored]
        weights, columns = _columns(subset, config)
        numbers = _groups(subset) if config.whiten == "group" else np.zeros(len(subset), np.int64)
        group = torch.from_numpy(numbers)
        # The rows of one episode share a reward, and each row counts.
        whitened = [standardize(torch.from_numpy(x), group).numpy() for x in columns.values()]
        reward = np.array(list(weights.values())) @ np.array(whitened)
    if config.clip is not None:
        reward = reward.clip(*config.clip)
    result = list(samples)
    for i, value in zip(scored, reward.tolist(), strict=True):
        result[i] = samples[i].replace(reward=value)
    return result


def shares(samples: Sequence[Sample], config: RewardConfig) -> dict[str, float | None]:
    """Each part's share of the variance of the reward within the groups: Cov(part, reward) / Var(reward).

    The shares add up to 1. A part that the others outweigh has a share near 0, one that opposes them less.
    None if no two responses to one prompt differ.
    """
    parts = labeled(config.functions)
    complete = [s for s in samples if s.reward is not None and not unrecorded(s, parts)]
    weights, columns = _columns(complete, config)
    group = _groups(complete)
    for name, column in columns.items():
        means = np.bincount(group, column) / np.bincount(group)
        columns[name] = weights[name] * (column - means[group])
    total = np.sum(list(columns.values()), axis=0)
    variance = float(np.square(total).sum())
    if not variance:
        return dict.fromkeys(columns)
    return {name: float(column @ total) / variance for name, column in columns.items()}


def _columns(samples: Sequence[Sample], config: RewardConfig) -> tuple[dict[str, float], dict[str, Values]]:
    """The weight of each part that has one, and its `counted` values [N]; a single reward has weight 1."""
    if not config.functions:
        return {"": 1.0}, {"": np.array([sample.reward for sample in samples], dtype=np.float64)}
    parts = labeled(config.functions)
    for sample in samples:
        if missing := unrecorded(sample, parts):
            raise Refused(
                f"sample {sample.id} (prompt {sample.prompt_id}) has a reward, but its part {missing[0]} "
                "isn't recorded. What to do: remove reward.whiten, or draw only samples of a run with these "
                "reward.functions (data.sources)"
            )
    rows = [counted(sample.meta["reward_parts"], parts) for sample in samples]
    weights = {name: part.weight for name, part in parts.items() if part.weight}
    return weights, {name: np.array([row[name] for row in rows], dtype=np.float64) for name in weights}


def unrecorded(sample: Sample, parts: Mapping[str, RewardPart]) -> list[str]:
    """The parts that count but have no recorded value, as in an imported log."""
    recorded: Any = sample.meta.get("reward_parts")
    values = recorded if isinstance(recorded, dict) else {}
    counts = [name for name, part in parts.items() if part.weight or part.gate is not None]
    return [name for name in counts if not isinstance(values.get(name), int | float)]


def _groups(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """[N] the number of each sample's prompt."""
    numbers = {prompt_id: i for i, prompt_id in enumerate(dict.fromkeys(s.prompt_id for s in samples))}
    return np.array([numbers[sample.prompt_id] for sample in samples], dtype=np.int64)


def steps(response: str, end: str) -> list[tuple[str, int]]:
    """The steps of a response, its parts between the texts `end` that aren't blank, and the character at
    which each ends."""
    parts, start = [], 0
    for part in response.split(end):
        if part.strip():
            parts.append((part, start + len(part)))
        start += len(part) + len(end)
    return parts


def turn_ends(sample: Sample) -> NDArray[np.intp]:
    """The position of the last token of each of the policy's turns: tokens that it chose without a gap."""
    chosen = _chosen(sample)
    return chosen[np.append(np.diff(chosen) > 1, True)] if len(chosen) else chosen


def step_ends(sample: Sample, end: str, decode: Decode) -> NDArray[np.intp]:
    """The position of the last token of each step; the last step includes the end token."""
    assert sample.tokens is not None
    chosen = _chosen(sample)
    ids = sample.tokens[chosen].tolist()
    ends = [stop for _, stop in steps(sample.response, end)][:-1]
    tokens = [bisect_left(range(len(ids)), stop, key=lambda i: len(decode(ids[: i + 1]))) for stop in ends]
    return chosen[[*(min(i, len(ids) - 1) for i in tokens), len(ids) - 1]]


def by_token(samples: Sequence[Sample], places: str, decode: Decode) -> list[Sample]:
    """Replace the rewards of encoded samples by the rewards of their tokens, see `reward.places`.

    A token at which several steps end has the sum of their rewards.
    """
    result = list(samples)
    for i, sample in enumerate(samples):
        values = sample.meta.get("place_rewards")
        if values is None or sample.reward is None or sample.action is None:
            continue
        if places == TOKEN:
            ends = _chosen(sample)
        else:
            ends = turn_ends(sample) if places == TURN else step_ends(sample, places, decode)
        rewards = np.where(sample.action, np.float32(0), np.float32(np.nan))
        np.add.at(rewards, ends, values)
        result[i] = sample.replace(reward=None, token_reward=rewards)
    return result


def _chosen(sample: Sample) -> NDArray[np.intp]:
    """The positions of the policy's tokens."""
    return np.empty(0, np.intp) if sample.action is None else np.flatnonzero(sample.action)
