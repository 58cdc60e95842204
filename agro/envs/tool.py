"""An environment around one tool: a turn that calls it gets the result, one that doesn't is the final response."""

from __future__ import annotations

from typing import Any

from agro.envs.protocol import Turn
from agro.errors import Refused
from agro.types import Prompt


class Mistake(Exception):
    """A mistake in the policy's call: its message is what the policy reads."""


class Tool:
    """A subclass names itself and says in `use` what a call gives; rewards are left to the configured reward.

    Args:
        call: the texts around a call. A turn ends with the second one.
        result: what the policy reads, {} standing for the result.
        error: instead of the result, {} standing for what is wrong with the call.
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
        if (
            not isinstance(call, (list, tuple))
            or len(call) != 2
            or not all(isinstance(x, str) and x for x in call)
        ):
            raise Refused(f"environment.options.call: expected the two texts around a call, got {call!r:.80}")
        for name, value in (("result", result), ("error", error), ("role", role)):
            if not isinstance(value, str) or (name == "result" and "{}" not in value):
                wanted = "text with {}" if name == "result" else "text"
                raise Refused(f"environment.options.{name}: expected {wanted}, got {value!r:.80}")
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
        before, closed, _ = text.partition(self.close)
        _, opened, call = before.rpartition(self.open)
        if not (closed and opened):
            return Turn(done=True)
        info = {"tool": self.name}
        try:
            result = self.use(state, call)
        except Mistake as mistake:
            result = self.error.replace("{}", str(mistake))
            info["error"] = str(mistake)
        return Turn(self.result.replace("{}", result), info=info, role=self.role)
