"""What the fields of records may be, and how a value of a record becomes one of a sample."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agro.errors import Refused
from agro.types import ROLES, UNKNOWN_VERSION

_LARGEST = 2**31  # of int32, exclusive


class WrongValue(Exception):
    """A value that its field can't have; `index`: of the item, where it is one of a list."""

    def __init__(self, index: int | None = None) -> None:
        super().__init__()
        self.index = index


class Field(NamedTuple):
    """`convert` returns the value of a sample, or raises `WrongValue`."""

    expected: str
    convert: Callable[[Any], Any]
    is_needed: bool = False


class Fields(dict[str, Field]):
    """The fields of a kind of record, by name."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        super().__init__(fields)
        self.needed = tuple(name for name, field in fields.items() if field.is_needed)


def typed_fields(record: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """The values of these fields that a record has; null is unknown.

    Raises `Refused` naming the field, what was expected and what came.
    """
    values: dict[str, Any] = {}
    for name, value in record.items():
        field = fields.get(name)
        if field is None or value is None:
            continue
        try:
            values[name] = field.convert(value)
        except WrongValue as wrong:
            got = f"{value!r:.80}"
            if wrong.index is not None:
                got = f"{value[wrong.index]!r:.80} at index {wrong.index}"
            raise Refused(f"{name}: expected {field.expected}, got {got}") from None
    for name in fields.needed:
        if name not in values:
            got = "null" if name in record else "no such field"
            raise Refused(f"{name}: expected {fields[name].expected}, got {got}")
    return values


def anything(value: Any) -> Any:
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise WrongValue
    return value


def messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise WrongValue
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise WrongValue(i)
    return value


def prompt(value: Any) -> str | list[dict[str, Any]]:
    return value if isinstance(value, str) else messages(value)


def an_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongValue
    return value


def name(value: Any) -> str:
    """Of text or an integer."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise WrongValue
    return str(value)


def reward(value: Any) -> float:
    """Of a number, true or false."""
    if not isinstance(value, float | int):
        raise WrongValue
    try:
        number = float(value)
    except OverflowError:
        raise WrongValue from None
    if not math.isfinite(number):
        raise WrongValue
    return number


def votes(value: Any) -> float:
    if isinstance(value, bool) or reward(value) < 0:
        raise WrongValue
    return float(value)


def role(value: Any) -> Any:
    if value not in ROLES:
        raise WrongValue
    return value


def version(value: Any) -> int | NDArray[np.int32]:
    """An integer, or one for each token."""
    if isinstance(value, list):
        return _array(value, np.int32, {int})
    if type(value) is not int or not UNKNOWN_VERSION <= value < 2**63:
        raise WrongValue
    return value


def ids(value: Any) -> NDArray[np.int32]:
    """Integers of 0 or more; `Sample` refuses those below."""
    return _array(value, np.int32, {int})


def flags(value: Any) -> NDArray[np.bool_]:
    """True and false, or 1 and 0."""
    if not isinstance(value, list):
        raise WrongValue
    try:
        flags = bytes(value)
    except (TypeError, ValueError):
        flags = b""
    if flags.count(0) + flags.count(1) < len(value):
        raise WrongValue(
            next(i for i, x in enumerate(value) if type(x) not in (bool, int) or x not in (0, 1))
        )
    return np.frombuffer(flags, np.bool_)


def numbers(value: Any) -> NDArray[np.float32]:
    """NaN where one is null."""
    return _array(value, np.float32, {float, int, type(None)})


def _array(value: Any, dtype: type[np.generic], types: set[type]) -> NDArray[Any]:
    """A list of values of these types as an array that can't be written to, so that a sample needs no
    copy."""
    if not isinstance(value, list):
        raise WrongValue
    if not types.issuperset(map(type, value)):
        raise WrongValue(next(i for i, x in enumerate(value) if type(x) not in types))
    try:
        if dtype is np.float32:
            with np.errstate(over="ignore"):
                array = np.array(value, dtype)
        else:
            array = np.array(value, dtype)
    except OverflowError:
        largest = _LARGEST if dtype is np.int32 else sys.float_info.max
        raise WrongValue(
            next(i for i, x in enumerate(value) if x is not None and abs(x) >= largest)
        ) from None
    if dtype is np.float32 and np.count_nonzero(np.isinf(array)):
        raise WrongValue(int(np.isinf(array).argmax()))
    array.flags.writeable = False
    return array
