"""Rewards that compare a response with the sample's answer: `exact`, `regex` and `math`."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.rewards import answers
from agro.rewards.protocol import Score, score_known
from agro.rewards.workers import Pool
from agro.types import Sample

AT_ONCE = 16  # responses that a worker compares in one call: so many are done again where one takes for ever
Judge = Callable[[list[str], list[str]], list[Score]]  # responses, answers


class AnswerReward:
    """`judge` on the samples that have an answer in `meta`; the others keep an unknown reward."""

    def __init__(self, name: str, judge: Judge, marker: str | None = None, pool: Pool | None = None) -> None:
        self.name = name
        self._judge = judge
        self._marker = marker  # what stands before the answer in the answer's own text
        self._pool = pool

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_known(
            samples, self._answer, lambda known, found: self._judge([s.response for s in known], found)
        )

    def _answer(self, sample: Sample) -> str:
        answer = sample.meta.get("answer")
        if answer is None:
            raise LookupError("the sample has no answer")
        if (
            isinstance(answer, bool)
            or not isinstance(answer, (str, int, float))
            or answer in (math.inf, -math.inf)
        ):
            raise LookupError(
                f"the sample's answer is a {type(answer).__name__}, expected text or a finite number"
            )
        found = str(answer) if self._marker is None else answers.after_marker(str(answer), self._marker)
        if found is None:
            raise LookupError(f"the sample's answer has no {self._marker!r}")
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def exact(options: Mapping[str, Any], **_: Any) -> AnswerReward:
    """1.0 where the response is the answer, else 0.0.

    Options: `strip` (true): white space around both doesn't count; `case` (true): letter case counts.
    """
    given = _options("exact", options, strip=True, case=True)

    def form(text: str) -> str:
        text = text.strip() if given["strip"] else text
        return text if given["case"] else text.casefold()

    def judge(responses: list[str], known: list[str]) -> list[Score]:
        return [Score(float(form(r) == form(a))) for r, a in zip(responses, known)]

    return AnswerReward("exact", judge)


def regex(options: Mapping[str, Any], *, timeout: float, workers: int) -> AnswerReward:
    """1.0 where the final answer of the response is the answer (`answers.matches`), else 0.0; 0.0 without one.

    Options: `marker` ("the final answer is"): the final answer is what follows its last occurrence on that line;
    `pattern`: instead, the one group of this regular expression's last match; `answer_marker`: the sample's answer
    is what follows this marker in it (GSM8K's "#### 18"), otherwise the whole of it.
    A pattern runs in worker processes, since it may take longer than anyone can wait.
    """
    given = _options("regex", options, marker=answers.MARKER, pattern="", answer_marker="")
    marker, pattern = given["marker"], given["pattern"]
    if not pattern:
        if not marker.strip():
            raise Refused("reward.options.marker: expected text, got none")

        def judge(responses: list[str], known: list[str]) -> list[Score]:
            return [
                Score(answers.matches(answers.after_marker(r, marker), a)) for r, a in zip(responses, known)
            ]

        return AnswerReward("regex", judge, given["answer_marker"] or None)

    if "marker" in options:
        raise Refused("reward.options: marker and pattern exclude each other; give one of them")
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise Refused(f"reward.options.pattern: {error}, got {pattern!r}") from None
    if groups != 1:
        raise Refused(
            f"reward.options.pattern: expected one group, around the answer, got {groups} in {pattern!r}; "
            "write (?:…) for a group that isn't the answer"
        )
    pool = Pool(
        f"{Path(answers.__file__).resolve()}:by_pattern",
        {"pattern": pattern},
        timeout=timeout,
        workers=workers,
    )

    def judge_in_worker(responses: list[str], known: list[str]) -> list[Score]:
        outcomes = pool.call({"completions": responses, "answer": known}, len(known))
        return [Score(value, error) for value, error in outcomes]

    return AnswerReward("regex", judge_in_worker, given["answer_marker"] or None, pool)


def mathematical(options: Mapping[str, Any], *, timeout: float, workers: int) -> AnswerReward:
    """1.0 where the response's final answer equals the sample's as mathematics, else 0.0; 0.0 where it has none.

    Both are read by `answers.conclusion` and math-verify (`mathematics`); equal texts or numbers need neither. An answer
    in which no mathematics can be read, and a comparison that fails or takes more than `timeout` seconds, leave the
    reward unknown. Workers compare, each process `AT_ONCE` responses a call.
    """
    _options("math", options)
    if importlib.util.find_spec("math_verify") is None:
        raise Refused("reward.name: math needs math-verify; pip install 'agro[math]'")
    file = (
        Path(answers.__file__).resolve().with_name("mathematics.py")
    )  # importing it would import SymPy here
    pool = Pool(f"{file}:grade", {}, timeout=timeout, workers=workers)

    def judge(responses: list[str], known: list[str]) -> list[Score]:
        concluded = [(answers.conclusion(r), answers.conclusion(a)) for r, a in zip(responses, known)]
        scores = [Score(1.0)] * len(known)
        asked = [
            i for i, (r, a) in enumerate(concluded) if not a or answers.normalise(r) != answers.normalise(a)
        ]
        columns = {
            "completions": [concluded[i][0] for i in asked],
            "answer": [concluded[i][1] for i in asked],
        }
        for i, (value, error) in zip(asked, pool.call(columns, len(asked), at_once=AT_ONCE)):
            unread = f"no mathematics can be read in the sample's answer {known[i]!r:.80}"
            scores[i] = Score(value, unread if error == "returned None" else error)
        return scores

    return AnswerReward("math", judge, pool=pool)


def _options(name: str, given: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    for key, value in given.items():
        if key not in defaults:
            near = get_close_matches(key, defaults, 1, 0.5)
            raise Refused(
                f"reward.options.{key}: {name} has no such option; "
                + (f"did you mean {near[0]}?" if near else f"it has {', '.join(defaults) or 'none'}")
            )
        kind = type(defaults[key])
        if not isinstance(value, kind):
            raise Refused(
                f"reward.options.{key}: expected {'true or false' if kind is bool else 'text'}, got {value!r:.80}"
            )
    return defaults | dict(given)
