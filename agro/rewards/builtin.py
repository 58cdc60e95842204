"""Rewards that compare a response with the sample's answer, `exact` and `regex`, and `overlong`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agro.errors import Refused
from agro.rewards import answers
from agro.rewards.protocol import Score, checked_options, score_known
from agro.rewards.workers import Pool
from agro.types import Sample, without_open_thought

Scorer = Callable[[list[str], list[str]], list[Score]]  # responses, answers


class AnswerReward:
    """Scores the samples that have an answer in `meta`; the reward of the others is unknown."""

    maximum: float | None = 1.0

    def __init__(
        self, name: str, scorer: Scorer, marker: str | None = None, pool: Pool | None = None
    ) -> None:
        self.name = name
        self._scorer = scorer
        self._marker = marker  # the text before the answer in the answer column
        self._pool = pool

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_known(
            samples,
            self._answer,
            lambda answered, expected: self._scorer([_said(s) for s in answered], expected),
        )

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        try:
            self._answer_in(columns)
        except LookupError as error:
            return str(error.args[0])
        return None

    def _answer(self, sample: Sample) -> str:
        return self._answer_in(sample.meta)

    def _answer_in(self, columns: Mapping[str, Any]) -> str:
        answer = columns.get("answer")
        if answer is None:
            raise LookupError("the sample has no answer")
        is_valid = isinstance(answer, str | int | float) and not isinstance(answer, bool)
        if not is_valid or answer in (math.inf, -math.inf):
            kind = type(answer).__name__
            raise LookupError(f"the sample's answer is a {kind}, expected text or a finite number")
        if self._marker is None:
            return str(answer)
        marked = answers.after_marker(str(answer), self._marker)
        if marked is None:
            raise LookupError(f"the sample's answer has no {self._marker!r}")
        return marked

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _said(sample: Sample) -> str:
    """The response without a thought that isn't closed: what stands there is no answer yet."""
    return without_open_thought(sample.response) if sample.thought == "open" else sample.response


def exact(options: Mapping[str, Any], **_: Any) -> AnswerReward:
    """1.0 where the response is the answer, else 0.0.

    Options: `strip` (true): ignore surrounding white space; `case` (true): letter case counts.
    """
    settings = checked_options("exact", options, {"strip": True, "case": True})

    def form(text: str) -> str:
        if settings["strip"]:
            text = text.strip()
        return text if settings["case"] else text.casefold()

    def score(responses: list[str], expected: list[str]) -> list[Score]:
        return [Score(float(form(r) == form(a))) for r, a in zip(responses, expected)]

    return AnswerReward("exact", score)


def regex(options: Mapping[str, Any], *, timeout: float, workers: int) -> AnswerReward:
    """1.0 where the final answer of the response is the answer (`answers.matches`), else 0.0.

    Options: `marker` ("the final answer is"): the final answer follows its last occurrence on that line;
    `pattern`: the final answer is the group of this regular expression's last match; `answer_marker`: the
    sample's answer follows this marker in its column (GSM8K's "#### 18"). A pattern runs in worker
    processes, because it may never end.
    """
    settings = checked_options(
        "regex", options, {"marker": answers.MARKER, "pattern": "", "answer_marker": ""}
    )
    marker, pattern = settings["marker"], settings["pattern"]
    answer_marker = settings["answer_marker"] or None
    if not pattern and not marker.strip():
        raise Refused("reward.options.marker: expected text, got none")
    if not pattern:

        def score(responses: list[str], expected: list[str]) -> list[Score]:
            finals = [answers.after_marker(response, marker) for response in responses]
            return [Score(answers.matches(final, answer)) for final, answer in zip(finals, expected)]

        return AnswerReward("regex", score, answer_marker)

    if "marker" in options:
        raise Refused("reward.options: marker and pattern exclude each other; give one of them")
    _check_pattern(pattern)
    pool = Pool(
        f"{Path(answers.__file__).resolve()}:match_pattern",
        {"pattern": pattern},
        timeout=timeout,
        workers=workers,
    )

    def score_in_worker(responses: list[str], expected: list[str]) -> list[Score]:
        outcomes = pool.call({"completions": responses, "answer": expected}, len(expected))
        return [Score(value, error) for value, error in outcomes]

    return AnswerReward("regex", score_in_worker, answer_marker, pool)


def _check_pattern(pattern: str) -> None:
    """Raise `Refused` for what is no regular expression with one group."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise Refused(f"reward.options.pattern: {error}, got {pattern!r}") from None
    if groups != 1:
        raise Refused(
            f"reward.options.pattern: expected one group, around the answer, got {groups} in {pattern!r}; "
            "write (?:…) for other groups"
        )


class OverlongReward:
    """0 for up to `max_tokens` − `buffer` tokens, then falling linearly to −1 at `max_tokens`, and −1 beyond
    (DAPO, arXiv 2503.14476, eq. 13).

    The tokens are those that the policy chose. The reward of a sample without tokens is unknown.
    """

    name = "overlong"
    maximum: float | None = 0.0

    def __init__(self, max_tokens: int, buffer: int) -> None:
        self.max_tokens, self.buffer = max_tokens, buffer

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        if sample.action is None:
            return Score(None, "the sample has no tokens")
        excess = int(np.count_nonzero(sample.action)) - (self.max_tokens - self.buffer)
        return Score(-min(max(excess / self.buffer, 0.0), 1.0) + 0.0)

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        return None

    def close(self) -> None:
        pass


def overlong(options: Mapping[str, Any], **_: Any) -> OverlongReward:
    """Options: `max_tokens`, as sampler.max_new; `buffer`: the last tokens of these, over which it falls."""
    settings = checked_options("overlong", options, {"max_tokens": int, "buffer": int})
    for name, value in settings.items():
        if value < 1:
            raise Refused(f"reward.options.{name}: expected a number of tokens, 1 or more, got {value}")
    if settings["buffer"] > settings["max_tokens"]:
        raise Refused(
            f"reward.options.buffer: expected at most max_tokens ({settings['max_tokens']}), got "
            f"{settings['buffer']}"
        )
    return OverlongReward(**settings)
