"""Records that hold a whole conversation in `messages`, as prompt and response."""

from __future__ import annotations

from typing import Any

from agro.errors import Refused
from agro.types import check_turns


def split(record: dict[str, Any]) -> dict[str, Any]:
    """An interchange record of a conversation's last assistant turns.

    The prompt is given by `prompt`, messages that the conversation begins with, or reaches up to the last
    message of a user. What follows is the response: `response` is the text of its last turn, and where it
    is more than one plain turn (tools are called, users answer), `meta.continuation` holds all of them.

    Raises `Refused` for conversations that don't end with the assistant.
    """
    messages = record["messages"]
    check_turns(messages, "messages")
    prompt = record.get("prompt")
    if prompt is None:
        users = [i for i, m in enumerate(messages) if m["role"] == "user"]
        if not users:
            raise Refused(
                "messages: expected a message of a user, after which the response begins; give `prompt` as well"
            )
        begins = users[-1] + 1
    elif isinstance(prompt, list) and messages[: len(prompt)] == prompt:
        begins = len(prompt)
    else:
        raise Refused(f"prompt: expected the messages that the conversation begins with, got {prompt!r:.80}")
    turns = messages[begins:]
    check_turns(turns, f"messages after the prompt's {begins}")
    text = turns[-1].get("content")
    if not isinstance(text, str) and not (text is None and "tool_calls" in turns[-1]):
        raise Refused(f"messages: the last one's content: expected text, got {text!r:.80}")
    meta = record.get("meta") or {}
    if not isinstance(meta, dict):
        raise Refused(f"meta: expected an object, got {meta!r:.80}")
    if len(turns) > 1 or turns[0].keys() != {"role", "content"}:
        meta = {**meta, "continuation": turns}
    rest = {name: value for name, value in record.items() if name != "messages"}
    return {**rest, "prompt": messages[:begins], "response": text or "", "meta": meta}
