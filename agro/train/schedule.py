"""Values that change over the steps of a phase: the learning rate, and any numeric option of an objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agro.config import Train
from agro.config.schedule import EXPECTED, are_numbers, is_schedule, value_at
from agro.errors import Refused

TUNED = {"start", "target_kl", "rate"}


def lr_at(config: Train, step: int, last: int) -> float:
    """The learning rate of optimizer step `step` (from 0) of a phase with `last` steps."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup) / max(1, last - config.warmup)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    return config.lr * (0.5 * (1 + math.cos(math.pi * done)))


def option_at(value: Any, step: int, tuned: float | None = None) -> Any:
    """An option's value at step `step` (from 0) of a phase.

    A schedule `{start, end, steps, shape}` goes from `start` to `end` in `steps` steps; `shape` is "linear"
    (the default) or "cosine". With `warmup` it begins so many steps later, and rises from 0 to `start` in
    them (CHORD, arXiv 2508.11408). For `{start, target_kl, rate}` the value is `tuned`, the result of
    `tune`, or `start` where that is None. Other values are constant.
    """
    if not isinstance(value, Mapping):
        return value
    if is_tuned(value):
        return value["start"] if tuned is None else tuned
    if not is_schedule(value):
        raise Refused(f"schedule of an option: expected {EXPECTED}, got {dict(value)}")
    return value_at(value, step)


def options_at(options: Mapping[str, Any], step: int, tuned: float | None = None) -> dict[str, Any]:
    return {k: option_at(v, step, tuned) for k, v in options.items()}


def is_tuned(value: Any) -> bool:
    """Whether an option is tuned to a target KL; raises `Refused` for one that is malformed."""
    if not isinstance(value, Mapping) or "target_kl" not in value:
        return False
    numeric = value.keys() == TUNED and are_numbers(value, TUNED)
    if not numeric or not all(x > 0 for x in value.values()):
        raise Refused(
            "objective.beta: expected {start, target_kl, rate}, numbers above 0 (reward per nat, nats per "
            f"response, change of log β per step), got {dict(value)}"
        )
    return True


def tune(value: Mapping[str, float], now: float, kl: float) -> float:
    """β after a step whose fresh samples, or evaluation, had a KL to the reference of `kl` nats per response.

    log β moves by rate · (kl / target_kl − 1), by at most `rate` up or down. This is dual ascent on the
    Lagrangian of E r subject to KL <= target_kl. It is done in log β so that β stays positive, as for the
    temperature of SAC (arXiv 1812.05905).
    """
    return now * math.exp(value["rate"] * max(-1.0, min(1.0, kl / value["target_kl"] - 1)))
