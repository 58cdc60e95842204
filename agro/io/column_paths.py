"""Columns of records by name or JMESPath expression (`output.text`, `choices[0].message.content`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import jmespath
from jmespath.exceptions import JMESPathError
from jmespath.visitor import TreeInterpreter

from agro.errors import Refused

_SPECIAL = re.compile(r"""[\[\](){}|&"'`*]""")  # what names seldom have, and expressions


def renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with the values of `columns`, by field; the other columns keep their names.

    Raises `Refused` for a column that the row doesn't have.
    """
    values = {}
    for name, column in columns.items():
        exists, value = (True, row[column]) if column in row else value_at(row, column)
        if not exists:
            raise Refused(
                f"data.columns.{name}: no column {column}; there are {', '.join(row) or 'none'} (where files "
                f'differ, "{column} || OTHER" takes the first that a row has)'
            )
        values[name] = value
    sources = set(columns.values())
    return {name: value for name, value in row.items() if name not in sources} | values


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise `Refused` for a column that is neither a name nor a JMESPath expression."""
    for name, column in columns.items():
        if problem := problem_of(column):
            raise Refused(
                f"data.columns.{name} = {column!r}: expected the name of a column or a JMESPath expression, "
                f"such as choices[0].text: {problem}"
            )


def value_at(
    value: Any, expression: str, interpreter: type[TreeInterpreter] = TreeInterpreter
) -> tuple[bool, Any]:
    """Whether there is a value at an expression, and the value.

    JMESPath has null both for what is missing and for what is null: of a path the last step tells.
    """
    tree = compiled(expression).parsed
    try:
        hit = interpreter().visit(tree, value)
    except JMESPathError as error:
        raise Refused(f"{expression}: {_reason(error)}") from None
    return hit is not None or _is_null(value, tree), hit


def _is_null(value: Any, tree: Mapping[str, Any]) -> bool:
    """Whether the path `tree` leads to a null that is there."""
    if tree["type"] == "subexpression":
        for step in tree["children"][:-1]:
            value = jmespath.parser.ParsedResult(step.get("value", ""), step).search(value)
        tree = tree["children"][-1]
    return tree["type"] == "field" and isinstance(value, dict) and tree["value"] in value


@cache
def compiled(expression: str) -> Any:
    """The expression; what is none is the name of a column."""
    if syntax_problem(expression):
        return jmespath.compile(json.dumps(expression, ensure_ascii=False))
    return jmespath.compile(expression or "@")


def problem_of(column: str) -> str:
    """Why a column is no JMESPath expression; "" where it is one, or the name of a column."""
    return syntax_problem(column) if _SPECIAL.search(column) else ""


@cache
def syntax_problem(expression: str) -> str:
    """Why it is no expression, such as `chosen-rating` and `Rating (1-5)`; "" where it is one."""
    try:
        jmespath.compile(expression or "@")
    except JMESPathError as error:
        return _reason(error)
    return ""


def _reason(error: JMESPathError) -> str:
    return str(error).splitlines()[0]
