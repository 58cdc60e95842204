"""Prompts: text, or the messages of a conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from agro.errors import Refused

Messages = list[dict[str, Any]]
Text = str | Messages


def prompt_hash(prompt: Text) -> str:
    """The default `prompt_id`: 16 hex digits of SHA-256 of the text, or of the messages as sorted JSON."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return _hash(text)


@lru_cache(maxsize=64)  # the responses to a prompt come one after the other
def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_text(prompt: Any, location: str) -> None:
    """Raise `Refused` unless `prompt` is text or a list of messages with `role` and `content`."""
    if isinstance(prompt, str) or _are_messages(prompt, "content"):
        return
    raise Refused(
        f"{location}: prompt: expected text, or a list of messages with 'role' and 'content', "
        f"got {prompt!r:.80}"
    )


def check_turns(turns: Any, location: str) -> None:
    """Raise `Refused` unless `turns` are messages that can follow a prompt: the last is the assistant's."""
    if _are_messages(turns, "content", "tool_calls") and turns[-1]["role"] == "assistant":
        return
    raise Refused(
        f"{location}: expected a list of messages with 'role' and 'content' (or 'tool_calls'), "
        f"the last one the assistant's, got {turns!r:.80}"
    )


def _are_messages(value: Any, *either: str) -> bool:
    """Whether these are messages with a role and one key of `either`."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(m, dict) and "role" in m and not m.keys().isdisjoint(either) for m in value)


@dataclass(frozen=True)
class Prompt:
    """What a policy is asked. `id` makes the group; `columns` are what a reward may read (`answer`, …).

    `shown`: what a sampler reads in place of `text`, under which the response is stored: such as the text
    with a hint.
    """

    text: Text
    id: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    shown: Text | None = None

    def __post_init__(self) -> None:
        check_text(self.text, f"prompt {self.id}".rstrip())
        if not self.id:
            object.__setattr__(self, "id", prompt_hash(self.text))
