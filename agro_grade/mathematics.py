"""Is the final answer of a response mathematically equal to the expected one?

Standard library only, until a comparison needs SymPy: then math-verify must be installed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from agro_grade.final import LONGEST, Final, compare, final

DEEPEST = 12  # most nested brackets, which the parser reads in exponential time
DIGITS = 2000  # most digits of a number that SymPy computes

_POWER = re.compile(r"(?<!\d)(\d+)\s*(?:\^|\*\*)\s*[{(]?\s*(\d+)\s*[)}]?(?!\s*(?:\^|\*\*|!|\d))")
_FACTORIAL = re.compile(r"(?<!\d)(\d+)\s*!")
_BRACKETED = re.compile(r"[{(]\s*(\d+)\s*[)}]")
_LARGE = re.compile(
    rf"\\[dt]?binom[^A-Za-z]*\d{{5}}|[A-Za-z][^()]*\)\s*\^\s*(?:\{{\s*)?\d{{4}}|\d{{{DIGITS + 1}}}"
)


@dataclass(frozen=True)
class Grade:
    """1.0 if a response's answer is the expected one, 0.0 if it isn't, None if unknown.

    `reason`: why the grade is unknown, or why an answer wasn't read.
    """

    value: float | None
    reason: str = ""


def grade(response: str, answer: str) -> Grade:
    """Whether the final answer of a response equals that of `answer`, which may be a solution too.

    An answer that the response denies, only bounds, or makes conditional isn't its answer. An answer too
    large to read or to compute isn't the expected one. If texts, numbers, choices, times, dates and words
    don't decide, SymPy compares in this process: it may raise, or take minutes, so for untrusted responses
    call this in a process with a time limit.
    """
    candidate, expected = final(response), final(answer, may_be_cut=False)
    decision = without_sympy(candidate, expected)
    if decision is not None:
        return decision
    from agro_grade.symbolic import equal

    value = equal(candidate.source, expected.source)
    return Grade(value, no_mathematics(answer) if value is None else "")


def without_sympy(response: Final, answer: Final) -> Grade | None:
    """The grade if SymPy isn't needed, else None."""
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
    """Why reading or evaluating an answer would take SymPy too long; None if it wouldn't."""
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
        return f"has {deepest} nested brackets, at most {DEEPEST} are compared"
    if _is_large(text):
        return f"is too large to compute: only numbers of at most {DIGITS} digits are"
    return None


def _is_large(text: str) -> bool:
    """Whether a power, a factorial or another number is too large, computed from the innermost out."""
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
        if not count:  # 9^9!: the exponent is a factorial, which must be checked first
            text = _POWER.sub(lambda match: str(int(match[1]) ** int(match[2])), text)
        text = _BRACKETED.sub(r"\1", text)
        if text == previous:
            return False
    return True
