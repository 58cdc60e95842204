"""JSON that gives back exactly what it was given, or refuses."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from agro.errors import Refused


def dumps(value: Any, where: str, *, ascii: bool = False) -> str:
    """`value` as one line of JSON. Raises `Refused` at `where` unless `loads` gives the same value back."""
    try:
        text = (_ASCII if ascii else _UNICODE).encode(value)
        same = loads(text) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"{where}: expected a value that JSON has, got {value!r:.80}: {error}") from None
    if not same:
        raise Refused(
            f"{where}: JSON doesn't give this value back as it is: {value!r:.80}; expected text, numbers, "
            "true, false, null, lists and objects with text as keys (no tuples, no pairs of surrogates)"
        )
    return text


def loads(text: str) -> Any:
    """Raises `ValueError` for what isn't JSON, for NaN, infinities, and keys that an object has twice."""
    return _DECODER.decode(text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't JSON; write null for what is unknown")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is more than a float can be")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"expected different keys in an object, got {twice!r} twice")
    return value


# Made once: json.loads and json.dumps make theirs at each call.
_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object)
_ASCII = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
_UNICODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
