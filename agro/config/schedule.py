"""Values that change over the steps of a phase, and shares of its groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

KEYS = {"start", "end", "steps", "shape", "warmup"}
EXPECTED = '{start, end, steps, shape = "linear" or "cosine", warmup}'
ROUNDING = 1e-9  # by which shares may add up to more than 1


def are_numbers(value: Mapping[str, Any], keys: Iterable[str]) -> bool:
    numbers = [value.get(key) for key in keys]
    return all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in numbers)


def is_schedule(value: Any) -> bool:
    """Whether a value is a schedule, and not a malformed one."""
    if not isinstance(value, Mapping) or not value.keys() <= KEYS:
        return False
    valid_shape = value.get("shape", "linear") in ("linear", "cosine")
    return valid_shape and are_numbers(value, {"start", "end", "steps"} | value.keys() - {"shape"})


def value_at(value: Any, step: int) -> Any:
    """A constant, or a schedule's value at step `step` (from 0).

    It goes from 0 to `start` in `warmup` steps (0 where not given), then to `end` in `steps` steps.
    """
    if not isinstance(value, Mapping):
        return value
    warmup = value.get("warmup", 0)
    if step < warmup:
        return value["start"] * step / warmup
    step -= warmup
    done = min(1.0, step / value["steps"]) if value["steps"] > 0 else 1.0
    if value.get("shape") == "cosine":
        done = 0.5 * (1 - math.cos(math.pi * done))
    return value["start"] + done * (value["end"] - value["start"])


def checked_shares(value: Any) -> Any:
    """A share from 0 to 1, a schedule of one, or a table of them by name that never add up to more than 1."""
    several = isinstance(value, Mapping) and not is_schedule(value)
    parts = dict(value) if several else {"": value}
    for part in parts.values():
        ends = (part["start"], part["end"]) if is_schedule(part) else (part,)
        if not all(type(end) in (int, float) and 0 <= end <= 1 for end in ends):
            raise PydanticCustomError(
                "shares",
                "expected a share from 0 to 1, a schedule of one ({expected}), or a table of them by role or "
                "source",
                {"expected": EXPECTED},
            )
    steps = math.ceil(last_step(value))
    if several and max(sum(shares_at(value, step).values()) for step in range(steps + 1)) > 1 + ROUNDING:
        raise PydanticCustomError("shares", "expected shares that add up to at most 1 at every step")
    return value if isinstance(value, Mapping) else float(value)


def shares_at(value: Any, step: int) -> dict[str, float]:
    """Shares by name at a step (from 0); a single one is under ""."""
    if isinstance(value, Mapping) and not is_schedule(value):
        return {name: value_at(part, step) for name, part in value.items()}
    return {"": value_at(value, step)}


def last_step(value: Any) -> float:
    """The step from which shares are constant."""
    if not isinstance(value, Mapping):
        return 0
    if is_schedule(value):
        return float(max(0, value.get("warmup", 0)) + max(0, value["steps"]))
    return max((last_step(part) for part in value.values()), default=0)
