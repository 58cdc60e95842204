"""Environments: episodes of several turns, in which a tool, for example, answers the policy.

`Turn` and `Environment` are the protocol; `Tool` is a base class for one tool. A turn that calls the tool
gets the result; a turn without a call is the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agro.errors import Refused
from agro.io.strictjson import dumps
from agro.types import Prompt


@dataclass(frozen=True)
class Turn:
    """The response of an environment to one turn of the policy.

    Args:
        observation: what the policy reads next; None only if the episode is done.
        reward: an environment with rewards returns a number at every turn (0.0 for none), and the reward of
            the episode is their sum. One without rewards returns None at every turn; the configured reward
            is used.
        done: whether the episode ends.
        info: JSON, stored in the sample's meta. "tool": the tool that was called.
        role: of the observation's message, if the prompt is messages.
    """

    observation: str | None = None
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    role: str = "user"


class Environment(Protocol):
    """Responds to the policy's turns. Many episodes are played at once, in any order; the state has all
    of an episode.

    The same prompt and turns must give the same observations. Otherwise a resumed run differs from an
    uninterrupted one. If `reset` or `step` raises an error, the episode ends and its reward stays unknown.

    `maximum`, optional: the largest reward of an episode, with which it passes in `agro eval`.
    `stop`: texts that end a turn, such as the end of a tool call. An end token always ends one.
    """

    name: str
    stop: tuple[str, ...]

    def reset(self, prompt: Prompt) -> Any:
        """Return the state of a new episode, which `step` may change. `prompt.columns`: the file's."""
        ...

    def step(self, state: Any, text: str) -> Turn:
        """Respond to a turn. `text` includes the stop text that ended it.

        It is called for every turn, including truncated ones and the last one allowed.
        """
        ...


def checked(reply: Any, cut: bool) -> Turn:
    """Raise unless `reply` is a `Turn` with which the episode can continue."""
    if not isinstance(reply, Turn):
        raise TypeError(f"step returned {reply!r:.80}, expected agro.rollout.envs.Turn")
    reward = reply.reward
    if reward is not None and not (isinstance(reward, (int, float)) and math.isfinite(reward)):
        raise ValueError(f"reward: expected a finite number or None, got {reward!r:.80}")
    if reply.observation is not None and not isinstance(reply.observation, str):
        raise TypeError(f"observation: expected text or None, got {reply.observation!r:.80}")
    (reply.observation or "").encode()  # raises for a lone surrogate, which has no tokens
    if not (reply.done or cut) and not reply.observation:
        raise ValueError("step was neither done nor gave an observation")
    dumps(dict(reply.info), "info")
    return reply


LOST = "lost"  # the reply of a process that doesn't have the episode or the environment


class Mistake(Exception):
    """A mistake in the policy's call. The policy reads its message."""


class Tool:
    """A base class: a subclass has a `name`, and `use` returns the result of a call.

    It gives no rewards: they come from the configured reward, which scores the last turn.

    Args:
        call: the texts around a call. A turn ends with the second one.
        result: what the policy reads; {} stands for the result.
        error: replaces a result; {} stands for the mistake in the call.
        role: of the message with the result, if the prompt is messages.
    """

    name = ""

    def __init__(
        self,
        call: tuple[str, str] = ("<call>", "</call>"),
        result: str = "<result>{}</result>",
        error: str = "error: {}",
        role: str = "user",
    ) -> None:
        is_pair = isinstance(call, list | tuple) and len(call) == 2
        if not is_pair or not all(isinstance(x, str) and x for x in call):
            raise Refused(f"environment.options.call: expected the two texts around a call, got {call!r:.80}")
        for name, value in (("result", result), ("error", error), ("role", role)):
            if not isinstance(value, str):
                raise Refused(f"environment.options.{name}: expected text, got {value!r:.80}")
        if "{}" not in result:
            raise Refused(f"environment.options.result: expected text with {{}}, got {result!r:.80}")
        self.open, self.close = call
        self.stop = (self.close,)
        self.result, self.error, self.role = result, error, role

    def reset(self, prompt: Prompt) -> Any:
        """The state that `use` gets."""
        return None

    def use(self, state: Any, call: str) -> str:
        """Return the result of a call. Raises `Mistake` if the policy made one."""
        raise NotImplementedError

    def step(self, state: Any, text: str) -> Turn:
        head, closed, _ = text.partition(self.close)
        _, opened, call = head.rpartition(self.open)
        if not (closed and opened):
            return Turn(done=True)
        info = {"tool": self.name}
        try:
            result = self.use(state, call)
        except Mistake as mistake:
            result = self.error.replace("{}", str(mistake))
            info["error"] = str(mistake)
        return Turn(self.result.replace("{}", result), info=info, role=self.role)
