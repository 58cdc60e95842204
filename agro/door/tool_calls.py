"""Calls of tools in what a model wrote, read by the form in which its chat template writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from agro.errors import Refused
from agro.models.chat import Chat
from agro.types import Messages
from agro.types.conversation import TOOLS, normalized_message

NAME, KEYS, VALUES = "door_tool_name", ("door_key_a", "door_key_b"), ("door_value_a", "door_value_b")
PING = {"role": "user", "content": "ping"}


@dataclass(frozen=True)
class CallSyntax:
    """Texts around a call. With `arguments` None a call is JSON; else these are the texts before and after
    the name of an argument, and after its value."""

    opening: str
    closing: str
    before_name: str  # from the opening to the name
    arguments: tuple[str, str, str] | None = None

    @classmethod
    def of(cls, chat: Chat) -> CallSyntax | None:
        """None where the template shows no calls."""
        if not chat.tokenizer.chat_template or chat.template.call_form is None:
            return None
        written = [_written(chat, count) for count in (0, 1, 2)]
        if not all(written):
            return None
        one, two = written[1], written[2]
        at = one.index(NAME)
        for start in (i for i in range(at) if one[i] in "[{"):
            try:
                value, stop = json.JSONDecoder().raw_decode(one, start)
            except ValueError:
                continue
            if NAME in json.dumps(value):
                return cls(one[:start].strip(), one[stop:].strip(), one[:at])
        before = one[at + len(NAME) : one.index(KEYS[0])]
        after_key = one[one.index(KEYS[0]) + len(KEYS[0]) : one.index(VALUES[0])]
        between = two[two.index(VALUES[0]) + len(VALUES[0]) : two.index(KEYS[1])]
        opening_of_key = commonprefix([before[::-1], between[::-1]])[::-1]  # noqa: RUF071 of characters
        after_value = between.removesuffix(opening_of_key)
        closing = one[one.index(VALUES[0]) + len(VALUES[0]) :].removeprefix(after_value).strip()
        opening = one[:at].strip()
        if not (opening and closing and opening_of_key.strip() and after_value.strip()):
            return None
        return cls(
            opening, closing, one[:at], (opening_of_key.strip(), after_key.strip(), after_value.strip())
        )

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """The text before the calls, and the calls; none where one of them can't be read.

        `tools`: what was declared, for the types of arguments that aren't JSON.
        """
        begin = text.find(self.opening) if self.opening else len(text) - len(text.lstrip())
        read = self._json if self.arguments is None else self._tagged
        with suppress(ValueError, RecursionError):  # `Refused` is a ValueError
            named = {tool["function"]["name"]: tool["function"] for tool in tools}
            found = read(text[begin:], named) if begin >= 0 else []
            json.dumps(found, allow_nan=False)  # raises for NaN, which Python reads
            turn = {"role": "assistant", "content": None, "tool_calls": found}
            [message] = normalized_message(turn, "tool_calls")
            calls = message.get("tool_calls", [])
            if calls and all(isinstance(call["function"]["arguments"], dict) for call in calls):
                return text[:begin].rstrip(), calls
        return text, []

    def _json(self, text: str, tools: dict[str, Any]) -> list[Any]:
        found: list[Any] = []
        while text.strip():
            text = text.lstrip()
            if not text.startswith(self.opening) or (found and not self.opening):
                break
            text = text[len(self.opening) :].lstrip()
            value, stop = json.JSONDecoder().raw_decode(text)
            found += value if isinstance(value, list) else [value]
            text = text[stop:].lstrip().removeprefix(self.closing)
        return [{"function": value.get("function", value)} for value in found if isinstance(value, dict)]

    def _tagged(self, text: str, tools: dict[str, Any]) -> list[Any]:
        assert self.arguments is not None
        opening, after_key, after_value = map(re.escape, self.arguments)
        found = []
        for block in text.split(self.opening)[1:]:
            name = re.match(r"\s*([\w.:-]+)", block)
            if name is None or self.closing not in block:
                raise ValueError("an unfinished call")
            types = tools.get(name[1], {}).get("parameters", {}).get("properties", {})
            arguments = {}
            pair = rf"{opening}\s*([^\s<>]+?)\s*{after_key}\n?(.*?)\n?\s*{after_value}"
            for key, value in re.findall(pair, block[name.end() :], re.DOTALL):
                arguments[key], schema = value, types.get(key)
                if not isinstance(schema, dict) or schema.get("type") != "string":  # true: any value
                    with suppress(ValueError):
                        arguments[key] = json.loads(value)
            found.append({"function": {"name": name[1], "arguments": arguments}})
        return found


def _written(chat: Chat, count: int) -> str:
    """A call with so many arguments as the model writes it, without the end of the turn."""
    given = dict(zip(KEYS[:count], VALUES))
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in given}}
    declared = [{"type": "function", "function": {"name": NAME, "description": "", "parameters": parameters}}]
    history: Messages = [{"role": TOOLS, "content": json.dumps(declared)}, PING]
    call = {"type": "function", "function": {"name": NAME, "arguments": given}}
    try:
        written = chat.reply(history, {"role": "assistant", "content": "", "tool_calls": [call]}, ()).written
    except Refused:
        return ""
    return chat.unended(written, ())
