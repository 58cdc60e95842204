"""JSON that reproduces a value exactly, or refuses it."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import numpy as np
import orjson

from agro.errors import Refused

LARGE = 1 << 12  # bytes from which NumPy counts faster


def dumps(value: Any, location: str, *, ascii: bool = False) -> str:
    """`value` as one line of JSON. Raises `Refused` unless `loads` gives the same value back."""
    try:
        raw = b"" if ascii else orjson.dumps(value)
        if raw and orjson.loads(raw) == value:
            return raw.decode()
    except (ValueError, TypeError):  # what orjson doesn't take, Python's own encoder takes or names
        pass
    try:
        text = (_ASCII if ascii else _UNICODE).encode(value)
        same = loads(text) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"{location}: expected a value that JSON has, got {value!r:.80}: {error}") from None
    if not same:
        raise Refused(
            f"{location}: JSON can't reproduce this value exactly: {value!r:.80}; expected text, numbers, "
            "true, false, null, lists and objects with text as keys (no tuples, no pairs of surrogates)"
        )
    return text


def loads(text: str | bytes) -> Any:
    """Parse JSON. Raises `ValueError` for invalid JSON or UTF-8, NaN, infinities, duplicate keys, and
    thousands of nested lists."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        value = orjson.loads(raw)
        if _lost_nothing(raw, orjson.dumps(value)):
            return value
    except (ValueError, TypeError):  # what orjson doesn't take, Python's own decoder takes or names
        pass
    try:
        return _DECODER.decode(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error


def loads_own(text: str | bytes) -> Any:
    """`loads` of what `dumps` wrote, in a third of the time: its objects have no duplicate keys."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if _LONG not in raw.translate(_DIGITS):
        try:
            return orjson.loads(raw)
        except ValueError:  # lone surrogates
            pass
    return loads(text)


def _lost_nothing(raw: bytes, rewritten: bytes) -> bool:
    """Whether orjson read all of `raw`, which it writes as `rewritten`.

    It drops all but the last of equal keys, and reads integers of more than 64 bits as floats. Each key has a
    colon, and colons in texts stay, so a dropped key is a missing colon. Such an integer has 19 digits or
    more, and its float has "e+". The fastest search decides for most texts, which have no "+" and no escapes.
    """
    if _colons(raw) != _colons(rewritten) or (b"\\" in raw and b"\\u003" in raw):
        return False
    return b"+" not in rewritten or b"e+" not in rewritten or _LONG not in raw.translate(_DIGITS)


def _colons(raw: bytes) -> int:
    if len(raw) < LARGE:
        return raw.count(b":")
    return int(np.count_nonzero(np.frombuffer(raw, np.uint8) == ord(":")))


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't JSON; write null for an unknown value")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large for a float")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"expected unique keys in an object, got {twice!r} twice")
    return value


_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19
# Created once: json.loads and json.dumps create theirs at each call.
_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object)
_ASCII = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
_UNICODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
