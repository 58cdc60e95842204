"""JSON that gives back exactly what it was given, or refuses."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from agro.errors import Refused


def dumps(value: Any, where: str, *, ascii: bool = False) -> str:
    """`value` as JSON text on one line. Raises `Refused` at `where` unless `loads` gives the same value back."""
    try:
        text = json.dumps(value, ensure_ascii=ascii, allow_nan=False, separators=(",", ":"))
        same = loads(text) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"{where}: expected what JSON can hold, got {value!r:.80}: {error}") from None
    if not same:
        raise Refused(
            f"{where}: JSON doesn't give this value back as it is: {value!r:.80}; expected text, numbers, true, false, "
            "null, lists and objects with text as keys (no tuples, no pairs of surrogates)"
        )
    return text


def loads(text: str) -> Any:
    """Raises `ValueError` for what isn't JSON, NaN and infinities included."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't JSON; write null for what is unknown")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is more than a float holds")
    return value
