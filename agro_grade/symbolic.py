"""Compare two answers as mathematics by math-verify (SymPy), which takes 0.5 s to import.

Its own time limits are off, because they would report a timeout as "not equal".
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import (
    Abs,
    And,
    Derivative,
    Eq,
    Expr,
    FiniteSet,
    Float,
    Function,
    I,
    Interval,
    Limit,
    Matrix,
    Ne,
    Symbol,
    Tuple,
    UnevaluatedExpr,
    Union,
    nsimplify,
)
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.matrices import MatrixBase

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

_WITH_UNITS = (LatexExtractionConfig(), ExprExtractionConfig())
_WITHOUT_UNITS = (
    LatexExtractionConfig(
        normalization_config=replace(LatexExtractionConfig().normalization_config, units=False)
    ),
    ExprExtractionConfig(),
)
_MARKUP = re.compile(r"\$|\\[(\[]|\\boxed")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{[^{}]*\}")
_SLOW = (ExprWithLimits, Limit, UnevaluatedExpr)  # sums and integrals; percents, which equal two numbers
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}")
_SEGMENT = re.compile(r"(?:[A-Z]{2,}|\\angle\s*[A-Z])\W*=")  # AB = 5 is a length; math-verify reads a · b
_WORD = re.compile(
    r"(?<![A-Za-z\\])(?!(?:and|or)\b)(?:(?<![\d^_)}])[A-Za-z]{3,}|[A-Za-z]{4,}"
    r"|\b(?:is|it|so|in|of|to|no|by|cm|mm|km|kg|ft|mg|ml)\b)"
)
_NUMBER = re.compile(r"[-+]?(?:\d+(?:[ ,]\d{3})*)?(?:[.,]\d+)?\.?\s*%?")
_EXPONENT = re.compile(r"(?<![\w.])(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d{1,2}(?!\w)")
_ROOT = re.compile(r"(?<![A-Za-z\\])sqrt(?:\(([^()]*)\)|\s*(\d+))")
# LaTeX that math-verify misreads -> LaTeX that it reads.
_LATEX = [
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in (
        (
            r"\\left\s*[(\[]\s*\\begin\s*\{array\}(?:\{[^{}]*\})?(.*?)\\end\s*\{array\}\s*\\right\s*[)\]]",
            r"\\begin{pmatrix}\1\\end{pmatrix}",
        ),
        (
            r"\\\{\s*([a-z])\s*(?:\\in\s*\\(?:mathbb\{R\}|R\b)\s*)?(?::|\||\\mid)\s*((?:(?!\\[{}]).)*\1(?:(?!\\[{}]).)*)\\\}",
            r"\2",
        ),  # {x : x < 3}
        (r"\\\\\s*\[[\d.]+\s*[a-z]{2}\]", r"\\\\"),  # row spacing
        (r"\\[dt]?frac\s*(\\pi(?![A-Za-z])|\d)\s*(\\pi(?![A-Za-z])|\d)", r"\\frac{\1}{\2}"),
        (r"\\log_\{?e\}?(?![A-Za-z])", r"\\ln"),
        (r"\\mathrm\s*\{\s*([dei])\s*\}", r"\1"),
        (r"\\(?:mathbf|vec|hat)\s*\{\s*\\?([ijk])(?:math)?\s*\}", r"\\hat{\1}"),
        (r"(?<=\))\s*\^\s*\{?\s*(?:T|\\top)\s*\}?", ""),  # (1, 2)^T
        (r"[,\\;:\s(]*\b[a-z]\s*\\in\s*(?:\\mathbb\s*\{?Z\}?|\\Z\b|ℤ)\s*\)?", ""),  # kπ, k ∈ Z
        (r"\\varnothing", r"\\emptyset"),
        (r"\\[lr]angle", lambda match: "()"[match[0][1] == "r"]),
        (r"[^={$]*\\[cl]?dots\b[^=]*=", ""),  # 1 + 2 + … + n = n(n+1)/2
    )
]
_MODULUS = re.compile(r"\s*\(?\\p?mod\s*\{?\s*(\d+)\s*\}?\)?|\s*\(mod\s+(\d+)\)")
_CONGRUENCE = re.compile(rf"(\\equiv\s*)(-?\d+)((?:{_MODULUS.pattern}))")
_DEGREES = re.compile(
    r"(\d+(?:\.\d+)?)\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree\b|\s(?:\\text\{\s*)?degrees?\b\s*\}?)"
)
_INVERSE = re.compile(r"\\arc(?:sin|cos|tan|cot|sec|csc)\b|\\(?:sin|cos|tan|cot|sec|csc)\s*\^\s*\{?\s*-\s*1")
_CONJUGATE = re.compile(r"\\(?:overline|bar)\s*\{([^{}]*)\}")
_IMAGINARY_UNIT = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)\b")
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\b|\\\$")  # 2 hours = 120 minutes
_MEASURED = re.compile(
    r"\\(?:text|math|mbox|operatorname)|(?<![\\A-Za-z])(?:[A-Za-z]{4,}|cm|mm|km|kg|ft|in|mg|ml|hr|oz|lb|yd|mi|mph)(?![A-Za-z])"
)
_OR = re.compile(r"\bor\b|\\lor\b|\\vee\b")
_NAME = re.compile(r"(?<![A-Za-z\\])(pi|sin|cos|tan|log|ln|exp)(?![A-Za-z])")


def grade(completions: list[str], answer: list[str]) -> list[float | None]:
    """For each response 1.0 if its answer is correct, 0.0 if it isn't; None: see `equal`."""
    return [equal(text, expected) for text, expected in zip(completions, answer)]


