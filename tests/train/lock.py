"""A lock with three digits: a wrong one ends the episode, and nobody learns the number at once."""

from __future__ import annotations

from agro.rollout.envs import Turn

DIGITS = "0123"


class Lock:
    name = "lock"
    stop = tuple(DIGITS)
    maximum = 1.0

    def __init__(self, length: int = 3) -> None:
        self.length = length

    def number(self, text: str) -> str:
        start = int(text.rstrip(">"))
        return "".join(DIGITS[(start // 4**i) % 4] for i in range(self.length))

    def reset(self, prompt):
        return {"number": self.number(prompt.text), "at": 0}

    def step(self, state, text):
        if text != state["number"][state["at"]]:
            return Turn(reward=0.0, done=True)
        state["at"] += 1
        if state["at"] == self.length:
            return Turn(reward=1.0, done=True)
        return Turn(">", reward=0.0)
