"""Reading prompts, and generating responses to them with an encoder, an engine and an environment;
`collect` adds them to a store.

`Rollout` and `demonstrate` are imported when they are first used: prompts and measured results, which are
here too, need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agro.rollout.collect import Activity, CollectResult, Task, collect

if TYPE_CHECKING:
    from agro.rollout.episode import demonstrate
    from agro.rollout.rollout import Rollout

__all__ = ["Activity", "CollectResult", "Rollout", "Task", "collect", "demonstrate"]
LATER = {"Rollout": "agro.rollout.rollout", "demonstrate": "agro.rollout.episode"}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module 'agro.rollout' has no attribute {name!r}")
    return getattr(import_module(LATER[name]), name)
