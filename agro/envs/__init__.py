"""Environments: episodes of several turns, in which something answers what the policy writes, such as a tool."""

from __future__ import annotations

from agro.envs.calculator import Calculator
from agro.envs.demonstrate import demonstrate
from agro.envs.load import load_environment
from agro.envs.protocol import Environment, Turn
from agro.envs.reward import EpisodeReward
from agro.envs.sampler import EpisodeSampler, in_environment
from agro.envs.search import Search
from agro.envs.tool import Mistake, Tool

__all__ = [
    "Calculator",
    "Environment",
    "EpisodeReward",
    "EpisodeSampler",
    "Mistake",
    "Search",
    "Tool",
    "Turn",
    "demonstrate",
    "in_environment",
    "load_environment",
]
