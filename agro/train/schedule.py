"""Values that change over the steps of a phase: the learning rate, and any numeric option of an objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agro.config import Train
from agro.errors import Refused

KEYS = {"start", "end", "steps", "shape"}


def lr_at(config: Train, step: int, last: int) -> float:
    """The learning rate of optimiser step `step` (from 0) of a phase of `last`."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup) / max(1, last - config.warmup)
    return config.lr * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def option_at(value: Any, step: int) -> Any:
    """An option's value at a phase's step (from 0): itself, or for a schedule `{start, end, steps, shape}` what it is then.

    `shape` is "linear" (the default) or "cosine"; after `steps` the value stays at `end`.
    """
    if not isinstance(value, Mapping):
        return value
    numbers = (value.get(k) for k in ("start", "end", "steps"))
    if (
        not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in numbers)
        or not value.keys() <= KEYS
        or value.get("shape", "linear") not in ("linear", "cosine")
    ):
        raise Refused(
            f'schedule of an option: expected {{start, end, steps, shape = "linear" or "cosine"}}, got {dict(value)}'
        )
    done = min(1.0, step / value["steps"]) if value["steps"] > 0 else 1.0
    if value.get("shape") == "cosine":
        done = 0.5 * (1 - math.cos(math.pi * done))
    return value["start"] + done * (value["end"] - value["start"])


def options_at(options: Mapping[str, Any], step: int) -> dict[str, Any]:
    return {k: option_at(v, step) for k, v in options.items()}
