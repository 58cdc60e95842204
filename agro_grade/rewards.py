"""agro's rewards `math`, `regex` and `code`, made from this package's graders."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agro.config import Count, NoOptions, Section
from agro.errors import Refused
from agro.rewards import AnswerReward, Pool, RewardMaker, Score, score_known
from agro.types import Sample
from agro_grade import answers, mathematics
from agro_grade.code import Case, ProgramGrader
from agro_grade.final import final
from agro_grade.sandbox import Level, LocalSandbox, NoSandbox, Sandbox

AT_ONCE = 16  # responses per call of a worker: all are repeated if one times out


def mathematical(options: NoOptions, *, timeout: float, workers: int) -> AnswerReward:
    """1.0 if the response's final answer equals the sample's as mathematics, else 0.0.

    As `agro_grade.mathematics.grade`, with SymPy in worker processes, `AT_ONCE` responses per call. The
    reward is unknown if the sample's answer is unknown or unreadable, or if a comparison fails or takes
    more than `timeout` seconds.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise Refused("reward.name: math needs math-verify; pip install 'math-verify>=0.9,<0.10'")
    pool = Pool("agro_grade.symbolic:grade", {}, timeout=timeout, workers=workers)

    def score(responses: list[str], expected: list[str]) -> list[Score]:
        correct = {answer: final(answer, may_be_cut=False) for answer in set(expected)}
        finals = [(final(response), correct[answer]) for response, answer in zip(responses, expected)]
        scores = [_scored(mathematics.without_sympy(*pair)) for pair in finals]
        undecided = [i for i, score in enumerate(scores) if score is None]
        columns = {
            "completions": [finals[i][0].source for i in undecided],
            "answer": [finals[i][1].source for i in undecided],
        }
        for i, (value, error) in zip(undecided, pool.call(columns, len(undecided), at_once=AT_ONCE)):
            if error == "returned None":
                error = mathematics.no_mathematics(expected[i])
            scores[i] = Score(value, error)
        return cast(list[Score], scores)

    return AnswerReward("math", score, pool=pool)


def _scored(grade: mathematics.Grade | None) -> Score | None:
    if grade is None:
        return None
    if grade.value is None:
        return Score(None, grade.reason)
    return Score(grade.value, details={"math": grade.reason} if grade.reason else {})


class RegexOptions(Section):
    marker: str = answers.MARKER
    """the final answer follows its last occurrence, on that line"""
    answer_marker: str = ""
    """the sample's answer follows this marker in its column (GSM8K's "#### 18")"""


def regex(options: RegexOptions, **_: Any) -> AnswerReward:
    """1.0 if the final answer of the response is the answer (`agro_grade.answers.matches`), else 0.0."""
    if not options.marker.strip():
        raise Refused("reward.options.marker: expected text, got none")

    def expected(answer: str) -> str:
        if not options.answer_marker:
            return answer
        marked = answers.after_marker(answer, options.answer_marker)
        if marked is None:
            raise LookupError(f"the sample's answer has no {options.answer_marker!r}")
        return marked

    def score(responses: list[str], correct: list[str]) -> list[Score]:
        finals = [answers.after_marker(response, options.marker) for response in responses]
        return [Score(answers.matches(final, answer)) for final, answer in zip(finals, correct)]

    return AnswerReward("regex", score, expected)


class CodeReward:
    """1.0 if a program passes all tests, else 0.0; with `partial` the share of tests that pass.

    Don't close the reward while it scores.
    """

    name = "code"
    maximum: float | None = 1.0

    def __init__(self, grader: ProgramGrader, *, partial: bool) -> None:
        self.grader, self.partial = grader, partial

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_known(samples, lambda s: Case.of(s.meta, s.prompt), self._score)

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        try:
            Case.of(columns)
        except LookupError as error:
            return str(error.args[0])
        return None

    def close(self) -> None:
        self.grader.close()

    def _score(self, samples: list[Sample], cases: list[Case]) -> list[Score]:
        scores = []
        for verdict in self.grader.grade_all([sample.response for sample in samples], cases):
            passed = verdict.passed
            if passed is None:
                scores.append(Score(None, verdict.problem))
                continue
            value = passed if self.partial else float(passed == 1)
            details = {"sandbox": self.grader.sandbox.level}
            scores.append(Score(value, parts={"passed": passed}, details=details))
        return scores


class CodeOptions(Section):
    level: Level = "full"
    """what the sandbox must stop, see `agro_grade.sandbox`"""
    url: str = ""
    """programs run on this server instead, see `agro_grade.remote`"""
    api_key: str = ""
    partial: bool = False
    """the reward is the share of tests that pass"""
    memory_mb: Count = 1024
    """of each process"""
    interpreter: str = ""
    """the Python that runs programs"""


def code(options: CodeOptions, *, timeout: float, workers: int) -> CodeReward:
    """1.0 if the program in the response passes the tests of its prompt, else 0.0."""
    try:
        judges = LocalSandbox.probed(
            "limits" if options.url else options.level, options.memory_mb, options.interpreter or None
        )
        sandbox: Sandbox = judges
        if options.url:
            from agro_grade.remote import RemoteSandbox  # it imports an HTTP client

            sandbox = RemoteSandbox(options.url, options.api_key or None)
    except NoSandbox as error:
        raise Refused(f"reward code (reward.options): {error}") from None
    return CodeReward(
        ProgramGrader(sandbox, judges, timeout=timeout, workers=workers), partial=options.partial
    )


# In majority votes, answers are equal if their texts are equal in any case.
MATH = RewardMaker(mathematical, final=lambda text: answers.normalize(final(text).text).casefold() or None)
REGEX = RewardMaker(regex, RegexOptions, lambda text: answers.normalize(answers.after_marker(text) or text))
CODE = RewardMaker(code, CodeOptions)
