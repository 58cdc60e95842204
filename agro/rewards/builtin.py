"""Rewards that compare a response with the sample's answer, `exact`, `regex` and `math`, and `overlong`."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from agro.errors import Refused
from agro.rewards import answers
from agro.rewards.final import LONGEST, Final, compare, final
from agro.rewards.protocol import Score, checked_options, score_known
from agro.rewards.workers import Pool
from agro.types import Sample, without_open_thought

AT_ONCE = 16  # responses per call of a worker: so many are repeated if one times out
Scorer = Callable[[list[str], list[str]], list[Score]]  # responses, answers
DEEPEST = 12  # brackets within brackets, which the parser reads in exponential time
DIGITS = 2000  # of a number that SymPy computes

_POWER = re.compile(r"(?<!\d)(\d+)\s*(?:\^|\*\*)\s*[{(]?\s*(\d+)\s*[)}]?(?!\s*(?:\^|\*\*|!|\d))")
_FACTORIAL = re.compile(r"(?<!\d)(\d+)\s*!")
_BRACKETED = re.compile(r"[{(]\s*(\d+)\s*[)}]")
_LARGE = re.compile(
    rf"\\[dt]?binom[^A-Za-z]*\d{{5}}|[A-Za-z][^()]*\)\s*\^\s*(?:\{{\s*)?\d{{4}}|\d{{{DIGITS + 1}}}"
)


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


def mathematical(options: Mapping[str, Any], *, timeout: float, workers: int) -> AnswerReward:
    """1.0 where the response's final answer equals the sample's as mathematics, else 0.0.

    Equal texts, numbers, choices, times, dates and words are compared here (`final`), the others by
    math-verify in worker processes (`mathematics`), `AT_ONCE` responses per call. An answer that the response
    denies, only bounds, or ties to a condition is not its answer. An answer that is too large to read
    or to compute isn't the sample's. The reward is unknown where that of the sample is, or can't be read, or
    where a comparison fails or takes more than `timeout` seconds.
    """
    checked_options("math", options, {})
    if importlib.util.find_spec("math_verify") is None:
        raise Refused("reward.name: math needs math-verify; pip install 'math-verify>=0.9,<0.10'")
    file = Path(answers.__file__).resolve().with_name("mathematics.py")  # an import would load SymPy here
    pool = Pool(f"{file}:grade", {}, timeout=timeout, workers=workers)

    def score(responses: list[str], expected: list[str]) -> list[Score]:
        correct = {answer: final(answer, may_be_cut=False) for answer in set(expected)}
        finals = [(final(response), correct[answer]) for response, answer in zip(responses, expected)]
        scores: list[Score | None] = [_without_sympy(*pair) for pair in finals]
        undecided = [i for i, score in enumerate(scores) if score is None]
        columns = {
            "completions": [finals[i][0].source for i in undecided],
            "answer": [finals[i][1].source for i in undecided],
        }
        for i, (value, error) in zip(undecided, pool.call(columns, len(undecided), at_once=AT_ONCE)):
            if error == "returned None":
                error = f"no mathematics can be read in the sample's answer {expected[i]!r:.80}"
            scores[i] = Score(value, error)
        return cast(list[Score], scores)

    return AnswerReward("math", score, pool=pool)


def _without_sympy(response: Final, answer: Final) -> Score | None:
    if not answer.text:
        return Score(None, "the sample's answer is empty")
    if not response.text:
        return Score(0.0)
    value = compare(response, answer)
    if value is not None:
        return Score(value)
    problem = too_large(answer.source)
    if problem:
        return Score(None, f"the sample's answer {problem}")
    problem = too_large(response.source)
    return Score(0.0, details={"math": f"the response's answer {problem}"}) if problem else None


def too_large(text: str) -> str | None:
    """Why SymPy doesn't read an answer: reading or evaluating it takes too long. None where it does."""
    if len(text) > LONGEST:
        return f"has {len(text)} characters, at most {LONGEST} are compared"
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        return f"has {deepest} brackets within brackets, at most {DEEPEST} are compared"
    if _is_large(text):
        return f"is too large to compute: only numbers of at most {DIGITS} digits are"
    return None


def _is_large(text: str) -> bool:
    """Whether a power, a factorial or another number is too large: they are computed, the innermost first."""
    for _ in range(3 * DEEPEST):
        previous = text
        if len(text) > LONGEST + DIGITS or _LARGE.search(text):
            return True
        for factorial in _FACTORIAL.finditer(text):
            if int(factorial[1]) > DIGITS // 3:
                return True
        for power in _POWER.finditer(text):
            if int(power[2]) > DIGITS / math.log10(max(2, int(power[1]))):
                return True
        text, count = _FACTORIAL.subn(lambda match: str(math.factorial(int(match[1]))), text)
        if not count:  # 9^9!: the power is one of the factorial, which is checked first
            text = _POWER.sub(lambda match: str(int(match[1]) ** int(match[2])), text)
        text = _BRACKETED.sub(r"\1", text)
        if text == previous:
            return False
    return True


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
