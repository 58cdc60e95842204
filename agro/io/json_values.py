"""Values of records that other programs wrote: checked, and read where they are JSON in a text."""

from __future__ import annotations

import math
from ast import literal_eval
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.strictjson import loads

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def unpacked(value: Any) -> Any:
    """A value that may be written as JSON in a text, or as Python prints it (pandas does so in the cells of a
    table); the text where it isn't an object or a list."""
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
    """The messages that a value holds, as a list, in `messages` of an object, as one message, or as JSON of
    these; another value as it is."""
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
    """A list of objects, such as messages, which may be written as JSON."""
    if isinstance(value, str):
        value = messages_in(value)
    if isinstance(value, list) and all(isinstance(x, dict) for x in value):
        return value
    raise Refused(f"{name}: expected {expected}, got {value!r:.80}")


def entry(value: Any, name: str) -> dict[str, Any]:
    """An object; an empty one where there is none."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise Refused(f"{name}: expected an object, got {value!r:.80}")


def read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises `Refused` where it isn't one, or can't be read."""
    try:
        value = loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: can't be read: {error}") from None
    if isinstance(value, dict):
        return value
    raise Refused(f"{path}: expected an object, got {value!r:.80}")


def omit(row: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The columns that a reader doesn't take, for `meta`; unknown ones (null, NaN) left out."""
    return {name: value for name, value in row.items() if name not in names and not is_unknown(value)}


def is_unknown(value: Any) -> bool:
    """Whether it is null or NaN, which tables have in place of an unknown number."""
    return value is None or (isinstance(value, float) and math.isnan(value))
