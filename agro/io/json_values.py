"""Values of other programs' records: found, checked, and decoded if they are JSON in a text. They are found
by the name of a column, or by a JMESPath expression (`output.text`, `choices[0].message.content`)."""

from __future__ import annotations

import json
import math
import re
from ast import literal_eval
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jmespath
from jmespath.exceptions import JMESPathError
from jmespath.visitor import TreeInterpreter

from agro.errors import Refused
from agro.io.strictjson import loads

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SPECIAL = re.compile(r"""[\[\](){}|&"'`*]""")  # rare in names, common in expressions


def unpacked(value: Any) -> Any:
    """Decode an object or list that is written in a text, as JSON or as Python prints it (pandas does so in
    the cells of a table); other values and texts stay."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return loads(value)
    except (ValueError, RecursionError):
        pass
    if not value.lstrip("[ \n").startswith("{'"):
        return value
    try:
        return literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def messages_in(value: Any) -> Any:
    """The messages in a value: a list, an object's `messages`, one message, or their JSON; other values
    stay."""
    inner = unpacked(value)
    if isinstance(inner, str):
        return value
    if isinstance(inner, dict) and "messages" in inner:
        inner = inner["messages"]
    if _is_message(inner):
        inner = [inner]
    return inner if are_messages(inner) else value


def are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in _ROLES
        and not value.keys().isdisjoint({"content", "tool_calls"})
    )


def text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    raise Refused(f"{name}: expected text, got {value!r:.80}")


def objects(value: Any, name: str, expected: str = "a list of objects") -> list[dict[str, Any]]:
    """Check a list of objects, such as messages, which may be written as JSON."""
    if isinstance(value, str):
        value = messages_in(value)
    if isinstance(value, list) and all(isinstance(x, dict) for x in value):
        return value
    raise Refused(f"{name}: expected {expected}, got {value!r:.80}")


def entry(value: Any, name: str) -> dict[str, Any]:
    """Check an object; None becomes an empty one."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise Refused(f"{name}: expected an object, got {value!r:.80}")


def read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises `Refused` if it isn't one, or can't be read."""
    try:
        value = loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: can't be read: {error}") from None
    if isinstance(value, dict):
        return value
    raise Refused(f"{path}: expected an object, got {value!r:.80}")


def omit(row: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The columns that a reader doesn't use, for `meta`; unknown values (null, NaN) are dropped."""
    return {name: value for name, value in row.items() if name not in names and not is_unknown(value)}


def is_unknown(value: Any) -> bool:
    """Whether it is null or NaN, which tables use for an unknown number."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with the values of `columns`, by field; the other columns keep their names.

    Raises `Refused` for a column that the row doesn't have.
    """
    values = {}
    for name, column in columns.items():
        exists, value = (True, row[column]) if column in row else value_at(row, column)
        if not exists:
            raise Refused(
                f"data.columns.{name}: no column {column}; there are {', '.join(row) or 'none'} (if files "
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

    JMESPath returns null both for missing and for null values; the last step of a path tells them apart.
    """
    tree = compiled(expression).parsed
    try:
        hit = interpreter().visit(tree, value)
    except JMESPathError as error:
        raise Refused(f"{expression}: {_reason(error)}") from None
    return hit is not None or _is_null(value, tree), hit


def _is_null(value: Any, tree: Mapping[str, Any]) -> bool:
    """Whether the path `tree` leads to an existing null."""
    if tree["type"] == "subexpression":
        for step in tree["children"][:-1]:
            value = jmespath.parser.ParsedResult(step.get("value", ""), step).search(value)
        tree = tree["children"][-1]
    return tree["type"] == "field" and isinstance(value, dict) and tree["value"] in value


@cache
def compiled(expression: str) -> Any:
    """Compile an expression; anything else is the name of a column."""
    if syntax_problem(expression):
        return jmespath.compile(json.dumps(expression, ensure_ascii=False))
    return jmespath.compile(expression or "@")


def problem_of(column: str) -> str:
    """Why a column isn't a JMESPath expression; "" if it is one, or the name of a column."""
    return syntax_problem(column) if _SPECIAL.search(column) else ""


@cache
def syntax_problem(expression: str) -> str:
    """Why it isn't an expression, such as `chosen-rating` and `Rating (1-5)`; "" if it is one."""
    try:
        jmespath.compile(expression or "@")
    except JMESPathError as error:
        return _reason(error)
    return ""


def _reason(error: JMESPathError) -> str:
    return str(error).splitlines()[0]
