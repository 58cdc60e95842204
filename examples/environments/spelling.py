"""An answer that is written one character at a time: a wrong one ends the episode, without a reward.

    [environment]
    name = "examples/environments/spelling.py:Spelling"

It shows what a search needs from an environment: a reward at each turn, and equal answers to equal turns.
"""

from __future__ import annotations

from typing import Any

from agro.rollout.envs import Turn
from agro.types import Prompt


class Spelling:
    """Spell the column `answer`. `characters`: those that end a turn; `go_on`: the reply to a right one."""

    name = "spelling"
    maximum = 1.0

    def __init__(self, characters: str = "0123456789", go_on: str = ">") -> None:
        self.stop = tuple(characters)
        self.go_on = go_on

    def reset(self, prompt: Prompt) -> dict[str, Any]:
        return {"answer": str(prompt.columns["answer"]), "written": 0}

    def step(self, state: dict[str, Any], text: str) -> Turn:
        if text != state["answer"][state["written"]]:
            return Turn(reward=0.0, done=True)
        state["written"] += 1
        if state["written"] == len(state["answer"]):
            return Turn(reward=1.0, done=True)
        return Turn(self.go_on, reward=0.0)
