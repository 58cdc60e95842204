"""An environment around one tool: a turn that calls it gets the result; a turn without a call is the last."""

from __future__ import annotations

from typing import Any

from agro.errors import Refused
from agro.rollout.envs.protocol import Turn
from agro.types import Prompt


class Mistake(Exception):
    """A mistake in the policy's call. The policy reads its message."""


class Tool:
    """A base class: a subclass has a `name`, and `use` returns the result of a call.

    It gives no rewards: they come from the configured reward, which scores the last turn.

    Args:
        call: the texts around a call. A turn ends with the second one.
        result: what the policy reads; {} stands for the result.
        error: takes the place of a result; {} stands for the mistake in the call.
        role: of the message with the result, where the prompt is messages.
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
        """The result of a call. Raises `Mistake` where the policy made one."""
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
