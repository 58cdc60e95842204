"""Environments: episodes of several turns, in which something such as a tool answers the policy."""

from __future__ import annotations

from agro.envs.demonstrate import demonstrate
from agro.envs.load import load_environment
from agro.envs.protocol import Environment, Turn
from agro.envs.reward import EpisodeReward
from agro.envs.sampler import EpisodeSampler, in_environment
from agro.envs.tool import Mistake, Tool

__all__ = [
    "Environment",
    "EpisodeReward",
    "EpisodeSampler",
    "Mistake",
    "Tool",
    "Turn",
    "demonstrate",
    "in_environment",
    "load_environment",
]
