"""Is the final answer of a response the expected one, as mathematics?

Standard library only, until two answers need SymPy: then math-verify has to be installed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from agro_grade.final import LONGEST, Final, compare, final

DEEPEST = 12  # brackets within brackets, which the parser reads in exponential time
DIGITS = 2000  # of a number that SymPy computes

_POWER = re.compile(r"(?<!\d)(\d+)\s*(?:\^|\*\*)\s*[{(]?\s*(\d+)\s*[)}]?(?!\s*(?:\^|\*\*|!|\d))")
_FACTORIAL = re.compile(r"(?<!\d)(\d+)\s*!")
_BRACKETED = re.compile(r"[{(]\s*(\d+)\s*[)}]")
_LARGE = re.compile(
    rf"\\[dt]?binom[^A-Za-z]*\d{{5}}|[A-Za-z][^()]*\)\s*\^\s*(?:\{{\s*)?\d{{4}}|\d{{{DIGITS + 1}}}"
)


@dataclass(frozen=True)
class Grade:
    """1.0 where a response's answer is the expected one, 0.0 where it isn't, None where that is unknown.

    `reason`: why it is unknown, or why an answer wasn't read.
    """

    value: float | None
    reason: str = ""


def grade(response: str, answer: str) -> Grade:
    """Whether the final answer of a response equals that of `answer`, which may be a solution too.

    An answer that the response denies, only bounds, or ties to a condition is not its answer. One that is too
    large to read or to compute isn't the expected one. SymPy compares what isn't decided by texts, numbers,
    choices, times, dates and words, in this process: it may raise, and take minutes, so call this in a
    process with a time limit where nobody has read the responses.
    """
    found, expected = final(response), final(answer, may_be_cut=False)
    decided = without_sympy(found, expected)
    if decided is not None:
        return decided
    from agro_grade.symbolic import equal

    value = equal(found.source, expected.source)
    return Grade(value, no_mathematics(answer) if value is None else "")


def without_sympy(response: Final, answer: Final) -> Grade | None:
    """The grade where SymPy isn't needed, None where it is."""
    if not answer.text:
        return Grade(None, "the sample's answer is empty")
    if not response.text:
        return Grade(0.0)
    value = compare(response, answer)
    if value is not None:
        return Grade(value)
    problem = too_large(answer.source)
    if problem:
        return Grade(None, f"the sample's answer {problem}")
    problem = too_large(response.source)
    return Grade(0.0, f"the response's answer {problem}") if problem else None


def no_mathematics(answer: str) -> str:
    """The reason of a grade that is unknown because the expected answer can't be read."""
    return f"no mathematics can be read in the sample's answer {answer!r:.80}"


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
