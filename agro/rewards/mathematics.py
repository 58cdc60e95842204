"""The workers of the reward `math`: are two answers equal as mathematics? By math-verify (SymPy).

Worker processes load this file by its path, so that only they import math-verify (0.5 s). Its own time
limits are off, because they would report a timeout as "not equal". The pool's limit leaves the reward
unknown.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

_MARKUP = re.compile(r"\$|\\[(\[]|\\boxed")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{[^{}]*\}")
_WORD = re.compile(r"(?<![A-Za-z\\])(?!(?:and|or)\b)[A-Za-z]{2,}")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:[ ,]\d{3})*)?(?:[.,]\d+)?\.?\s*%?")
_EXPONENT = re.compile(r"(?<![\w.])(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d{1,2}(?!\w)")
_ROOT = re.compile(r"(?<![A-Za-z\\])sqrt\(([^()]*)\)")
_NAME = re.compile(r"(?<![A-Za-z\\])(pi|sin|cos|tan|log|ln|exp)(?![A-Za-z])")


def grade(completions: list[str], answer: list[str]) -> list[float | None]:
    """For each response 1.0 where its answer is correct, 0.0 where it is not; None: see `equal`."""
    return [equal(text, known) for text, known in zip(completions, answer)]


def equal(response: str, answer: str) -> float | None:
    """1.0 or 0.0; None where `answer` has no mathematics. Raises where math-verify can't compare them."""
    known = _read(answer)
    if not known:
        return None
    return float(verify(known, _read(response), timeout_seconds=None, raise_on_error=True))


@lru_cache(512)
def _read(text: str) -> list[Any]:
    """The expression of a text's answer, in a list; empty where there is none.

    math-verify looks for LaTeX between delimiters, then for the last number. A bare expression ("x^2 + 1")
    has no delimiters: it is parsed as LaTeX first. A number is parsed as LaTeX last.
    """
    text = _EXPONENT.sub(lambda found: f"{Decimal(found[0]):f}", text.strip())
    if _MARKUP.search(text):
        return _parse(text)
    latex = _NAME.sub(r"\\\1 ", _ROOT.sub(r"\\sqrt{\1}", text))
    if _WORD.search(_TEXT.sub("", latex)):
        return _parse(text)
    forms = [f"${latex}$", text]
    if _NUMBER.fullmatch(text):
        forms.reverse()
    return _parse(forms[0]) or _parse(forms[1])


def _parse(text: str) -> list[Any]:
    return list(parse(text, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True))
