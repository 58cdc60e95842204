"""From what reward functions say to what is trained on: several parts, a meaning, places in the response.

Caps, gates and weights make the reward that is stored. Whitening and clipping compare the responses of a step
with each other, so a step applies them to what it draws, and held-out rewards are without them.

A meaning is a number: equal for two spellings of an answer, or programs that do the same. A function of the
user's gives it, called as a reward is. For a canonical form it is a hash:

    def meaning(completions, **columns):
        return [number(text.lower().strip(" .")) for text in completions]

For unit tests it is their results as bits: `sum(passed << i for i, passed in enumerate(results))`.

With `reward.places` a function says where its reward came: with each token, turn or step.
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

BITS = 53  # of the integers that a float has exactly
TOKEN, TURN = "token", "turn"  # of reward.places; another text ends steps
Values = NDArray[np.float64]
Decode = Callable[[Sequence[int]], str]


def labeled(parts: Sequence[RewardPart]) -> dict[str, RewardPart]:
    """The parts by their names in store and metrics."""
    return {part.label or part.name: part for part in parts}


def counted(values: Mapping[str, float], parts: Mapping[str, RewardPart]) -> dict[str, float]:
    """What each part counts with, before its weight: its value within its caps.

    It is 0 behind a gate that isn't reached: where a part with a `gate` is below it, only parts with gates
    count.
    """
    is_open = all(values[name] >= part.gate for name, part in parts.items() if part.gate is not None)
    amounts = {}
    for name, part in parts.items():
        if part.weight:
            within = float(np.clip(values[name], part.at_least, part.at_most))
            amounts[name] = within if is_open or part.gate is not None else 0.0
    return amounts


class CombinedReward:
    """Σ weight · value over `rewards`, within caps and behind gates, see `counted`.

    The reward is unknown where a part with a weight or a gate is unknown. Another part is measured and not
    counted. `Score.parts` has the values as they are.
    """

    def __init__(self, name: str, rewards: Mapping[str, Reward], parts: Mapping[str, RewardPart]) -> None:
        """`parts`: how each of the `rewards` counts, by their names."""
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
        known = {name: value for name, value in values.items() if value is not None}
        missing = [name for name in self._needed if name not in known]
        if missing:
            causes = (f"{name}: {scores[name].error or 'no reason given'}" for name in missing)
            return Score(None, "; ".join(causes), values)
        total = sum(self._parts[name].weight * value for name, value in counted(known, self._parts).items())
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
    """The scores of `reward`, each with the number of the response's meaning.

    Where that fails, the reward is unknown: what a response means would be decided by nothing.
    """

    def __init__(self, reward: Reward, meaning: Reward) -> None:
        self.reward, self.meaning = reward, meaning
        self.name = reward.name

    @property
    def maximum(self) -> float | None:
        return self.reward.maximum

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        found = []
        for score, meaning in zip(self.reward.score(samples), self.meaning.score(samples), strict=True):
            if meaning.value is None:
                error = score.error or f"meaning: {meaning.error}"
                found.append(replace(score, value=None, error=error))
            else:
                found.append(replace(score, meaning=meaning.value))
        return found

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        return self.reward.problem(columns) or self.meaning.problem(columns)

    def close(self) -> None:
        self.reward.close()
        self.meaning.close()


def shaped(samples: Sequence[Sample], config: RewardConfig) -> list[Sample]:
    """The samples of a step with the rewards that are trained on, see `reward.whiten` and `reward.clip`.

    A sample without a reward stays without one.
    """
    scored = [i for i, sample in enumerate(samples) if sample.reward is not None]
    reward = np.array([samples[i].reward for i in scored], dtype=np.float64)
    if config.whiten != "none":
        import torch  # here: whoever only scores needs none

        from agro.objectives.reduce import standardize

        some = [samples[i] for i in scored]
        weights, columns = _columns(some, config)
        group = torch.from_numpy(_groups(some) if config.whiten == "group" else np.zeros(len(some), np.int64))
        # The rows of one episode have one reward, and are counted as often as there are.
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

    The shares add up to 1. A part that others outweigh has nearly 0, and one that works against them less.
    None where no two responses to one prompt differ.
    """
    parts = labeled(config.functions)
    some = [s for s in samples if s.reward is not None and not unrecorded(s, parts)]
    weights, columns = _columns(some, config)
    group = _groups(some)
    for name, column in columns.items():
        means = np.bincount(group, column) / np.bincount(group)
        columns[name] = weights[name] * (column - means[group])
    total = np.sum(list(columns.values()), axis=0)
    variance = float(np.square(total).sum())
    if not variance:
        return dict.fromkeys(columns)
    return {name: float(column @ total) / variance for name, column in columns.items()}


def _columns(samples: Sequence[Sample], config: RewardConfig) -> tuple[dict[str, float], dict[str, Values]]:
    """The weight of each part that has one, and [N] what it counts with; or the one reward with 1."""
    if not config.functions:
        return {"": 1.0}, {"": np.array([sample.reward for sample in samples], dtype=np.float64)}
    parts = labeled(config.functions)
    for sample in samples:
        if missing := unrecorded(sample, parts):
            raise Refused(
                f"sample {sample.id} (prompt {sample.prompt_id}) has a reward, but of its part {missing[0]} "
                "nothing is recorded. What to do: remove reward.whiten, or draw only what a run with these "
                "reward.functions has made (data.sources)"
            )
    rows = [counted(sample.meta["reward_parts"], parts) for sample in samples]
    weights = {name: part.weight for name, part in parts.items() if part.weight}
    return weights, {name: np.array([row[name] for row in rows], dtype=np.float64) for name in weights}


def unrecorded(sample: Sample, parts: Mapping[str, RewardPart]) -> list[str]:
    """The parts that count and have no value on record, as in an imported log."""
    recorded: Any = sample.meta.get("reward_parts")
    values = recorded if isinstance(recorded, dict) else {}
    counts = [name for name, part in parts.items() if part.weight or part.gate is not None]
    return [name for name in counts if not isinstance(values.get(name), int | float)]


def _groups(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """[N] the number of each sample's prompt."""
    numbers = {prompt_id: i for i, prompt_id in enumerate(dict.fromkeys(s.prompt_id for s in samples))}
    return np.array([numbers[sample.prompt_id] for sample in samples], dtype=np.int64)


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


def by_token(samples: Sequence[Sample], places: str, decode: Decode) -> list[Sample]:
    """The encoded samples with the rewards of their tokens in place of the sum of these, see `reward.places`.

    A token in which several steps end has the sum of theirs.
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
    """The places of the policy's tokens."""
    return np.empty(0, np.intp) if sample.action is None else np.flatnonzero(sample.action)
