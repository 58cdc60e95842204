"""Held-out evaluation: accuracy, pass@k, best@k and majority@k, with 95 % intervals of means over prompts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agro.io.numbers import none_if_nan
from agro.rewards import Reward, maker_of
from agro.stats.intervals import described, standard_error
from agro.types import Prompt, Sample

if TYPE_CHECKING:
    from agro.config import SamplerConfig
    from agro.rollout.rollout import Rollout

__all__ = ["Heldout", "heldout", "pass_at_k"]


@dataclass(frozen=True)
class Heldout:
    """Rewards of n responses to each of M held-out prompts.

    `rewards`: [M,n], NaN where scoring failed. `samples`: in the order of prompts. `errors`: of failed
    scores. `reward`: its name. `meanings`: by number of a response, where the reward gives them.
    """

    rewards: NDArray[np.float64]
    samples: tuple[Sample, ...]
    errors: tuple[str, ...] = ()
    reward: str = ""
    meanings: Mapping[int, float] = field(default_factory=dict)

    @property
    def means(self) -> NDArray[np.float64]:
        """[M] the mean over the scored responses to each prompt; NaN where there are none."""
        scored = (~np.isnan(self.rewards)).sum(1)
        return np.where(scored > 0, np.nansum(self.rewards, axis=1) / np.maximum(scored, 1), math.nan)

    @property
    def mean(self) -> float:
        """The mean over prompts of the mean over their scored responses."""
        values = _known(self.means)
        return float(values.mean()) if len(values) else math.nan

    @property
    def se(self) -> float:
        """Standard error of `mean` over prompts."""
        return standard_error(_known(self.means))

    @property
    def unscored(self) -> int:
        return int(np.isnan(self.rewards).sum())

    @property
    def is_unknown(self) -> bool:
        return bool(np.isnan(self.rewards).all())

    def mean_rewards(self) -> list[float | None]:
        """`means`, None where unknown."""
        return [none_if_nan(mean) for mean in self.means.tolist()]

    @cached_property
    def responses(self) -> list[list[Sample]]:
        """The samples of each response by its number, n to a prompt: of an episode all its rows."""
        rows: dict[int, list[Sample]] = {}
        for sample in self.samples:
            rows.setdefault(int(sample.meta["index"]), []).append(sample)
        return [rows[number] for number in sorted(rows)]

    @property
    def lengths(self) -> NDArray[np.float64]:
        """[M,n] tokens of the policy in each response; NaN where they aren't known."""
        counts = [
            sum(math.nan if sample.action is None else float(sample.action.sum()) for sample in response)
            for response in self.responses
        ]
        return np.array(counts, dtype=np.float64).reshape(self.rewards.shape)

    @property
    def truncated(self) -> NDArray[np.float64]:
        """[M,n] 1 where a response reached the limit of tokens before its end."""
        ends = [float(response[-1].end == "cut") for response in self.responses]
        return np.array(ends).reshape(self.rewards.shape)

    @cached_property
    def answers(self) -> list[Hashable | None]:
        """What each response votes for, by its number: see `answer_of`."""
        numbers = sorted({int(sample.meta["index"]) for sample in self.samples})
        return [
            answer_of(response[-1], self.meanings.get(number), self.reward)
            for number, response in zip(numbers, self.responses, strict=True)
        ]

    def to_json(
        self, threshold: float | None, along: Mapping[str, NDArray[np.float64]] | None = None
    ) -> dict[str, Any]:
        """Mean reward, accuracy, pass@k (k = 1, 2, 4, … ≤ n), majority@k (k = 4, 8, …), length and share of
        truncated responses with 95 % intervals, see `agro.rollout.evaluate`. And best@k (k = 2, 4, …), which
        is pass@k where all rewards are 0 or 1.

        Each is the mean over the prompts with k scored responses. `threshold`: the reward from which a
        response passes; where it is None, nothing is said of passing. `along`: by name [M,n] what else was
        measured of the responses.
        """
        n = self.rewards.shape[1]
        sizes = [2**i for i in range(n.bit_length())]
        scored = [np.flatnonzero(~np.isnan(row)) for row in self.rewards]
        known = [row[places] for row, places in zip(self.rewards, scored)]
        rows = {"reward_mean": self.means}
        if threshold is not None:
            passed = [(values >= threshold).tolist() for values in known]
            counts = [(len(each), sum(each)) for each in passed]
            rows["accuracy"] = np.array([pass_at_k(*count, 1) for count in counts])
            rows |= {f"pass@{k}": np.array([pass_at_k(*count, k) for count in counts]) for k in sizes}
            for k in sizes[2:]:
                voted = [[self.answers[i * n + j] for j in places] for i, places in enumerate(scored)]
                shares = [majority_of_k(*of_prompt, k) for of_prompt in zip(passed, voted)]
                rows[f"majority@{k}"] = np.array(shares)
        if not np.isin(_known(self.rewards), (0.0, 1.0)).all():
            rows |= {f"best@{k}": np.array([best_of_k(values, k) for values in known]) for k in sizes[1:]}
        if self.samples:
            rows |= {"length": self.lengths.mean(1), "truncated": self.truncated.mean(1)}
        rows |= {name: values.mean(1) for name, values in (along or {}).items()}
        measured = {name: described(_known(values)) for name, values in rows.items()}
        return {**measured, "pass_at": threshold, "unscored": self.unscored}

    def by_prompt(self) -> list[dict[str, Any]]:
        """One record a prompt: its id, text, rewards (None where unknown), responses and their lengths."""
        records = []
        tables = (self.rewards.tolist(), self.lengths.tolist(), self.truncated.tolist())
        n = self.rewards.shape[1]
        for row, (rewards, lengths, truncated) in enumerate(zip(*tables, strict=True)):
            members = [response[-1] for response in self.responses[row * n : (row + 1) * n]]
            records.append(
                {
                    "prompt_id": members[0].prompt_id,
                    "prompt": members[0].prompt,
                    "rewards": [none_if_nan(reward) for reward in rewards],
                    "responses": [sample.response for sample in members],
                    "lengths": [none_if_nan(length) for length in lengths],
                    "truncated": [bool(is_cut) for is_cut in truncated],
                }
            )
        return records


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k responses passes (arXiv 2107.03374, eq. 1).

    `passed` of `n` responses passed; NaN where n < k.
    """
    if n < k:
        return math.nan
    return 1.0 - math.prod(1.0 - k / i for i in range(n - passed + 1, n + 1))


def best_of_k(rewards: NDArray[np.float64], k: int) -> float:
    """Unbiased estimate of the expected highest reward of k responses, from n of them; NaN where n < k.

    The i-th of the sorted rewards is the highest of k in C(i - 1, k - 1) of the C(n, k) choices.
    """
    n = len(rewards)
    if n < k:
        return math.nan
    ways = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    return float(np.sort(rewards) @ np.array(ways))


def heldout(
    rollout: Rollout,
    reward: Reward,
    prompts: Sequence[Prompt],
    sampler: SamplerConfig,
    seed: int,
    samples: Iterable[Sample] | None = None,
) -> Heldout:
    """Sample `sampler.n` responses to each prompt and score them; samples of one episode are one response.

    `samples`: these responses, where they were sampled before.
    """
    if samples is None:
        samples = rollout.sample(prompts, sampler.n, sampler, seed=seed)
    samples = sorted(samples, key=lambda s: int(s.meta["index"]))
    scores = reward.score(samples)
    values = [math.nan if score.value is None else score.value for score in scores]
    scored = [
        s.replace(reward=score.value, meta={**s.meta, **score.meta})
        for s, score in zip(samples, scores, strict=True)
    ]
    rows = {int(s.meta["index"]): i for i, s in enumerate(samples)}  # sample of each response
    errors = [scores[i].error for i in rows.values()]
    return Heldout(
        np.array([values[i] for i in rows.values()], dtype=np.float64).reshape(len(prompts), sampler.n),
        tuple(scored),
        tuple(error for error in errors if error),
        reward.name,
        {number: m for number, i in rows.items() if (m := scores[i].meaning) is not None},
    )


CHOICES = 1000  # of k responses; where there are more of them, so many are drawn


def answer_of(sample: Sample, meaning: float | None, reward: str) -> Hashable | None:
    """What counts as the same answer: the meaning, where the reward gives one; else the final answer, where
    the reward finds some, or the text. None where there is no final answer, which votes for nothing."""
    if meaning is not None:
        return meaning
    maker = maker_of(reward)
    return sample.response.strip() if maker is None else maker.final(sample.response)


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
    shares = []
    for chosen in choices:
        right: dict[Hashable, list[bool]] = defaultdict(list)
        for i in chosen:
            if voted[i] is not None:
                right[voted[i]].append(passed[i])
        most = max(map(len, right.values()), default=0)
        winners = [votes for votes in right.values() if len(votes) == most]
        shares.append(sum(map(sum, winners)) / most / len(winners) if winners else 0.0)
    return float(np.mean(shares))
