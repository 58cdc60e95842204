"""The tokens of an episode: those that the policy chose, and those of the environment.

Sampled tokens never change; only observations are encoded. An observation is appended to a text prompt.
Messages are rendered by the chat template: if the conversation with the new message extends the previous
text, the extension is appended. A template that rewrites earlier turns (such as one that drops earlier
reasoning) starts a new row, whose context is the conversation as rendered now.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agro.errors import Refused
from agro.policy import Policy
from agro.types import Messages, Prompt


@dataclass
class Row:
    """One sequence: a context, then actions and observations. `context`: tokens before the first action."""

    tokens: list[int]
    context: int = field(init=False)
    action: list[bool] = field(init=False)
    logp: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.context = len(self.tokens)
        self.action, self.logp = [False] * self.context, [math.nan] * self.context

    def add(self, tokens: list[int], *, action: bool, logp: list[float] | None = None) -> None:
        self.tokens = self.tokens + tokens  # a new list: the sampler may still use the old one
        self.action += [action] * len(tokens)
        self.logp += logp or [math.nan] * len(tokens)


class Transcript:
    def __init__(self, policy: Policy, prompt: Prompt, ids: list[int]) -> None:
        """`ids`: those of the prompt."""
        self.policy = policy
        self.rows = [Row(ids)]
        self.messages: Messages | None = None
        if not policy.chat.is_text(prompt.text):
            self.messages = list(policy.chat.messages(prompt.text))
        self.text = policy.render(prompt.text)  # of the last row

    def act(self, tokens: list[int], logp: list[float] | None = None) -> None:
        """Append a turn of the policy, with its end token."""
        self.rows[-1].add(tokens, action=True, logp=logp)
        ended = tokens[-1] in self.policy.eos_ids
        text = tokens[:-1] if ended else tokens
        written = self.policy.tokenizer.decode(text, clean_up_tokenization_spaces=False)
        self.text += written
        self._end = self.policy.tokenizer.decode(tokens[-1:]) if ended else ""
        if self.messages is not None:
            self.messages.append({"role": "assistant", "content": written})

    def observe(self, observation: str, role: str) -> bool:
        """Append an observation. False, without a change, if it doesn't fit into the model's context."""
        row, new = self.rows[-1], None
        if self.messages is None:
            ids = self.policy.encode_text(observation)
        else:
            message = {"role": role, "content": observation}
            text = self.policy.render([*self.messages, message])
            so_far = self.text + self._end
            if observation.strip() not in text:
                raise Refused(
                    f"environment: the chat template of {self.policy.name} doesn't show messages of role "
                    f"{role!r} (here {observation!r:.80}); give them another role (environment.options.role)"
                )
            new = not text.startswith(so_far)
            ids = self.policy.encode_text(text if new else text[len(so_far) :])
        before = 0 if new else len(row.tokens)
        if before + len(ids) >= self.policy.context:
            return False
        if self.messages is not None:
            self.messages.append(message)
            self.text = text
        if new:
            self.rows.append(Row(ids))
        else:
            row.add(ids, action=False)
        return True
