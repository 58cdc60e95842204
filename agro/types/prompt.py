"""Prompts: text, or the messages of a conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from agro.errors import Refused
from agro.types.conversation import Messages, normalized, with_tools

Text = str | Messages


def prompt_hash(prompt: Text) -> str:
    """The default `prompt_id`: 16 hex digits of SHA-256 of the text, or of the messages as sorted JSON."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return _hash(text)


@lru_cache(maxsize=64)  # the responses to a prompt come one after the other
def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def conversation(prompt: Any, location: str) -> Text:
    """A prompt as samples have it: text, or messages in one form (`agro.types.conversation`).

    Raises `Refused` for anything else.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:
        return normalized(prompt, f"{location}: prompt")
    raise Refused(
        f"{location}: prompt: expected text, or a list of messages with 'role' and 'content', "
        f"got {prompt!r:.80}"
    )


def check_turns(turns: Any, location: str) -> Messages:
    """Messages that can follow a prompt, in one form. Raises `Refused` unless the last is the assistant's."""
    messages = normalized(turns, location)
    if messages[-1]["role"] == "assistant":
        return messages
    raise Refused(
        f"{location}: expected a list of messages with 'role' and 'content' (or 'tool_calls'), the last one "
        f"the assistant's, got {turns!r:.80}"
    )


@dataclass(frozen=True)
class Prompt:
    """What a policy is asked. `id` makes the group; `columns` are what a reward may read (`answer`, …).

    Where `columns` have declarations of `tools`, these are part of messages, and of their identity.
    """

    text: Text
    id: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.text) is not str:
            text = conversation(self.text, f"prompt {self.id}".rstrip())
            if isinstance(text, list):
                text = with_tools(text, self.columns.get("tools"))
            object.__setattr__(self, "text", text)
        if not self.id:
            object.__setattr__(self, "id", prompt_hash(self.text))
