"""The tokens of an episode: which of them the policy chose, and what stands between its turns.

What the policy sampled stays as it is; only what the environment adds is encoded. A text prompt is simply continued
by the observation. Messages go through the chat template: where the conversation with the new message is rendered as
an extension of what the policy read and wrote, what is added is its end. A template that rewrites what was before
(such as one that drops earlier reasoning) begins a new row, whose context is the conversation as rendered now.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agro.errors import Refused
from agro.policy import Policy
from agro.types import Messages, Prompt


@dataclass
class Row:
    """One sequence: a context that isn't the policy's, then actions, with observations between them."""

    tokens: list[int]
    context: int = field(init=False)  # tokens before the first action
    action: list[bool] = field(init=False)
    logp: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.context = len(self.tokens)
        self.action, self.logp = [False] * self.context, [math.nan] * self.context

    def add(self, tokens: list[int], *, action: bool, logp: list[float] | None = None) -> None:
        self.tokens = self.tokens + tokens  # a new list: the old one may still be decoded from
        self.action += [action] * len(tokens)
        self.logp += logp or [math.nan] * len(tokens)


class Transcript:
    def __init__(self, policy: Policy, prompt: Prompt, ids: list[int]) -> None:
        """`ids` are those of the prompt."""
        self.policy = policy
        self.rows = [Row(ids)]
        self.messages: Messages | None = (
            None if policy.chat.is_text(prompt.text) else list(policy.chat.messages(prompt.text))
        )
        self.text = policy.render(prompt.text)  # of the last row

    def act(self, tokens: list[int], logp: list[float] | None = None) -> None:
        """A turn of the policy, its end token included."""
        self.rows[-1].add(tokens, action=True, logp=logp)
        ended = tokens[-1] in self.policy.eos_ids
        written = self.policy.tokenizer.decode(
            tokens[:-1] if ended else tokens, clean_up_tokenization_spaces=False
        )
        self.text += written
        self._end = self.policy.tokenizer.decode(tokens[-1:]) if ended else ""
        if self.messages is not None:
            self.messages.append({"role": "assistant", "content": written})

    def observe(self, observation: str, role: str) -> bool:
        """Let the policy read the observation; False, and nothing changes, where its context has no room for more."""
        row, new = self.rows[-1], None
        if self.messages is None:
            ids = self.policy.encode_text(observation)
        else:
            message = {"role": role, "content": observation}
            text = self.policy.render([*self.messages, message])
            so_far = self.text + self._end
            if observation.strip() not in text:
                raise Refused(
                    f"environment: the chat template of {self.policy.name} doesn't show messages of role {role!r} "
                    f"(here {observation!r:.80}); give them another role (environment.options.role)"
                )
            new = not text.startswith(so_far)
            ids = self.policy.encode_text(text if new else text[len(so_far) :])
        if (0 if new else len(row.tokens)) + len(ids) >= self.policy.context:
            return False
        if self.messages is not None:
            self.messages.append(message)
            self.text = text
        if new:
            self.rows.append(Row(ids))
        else:
            row.add(ids, action=False)
        return True
