"""Reading prompts, and generating responses to them with an encoder, an engine and an environment;
`collect` adds them to a store.

`Rollout` is imported when it is first used: prompts and measured results, which are here too, need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agro.rollout.collect import Activity, CollectResult, Task, collect

if TYPE_CHECKING:
    from agro.rollout.rollout import Rollout

__all__ = ["Activity", "CollectResult", "Rollout", "Task", "collect"]


def __getattr__(name: str) -> Any:
    if name != "Rollout":
        raise AttributeError(f"module 'agro.rollout' has no attribute {name!r}")
    from agro.rollout.rollout import Rollout

    return Rollout
