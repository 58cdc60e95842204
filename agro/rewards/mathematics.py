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
from sympy import Abs, And, Eq, Expr, Float, Function, Interval, Limit, Symbol, Tuple, UnevaluatedExpr
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.relational import Relational

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

_MARKUP = re.compile(r"\$|\\[(\[]|\\boxed")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{[^{}]*\}")
_SLOW = (ExprWithLimits, Limit, UnevaluatedExpr)  # sums and integrals; percents, which equal two numbers
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}")
_SEGMENT = re.compile(r"(?:[A-Z]{2,}|\\angle\s*[A-Z])\W*=")  # AB = 5 is a length; math-verify reads a · b
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
    found = _read(response)
    is_equation = not _SEGMENT.search(response) and any(map(_is_equation, found))
    if is_equation and not any(isinstance(k, Relational | And) for k in known):
        return 0.0
    if "\\{" in response and "\\{" not in answer and isinstance(known[0], Interval | Tuple):
        return 0.0  # math-verify takes the set of its two numbers for an open interval
    if len(known) == len(found) == 1 and _differ(known[0], found[0]):
        return 0.0
    return float(
        verify(known, found, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True)
    )


def _is_equation(expression: Any) -> bool:
    """Whether it is an equation in unknowns (x + y = 5) and not a value with a name (f(2) = 5, 2 + 3 = 5).

    math-verify takes the right side of both.
    """
    if not isinstance(expression, Eq):
        return False
    left = expression.lhs
    is_name = isinstance(left, Symbol | Tuple | Function) and not isinstance(left, Abs)
    return bool(left.free_symbols) and not is_name


def _differ(a: Any, b: Any) -> bool:
    """Whether two expressions have different values at a point, which takes less time than to simplify."""
    if not isinstance(a, Expr) or not isinstance(b, Expr) or a.is_Symbol or b.is_Symbol:
        return False
    if a.has(*_SLOW) or b.has(*_SLOW):
        return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: Float(0.6180339887 + 0.4142135623 * i) for i, symbol in enumerate(symbols)}
    try:
        x, y = complex(a.subs(point).evalf()), complex(b.subs(point).evalf())
    except (TypeError, ValueError, ArithmeticError):  # not a number there
        return False
    return abs(x - y) > 1e-4 * (abs(x) + abs(y))


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
    if _WORD.search(_ENVIRONMENT.sub("", _TEXT.sub("", latex))):
        return _parse(text)
    forms = [f"${latex}$", text]
    if _NUMBER.fullmatch(text):
        forms.reverse()
    return _parse(forms[0]) or _parse(forms[1])


def _parse(text: str) -> list[Any]:
    return list(parse(text, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True))