def equal(response: str, answer: str) -> float | None:
    """1.0 or 0.0; None if `answer` has no mathematics. Raises if math-verify can't compare them."""
    moduli = [{a or b for a, b in _MODULUS.findall(text)} for text in (response, answer)]
    if all(moduli) and moduli[0] != moduli[1]:
        return 0.0
    if all(moduli):
        response, answer = _least_residue(response), _least_residue(answer)
    response, answer = _latex(response, answer), _latex(answer, response)
    expected = _read(answer)
    if not expected:
        return None
    candidate = _read(response)
    if not any(isinstance(k, Relational | And) for k in expected):
        is_equation = not _SEGMENT.search(response) and any(map(_is_equation, candidate))
        if is_equation or (not _UNIT.search(response) and any(map(_is_false, candidate))):
            return 0.0
    if "\\{" in response and "\\{" not in answer and isinstance(expected[0], Interval | Tuple):
        return 0.0  # math-verify takes the set of its two numbers for an open interval
    if (
        "\\{" in answer
        and candidate
        and isinstance(candidate[0], Interval | Tuple)
        and isinstance(expected[0], FiniteSet)
    ):
        return 0.0  # and a tuple for the set of its components
    if len(expected) == len(candidate) == 1:
        candidate = [_like(candidate[0], expected[0])]
        expected = [_like(expected[0], candidate[0])]
        value = _evaluated(expected[0], candidate[0])
        if value is not None:
            return value
    return float(
        verify(expected, candidate, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True)
    )


def _latex(text: str, other: str) -> str:
    """`text` as LaTeX that math-verify reads; degrees become radians if `other` or a function needs that."""
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _CONJUGATE.sub(_conjugate, _MODULUS.sub("", text))
    is_angle = "\\pi" in other or _INVERSE.search(other)
    if _TRIGONOMETRY.search(text) or (is_angle and "\\pi" not in text):
        text = _DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", text)
    return text


def _least_residue(text: str) -> str:
    """`text` with the least residue in a congruence: x ≡ 10 (mod 7) is x ≡ 3 (mod 7)."""

    def reduced(match: re.Match[str]) -> str:
        return f"{match[1]}{int(match[2]) % max(1, int(match[4] or match[5]))}{match[3]}"

    return _CONGRUENCE.sub(reduced, text)


def _like(expression: Any, other: Any) -> Any:
    """`expression` in the form of `other`: a vector as a tuple, a function of the same variable."""
    if isinstance(expression, MatrixBase) and 1 in expression.shape and isinstance(other, Tuple):
        return Tuple(*expression)
    if isinstance(expression, Expr) and isinstance(other, Tuple | MatrixBase):
        expanded = expression.doit().expand()
        units = {symbol.name: symbol for symbol in expanded.free_symbols}
        basis = [units.get(f"hat{{{name}}}", Symbol(name)) for name in "ijk"[: len(other)]]
        components = [expanded.coeff(unit) for unit in basis]
        is_sum = any(components) and expanded == sum(c * unit for c, unit in zip(components, basis))
        return _like(Matrix(components), other) if is_sum else expression
    if isinstance(expression, Eq) and isinstance(other, Eq):
        a, b = expression.lhs, other.lhs
        is_renamed = isinstance(a, AppliedUndef) and isinstance(b, AppliedUndef) and a.func == b.func
        if is_renamed and all(argument.is_Symbol for argument in a.args + b.args):
            return expression.xreplace(dict(zip(a.args, b.args)))
    return expression


def _conjugate(bar: re.Match[str]) -> str:
    """The conjugate of a number in i. Without i, a bar has other meanings: a segment or a cycle of digits."""
    conjugate, count = _IMAGINARY_UNIT.subn("(-i)", bar[1])
    return f"({conjugate})" if count else bar[0]


def _is_false(expression: Any) -> bool:
    """Whether it is a statement about numbers, not an answer: 3 + 4 = 8, 5 ≠ 7; not 1/3 = 0.333 (rounded)."""
    if isinstance(expression, And) and not expression.free_symbols:
        return any(map(_is_false, expression.args))
    if not isinstance(expression, Relational) or expression.free_symbols:
        return False
    if not isinstance(expression, Eq):
        return True
    lhs, rhs = expression.lhs, expression.rhs
    try:
        x, y = complex(lhs.evalf()), complex(rhs.evalf())
    except (AttributeError, TypeError, ValueError, ArithmeticError):
        return False
    tolerance = 5e-3 if lhs.has(Float) or rhs.has(Float) else 1e-9
    return abs(x - y) > tolerance * (abs(x) + abs(y))


