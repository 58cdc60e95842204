"""Environments: episodes of several turns, in which something such as a tool answers the policy."""

from __future__ import annotations

from agro.rollout.envs.process import load_environment
from agro.rollout.envs.protocol import Environment, Mistake, Tool, Turn

__all__ = [
    "Environment",
    "Mistake",
    "Tool",
    "Turn",
    "load_environment",
]
