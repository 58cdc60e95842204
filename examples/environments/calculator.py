"""A calculator: + - * / // % ** and parentheses on numbers as Python writes them (so 07 is not a number).

    [environment]
    name = "examples/environments/calculator.py:Calculator"

Expressions are parsed by Python's parser and evaluated by the rules below, never by `eval`.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from typing import Any

from agro.rollout.envs import Mistake, Tool

Number = int | float
LENGTH = 200  # most characters of an expression
BITS = 512  # most bits of an integer

BINARY: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Any] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator(Tool):
    """The value of an expression: integers exactly, other numbers with 12 significant digits."""

    name = "calculator"

    def use(self, state: Any, call: str) -> str:
        value = calculate(call)
        return str(value) if isinstance(value, int) else f"{value:.12g}"


def calculate(expression: str) -> Number:
    """The value of an arithmetic expression. Raises `Mistake` if it has none."""
    if len(expression) > LENGTH:
        raise Mistake(f"longer than {LENGTH} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's warnings about code
            tree = ast.parse(expression.strip(), mode="eval")
        return evaluate(tree.body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise Mistake("not an arithmetic expression") from None
    except ZeroDivisionError:
        raise Mistake("division by zero") from None
    except OverflowError:
        raise Mistake("the number is too large") from None


def evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return checked(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return checked(UNARY[type(op)](evaluate(operand)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return checked(power(evaluate(left), evaluate(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return checked(BINARY[type(op)](evaluate(left), evaluate(right)))
        case _:
            raise Mistake("not an arithmetic expression")


def power(base: Number, exponent: Number) -> Any:
    """Raise `OverflowError` before a large integer is computed."""
    both_integer = isinstance(base, int) and isinstance(exponent, int)
    if both_integer and abs(exponent) * int(base).bit_length() > BITS:
        raise OverflowError
    return base**exponent


def checked(value: Any) -> Number:
    if isinstance(value, complex) or value != value:
        raise Mistake("not a real number")
    too_large = value.bit_length() > BITS if isinstance(value, int) else math.isinf(value)
    if too_large:
        raise OverflowError
    return value  # type: ignore[no-any-return]
