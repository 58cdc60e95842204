"""Whether two answers are equal as mathematics, by math-verify (SymPy): what the workers of the reward `math` run.

A worker process loads this file by its path, so that math-verify (0.5 s to import) costs nobody else anything.
Its own time limits are off: they would report a timeout as "not equal". The pool's limit leaves it unknown.
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
    """Per response 1.0 where its answer is the known one, 0.0 where it isn't or there is none; None: see `equal`."""
    return [equal(text, known) for text, known in zip(completions, answer)]


def equal(response: str, answer: str) -> float | None:
    """1.0 or 0.0; None where no mathematics can be read in `answer`. Raises where math-verify can't compare them."""
    known = _read(answer)
    if not known:
        return None
    return float(verify(known, _read(response), timeout_seconds=None, raise_on_error=True))


@lru_cache(512)
def _read(text: str) -> list[Any]:
    """The expression that is a text's answer, in a list; empty where there is none.

    math-verify looks for LaTeX between delimiters, then for the last number. A text that is nothing but an
    expression ("x^2 + 1") has no delimiters: it is read as a whole first, a mere number last.
    """
    text = _EXPONENT.sub(lambda found: f"{Decimal(found[0]):f}", text.strip())
    if _MARKUP.search(text):
        return _parse(text)
    latex = _NAME.sub(r"\\\1 ", _ROOT.sub(r"\\sqrt{\1}", text))
    if _WORD.search(_TEXT.sub("", latex)):
        return _parse(text)
    whole = f"${latex}$"
    return (_parse(text) or _parse(whole)) if _NUMBER.fullmatch(text) else (_parse(whole) or _parse(text))


def _parse(text: str) -> list[Any]:
    return list(parse(text, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True))
