"""Responses: encoder × engine × environment. `collect` is the one way a response comes into a store."""

from __future__ import annotations

from agro.rollout.collect import Activity, Collected, Task, collect
from agro.rollout.rollout import Rollout

__all__ = ["Activity", "Collected", "Rollout", "Task", "collect"]
