"""Environments: episodes of several turns, in which something answers what the policy writes, such as a tool."""

from __future__ import annotations

from agro.envs.calculator import Calculator
from agro.envs.load import load_environment
from agro.envs.protocol import Environment, Turn
from agro.envs.search import Search
from agro.envs.tool import Mistake, Tool

__all__ = [
    "Calculator",
    "Environment",
    "Mistake",
    "Search",
    "Tool",
    "Turn",
    "load_environment",
]
