"""What an environment is: `Turn` and `Environment`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agro.types import Prompt


@dataclass(frozen=True)
class Turn:
    """What an environment says to one turn of the policy.

    An environment that gives rewards gives a number at every turn (0.0 where one earns nothing): the reward of the
    episode is their sum. One that leaves them to the configured reward gives None at every turn.
    """

    observation: str | None = None  # what the policy reads next; None only where the episode is done
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(
        default_factory=dict
    )  # JSON; kept in the sample's meta. "tool": one was called
    role: str = "user"  # of the observation's message, where the prompt is messages


class Environment(Protocol):
    """Answers the policy's turns. Episodes are told apart by their state alone: many are played at once, in any order.

    The same prompt and turns must give the same answers, or a resumed run isn't the run that never stopped. What
    `reset` or `step` raises belongs to its episode: it ends there, and its reward stays unknown.
    """

    name: str
    stop: tuple[str, ...]  # texts that end a turn, such as the end of a tool call; an end token always does

    def reset(self, prompt: Prompt) -> Any:
        """The state of a new episode, anything that `step` reads and may change. `prompt.columns` are the file's."""
        ...

    def step(self, state: Any, text: str) -> Turn:
        """What follows a turn of the policy: its text, the stop text that ended it included.

        It is called for every turn: the last one allowed, and one that was cut by the length, too.
        """
        ...
