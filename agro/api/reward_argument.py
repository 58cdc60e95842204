"""Rewards that are given as objects: by name in the configuration, and the functions of this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from agro.errors import Refused
from agro.rewards.function import inline_name, name_of

Function = Callable[..., Any]
RewardArgument = str | Function | Mapping[str | Function, float] | None
POOLED = ("timeout", "workers")  # settings of rewards in processes of their own


def reward_values(rewards: RewardArgument, functions: dict[str, Function]) -> dict[str, Any]:
    """The values of [reward]; functions that only this process has are put into `functions` by their names.

    `rewards`: the name of a reward, a function, or weights by them.
    """
    if rewards is None:
        return {}
    if not isinstance(rewards, Mapping):
        return {"name": _name(rewards, functions)}
    return {
        "functions": [
            {"name": _name(reward, functions), "weight": weight, "label": _label(reward)}
            for reward, weight in rewards.items()
        ]
    }


def check_pooled(values: Mapping[str, Any], functions: Mapping[str, Function]) -> None:
    """Raise `Refused` for settings of processes where all rewards are called in this one."""
    named = [part["name"] for part in values.get("functions", ())] or [values.get("name")]
    for key in POOLED:
        if key in values and all(name in functions for name in named):
            raise Refused(
                f"reward.{key} is of rewards in processes of their own, but {', '.join(named)} is called in "
                "this one. What to do: leave it out, or write the function into a file and give "
                "'file.py:function'"
            )


def _name(reward: str | Function, functions: dict[str, Function]) -> str:
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise Refused(
            f"reward: expected a name, 'file.py:function', a function, or weights by them, got {reward!r:.80}"
        )
    if _is_importable(reward):
        return name_of(reward)
    name = base = inline_name(reward)
    while name in functions:
        name = f"{base}_{len(functions) + 1}"
    functions[name] = reward
    return name


def _label(reward: str | Function) -> str | None:
    """A function's own name, for metrics; a name needs no other, and neither do functions without one."""
    if isinstance(reward, str) or "<" in getattr(reward, "__name__", "<"):
        return None
    return str(reward.__name__)


def _is_importable(function: Function) -> bool:
    """Whether another process finds this function in its module: not in a notebook or a script."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or getattr(module, "__spec__", None) is None:
        return False
    try:
        return attrgetter(function.__qualname__)(module) is function
    except AttributeError:
        return False
