"""What a response means, as a number: equal for two spellings of an answer, or programs that do the same.

A function of the user's gives the number, called as a reward is. For a canonical form it is a hash:

    def meaning(completions, **columns):
        return [number(text.lower().strip(" .")) for text in completions]

For unit tests it is their results as bits: `sum(passed << i for i, passed in enumerate(results))`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from agro.rewards.protocol import Reward, Score
from agro.types import Sample

BITS = 53  # of the integers that a float has exactly


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
