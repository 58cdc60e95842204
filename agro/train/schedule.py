"""Values that change over the steps of a phase: the learning rate, and any numeric option of an objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agro.config import Train
from agro.errors import Refused

KEYS = {"start", "end", "steps", "shape"}
TUNED = {"start", "target_kl", "rate"}


def lr_at(config: Train, step: int, last: int) -> float:
    """The learning rate of optimiser step `step` (from 0) of a phase of `last`."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup) / max(1, last - config.warmup)
    return config.lr * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def option_at(value: Any, step: int, tuned: float | None = None) -> Any:
    """An option's value at a phase's step (from 0): itself, or for a schedule `{start, end, steps, shape}` what it is then.

    `shape` is "linear" (the default) or "cosine"; after `steps` the value stays at `end`. Of `{start, target_kl, rate}`
    it is `tuned`, what `tune` has made of it, or `start`.
    """
    if not isinstance(value, Mapping):
        return value
    if is_tuned(value):
        return value["start"] if tuned is None else tuned
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


def options_at(options: Mapping[str, Any], step: int, tuned: float | None = None) -> dict[str, Any]:
    return {k: option_at(v, step, tuned) for k, v in options.items()}


def is_tuned(value: Any) -> bool:
    """Whether an option is to hold the KL at a target; raises `Refused` for one that is malformed."""
    if not isinstance(value, Mapping) or "target_kl" not in value:
        return False
    numbers = [value.get(k) for k in ("start", "target_kl", "rate")]
    if value.keys() != TUNED or not all(
        isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0 for x in numbers
    ):
        raise Refused(
            f"objective.beta: expected {{start, target_kl, rate}}, numbers above 0 (reward per nat, nats a response, change of log β a step), got {dict(value)}"
        )
    return True


def tune(value: Mapping[str, float], now: float, kl: float) -> float:
    """β after a step whose fresh samples had `kl` nats a response to the reference.

    log β moves by rate · (kl / target_kl − 1), by no more than `rate` up or down: dual ascent on the Lagrangian of
    E r subject to KL <= target_kl, in log β so that β stays positive (as the temperature of SAC, arXiv 1812.05905).
    """
    return now * math.exp(value["rate"] * max(-1.0, min(1.0, kl / value["target_kl"] - 1)))
