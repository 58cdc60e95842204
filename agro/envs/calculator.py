"""A calculator: + - * / // % ** and parentheses on numbers as Python writes them (so 07 is none).

Python's parser reads them; they are evaluated by the rules below and never by `eval`.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from typing import Any

from agro.envs.tool import Mistake, Tool

Number = int | float
LENGTH = 200  # characters of an expression
BITS = 512  # of a whole number

_BINARY: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Any] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator(Tool):
    """The value of an expression: a whole number as it is, another one with 12 significant digits."""

    name = "calculator"

    def use(self, state: Any, call: str) -> str:
        value = calculate(call)
        return str(value) if isinstance(value, int) else f"{value:.12g}"


def calculate(expression: str) -> Number:
    """The value of an arithmetic expression; what is wrong with it is a `Mistake`."""
    if len(expression) > LENGTH:
        raise Mistake(f"longer than {LENGTH} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's grammar, about code
            tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise Mistake("not an arithmetic expression") from None
    except ZeroDivisionError:
        raise Mistake("division by zero") from None
    except OverflowError:
        raise Mistake("the number is too large") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _checked(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _checked(_UNARY[type(op)](_value(operand)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            if (
                isinstance(op, ast.Pow)
                and isinstance(a, int)
                and isinstance(b, int)
                and abs(b) * a.bit_length() > BITS
            ):
                raise OverflowError  # before anything so large is computed
            return _checked(_BINARY[type(op)](a, b))
        case _:
            raise Mistake("not an arithmetic expression")


def _checked(value: Any) -> Number:
    if isinstance(value, complex) or value != value:
        raise Mistake("not a real number")
    if (isinstance(value, int) and value.bit_length() > BITS) or (
        isinstance(value, float) and math.isinf(value)
    ):
        raise OverflowError
    return value  # type: ignore[no-any-return]