def _is_equation(expression: Any) -> bool:
    """Whether it is an equation in unknowns (x + y = 5) and not a value with a name (f(2) = 5, 2 + 3 = 5).

    math-verify takes the right side of both.
    """
    if not isinstance(expression, Eq):
        return False
    lhs = _with_imaginary_unit(expression.lhs)
    is_name = isinstance(lhs, Symbol | Tuple | Function | Derivative) and not isinstance(lhs, Abs)
    return bool(lhs.free_symbols) and not is_name


def _evaluated(a: Any, b: Any) -> float | None:
    """Compare two expressions by their values, which is faster than to simplify them.

    0.0 if they differ at a point, 1.0 if both are constants that agree in 30 digits, else None.
    """
    if not isinstance(a, Expr) or not isinstance(b, Expr):
        return None
    if a.has(*_SLOW) or b.has(*_SLOW):
        return None
    a, b = (nsimplify(_with_imaginary_unit(e), rational=True) for e in (a, b))
    if a.is_Symbol or b.is_Symbol:
        return None
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: Float(0.6180339887 + 0.4142135623 * i) for i, symbol in enumerate(symbols)}
    try:
        x, y = complex(a.subs(point).evalf()), complex(b.subs(point).evalf())
        if abs(x - y) > 1e-4 * (abs(x) + abs(y)):
            return 0.0
        if symbols:
            return None
        difference = abs(complex((a - b).evalf(30, maxn=200)))
    except (TypeError, ValueError, ArithmeticError):  # not a number there
        return None
    return 1.0 if difference < 1e-28 * (1 + abs(x)) else None


def _with_imaginary_unit(expression: Any) -> Any:
    """`expression` with the imaginary unit for i, which math-verify reads as a variable."""
    return expression.subs({symbol: I for symbol in expression.free_symbols if symbol.name == "i"})


def _as_answer(expression: Any, text: str) -> Any:
    """`expression` as math-verify compares it: 5 = x as x = 5, "x < 1 or x > 2" as a union of intervals."""
    if isinstance(expression, Eq) and not expression.lhs.free_symbols and expression.rhs.is_Symbol:
        return Eq(expression.rhs, expression.lhs, evaluate=False)
    is_bound = isinstance(expression, Relational) and not isinstance(expression, Eq)
    if is_bound and len(expression.free_symbols) == 1 and Abs in (expression.lhs.func, expression.rhs.func):
        return expression.as_set()  # |x| < 2
    if isinstance(expression, Ne | And) and _is_range(expression):
        return expression.as_set()  # 1 > x > 0
    is_either = isinstance(expression, FiniteSet) and len(expression.free_symbols) == 1 and _OR.search(text)
    if is_either and all(isinstance(part, Relational) and not isinstance(part, Eq) for part in expression):
        return Union(*(part.as_set() for part in expression))
    return expression


def _is_range(expression: Any) -> bool:
    """Whether it compares one variable with numbers."""
    relations = expression.args if isinstance(expression, And) else (expression,)
    sides = [{side.is_Symbol for side in relation.args} for relation in relations]
    return len(expression.free_symbols) == 1 and all(side == {True, False} for side in sides)


@lru_cache(512)
def _read(text: str) -> list[Any]:
    """A list with the expression of a text's answer; empty if there is none.

    math-verify looks for LaTeX between delimiters, then for the last number. A bare expression ("x^2 + 1")
    has no delimiters: it is parsed as LaTeX first. A number is parsed as LaTeX last.
    """
    text = _EXPONENT.sub(lambda match: f"{Decimal(match[0]):f}", text.strip())
    if _MARKUP.search(text):
        return _parse(text) or _parse_both_signs(text)
    latex = _NAME.sub(r"\\\1 ", _ROOT.sub(r"\\sqrt{\1\2}", text))
    if _WORD.search(_ENVIRONMENT.sub("", _TEXT.sub("", latex))):
        return _parse(text)
    forms = [f"${latex}$", text]
    if _NUMBER.fullmatch(text):
        forms.reverse()
    return _parse(forms[0]) or _parse(forms[1]) or _parse_both_signs(f"${latex}$")


def _parse_both_signs(text: str) -> list[Any]:
    r"""The set of the two values of ± within a fraction, which math-verify doesn't read."""
    if "\\pm" not in text:
        return []
    values = [_parse(text.replace("\\pm", plus).replace("\\mp", minus)) for plus, minus in ("+-", "-+")]
    return [FiniteSet(*(value[0] for value in values))] if all(values) else []


def _parse(text: str) -> list[Any]:
    # math-verify reads a final variable, as in 2ab, as a unit: only a text with words can have one.
    reading = _WITH_UNITS if _MEASURED.search(text) else _WITHOUT_UNITS
    expressions = parse(text, reading, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
    return [_as_answer(expression, text) for expression in expressions]
