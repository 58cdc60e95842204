"""Rewards that compare a response with the sample's answer, such as `exact`; `overlong`; and the options of
`model`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from agro.config import Count, Section
from agro.errors import Refused
from agro.rewards.protocol import Reward, Score, score_known
from agro.rewards.workers import Pool
from agro.types import Sample, without_open_thought

Scorer = Callable[[list[str], list[str]], list[Score]]  # responses, answers


@dataclass(eq=False)
class AnswerReward:
    """Scores the samples that have an answer in `meta`; the reward of the others is unknown."""

    name: str
    scorer: Scorer
    expected: Callable[[str], str] = str
    """Extracts the answer from the answer column; raises `LookupError` if it has none."""
    pool: Pool | None = None
    maximum: float | None = 1.0

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_known(
            samples,
            lambda sample: self._answer_in(sample.meta),
            lambda answered, expected: self.scorer([_answer_text(s) for s in answered], expected),
        )

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        try:
            self._answer_in(columns)
        except LookupError as error:
            return str(error.args[0])
        return None

    def _answer_in(self, columns: Mapping[str, Any]) -> str:
        answer = columns.get("answer")
        if answer is None:
            raise LookupError("the sample has no answer")
        is_valid = isinstance(answer, str | int | float) and not isinstance(answer, bool)
        if not is_valid or answer in (math.inf, -math.inf):
            kind = type(answer).__name__
            raise LookupError(f"the sample's answer is a {kind}, expected text or a finite number")
        return self.expected(str(answer))

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def _answer_text(sample: Sample) -> str:
    """The response without an unclosed thought, which contains no answer yet."""
    return without_open_thought(sample.response) if sample.thought == "open" else sample.response


class ExactOptions(Section):
    strip: bool = True
    """ignore surrounding white space"""
    case: bool = True
    """letter case counts"""


def exact(options: ExactOptions, **_: Any) -> AnswerReward:
    """1.0 if the response equals the answer, else 0.0."""

    def form(text: str) -> str:
        if options.strip:
            text = text.strip()
        return text if options.case else text.casefold()

    def score(responses: list[str], expected: list[str]) -> list[Score]:
        return [Score(float(form(r) == form(a))) for r, a in zip(responses, expected)]

    return AnswerReward("exact", score)


class OverlongReward(Reward):
    """0 for up to `max_tokens` − `buffer` tokens, then falling linearly to −1 at `max_tokens`, and −1 beyond
    (DAPO, arXiv 2503.14476, eq. 13).

    It counts the tokens that the policy chose. The reward of a sample without tokens is unknown.
    """

    name = "overlong"
    maximum: float | None = 0.0

    def __init__(self, max_tokens: int, buffer: int) -> None:
        self.max_tokens, self.buffer = max_tokens, buffer

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        scores = []
        for sample in samples:
            if sample.action is None:
                scores.append(Score(None, "the sample has no tokens"))
                continue
            excess = int(np.count_nonzero(sample.action)) - (self.max_tokens - self.buffer)
            scores.append(Score(-min(max(excess / self.buffer, 0.0), 1.0) + 0.0))
        return scores


class OverlongOptions(Section):
    max_tokens: Count
    """as sampler.max_new"""
    buffer: Count
    """the last of these tokens, over which the reward falls"""


def overlong(options: OverlongOptions, **_: Any) -> OverlongReward:
    """A penalty for long responses."""
    if options.buffer > options.max_tokens:
        raise Refused(
            f"reward.options.buffer: expected at most max_tokens ({options.max_tokens}), got {options.buffer}"
        )
    return OverlongReward(options.max_tokens, options.buffer)


class ModelOptions(Section):
    path: str
    """a folder or hub name of a sequence-classification model"""
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    template: Literal["auto", "chat", "plain"] = "auto"
    """how prompt and response are joined: "chat": a conversation; "plain": their concatenation; "auto": by
    the prompt's type"""
    label: str = ""
    """the label of a classifier whose probability is the reward"""
    max_length: Count = 2**20
    """tokens of prompt and response; a longer one has no reward"""
    batch: Count = 16
    """sequences per forward pass"""
