"""Prompts, and the one form of conversation to which all logs, prompt files and environments convert.

A message has `role` (system, developer, user, assistant, tool, or one that a template knows) and `content`, a
text. An assistant message may also have `reasoning_content`, a text, and `tool_calls`, each
`{"type": "function", "function": {"name", "arguments"}}` with its arguments as an object. A tool message has
`tool_call_id` or `name` if they are known. A conversation with tools begins with a message of role "tools",
whose content is the list of their declarations as JSON, so that they are part of the prompt and of its
identity.
"""

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
TOOLS = "tools"  # the role of the message that declares tools

_REASONING = ("reasoning_content", "reasoning", "thinking")
_LISTED_REASONING = ("reasoning_details", "thinking_blocks")
_OTHER_NAMES = {"reasoning", "thinking", "function_call", "refusal", "audio", *_LISTED_REASONING}
_CALLING = ("tool_call", "function_call")  # roles of messages that are a tool call, as JSON
_ANSWERING = ("tool_response", "observation", "function")  # roles of messages that are its result
# The type of a content part: the keys that may hold its text.
_TEXTS = dict.fromkeys(
    ("text", "input_text", "output_text", "summary_text", "reasoning.text", "reasoning.summary"),
    ("text", "content", "summary"),
) | {"refusal": ("refusal",)}
_THOUGHTS = {kind: (kind, "text", "content") for kind in ("thinking", "reasoning")}
_USES = ("tool_use", "tool_call")
_RESULTS = {"tool_result": ("content",), "tool_call_response": ("response", "result")}
_ENCRYPTED = ("redacted_thinking", "reasoning.encrypted")  # unreadable to users


def normalized(messages: Any, location: str) -> Messages:
    """Convert messages to this module's form; those that have it stay as they are.

    Raises `Refused` for content that isn't text, such as an image, and for what isn't a message.
    """
    if not isinstance(messages, list) or not messages:
        raise Refused(
            f"{location}: expected a list of messages with 'role' and 'content' (or 'tool_calls'), got "
            f"{messages!r:.80}"
        )
    if all(map(_is_normal, messages)):
        return messages
    normal: Messages = []
    for i, message in enumerate(messages):
        new = normalized_message(message, f"{location}[{i}]")
        if normal and message["role"] in _CALLING and normal[-1]["role"] == "assistant":
            calls = normal[-1].get("tool_calls", []) + new[0]["tool_calls"]
            normal[-1] = {**normal[-1], "tool_calls": calls}  # of the same turn
        else:
            normal += new
    return normal


def normalized_message(message: Any, location: str) -> Messages:
    """Convert a message to this module's form; tool results among its parts become messages before it."""
    normal = [message] if _is_normal(message) else _normal(message, location)
    for each in normal:
        for id in (each.get("tool_call_id"), *(call.get("id") for call in each.get("tool_calls", ()))):
            if not isinstance(id, str | int | None):
                raise Refused(f"{location}: expected the id of a call as text, got {id!r:.80}")
    return normal


def with_tools(messages: Messages, tools: Any) -> Messages:
    """Prepend the declarations of `tools`, a list or its JSON, to the messages, if there are any.

    Declarations for OpenAI's and Anthropic's APIs become those of chat completions.
    """
    declared = declarations(tools)
    if not declared or not messages or messages[0]["role"] == TOOLS:
        return messages
    text = json.dumps(declared, sort_keys=True, ensure_ascii=False)
    return [{"role": TOOLS, "content": text}, *messages]


def without_tools(prompt: str | Messages) -> tuple[str | Messages, list[dict[str, Any]]]:
    """Split a prompt into itself without tool declarations, and these."""
    if isinstance(prompt, str) or prompt[0]["role"] != TOOLS:
        return prompt, []
    return prompt[1:], json.loads(prompt[0]["content"])


_FOREIGN = {"functionDeclarations", "function_declarations", "toolSpec"}  # Gemini's and Bedrock's


def declarations(tools: Any) -> list[dict[str, Any]]:
    """Convert tool declarations to those of chat completions; empty if `tools` has no declaration.

    Raises `Refused` for declarations of other kinds, such as tools that a provider runs itself.
    """
    tools, others = _decoded(tools), list[Any]()
    converted: list[dict[str, Any]] = []
    for tool in tools if isinstance(tools, list) else ():
        declaration = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(declaration, dict) or not isinstance(declaration.get("name"), str):
            others.append(tool)
            continue
        function = {"name": declaration["name"]}
        if declaration.get("description"):
            function["description"] = declaration["description"]
        function["parameters"] = declaration.get("parameters") or declaration.get("input_schema") or {}
        converted.append({"type": "function", "function": function})
    declared = [tool for tool in others if isinstance(tool, dict)]
    is_foreign = any(
        tool.get("type", "function") != "function" or _FOREIGN & tool.keys() for tool in declared
    )
    if is_foreign or (converted and others):
        expected = "declarations of functions with their names"
        raise Refused(f"tools: expected {expected}, got {others[0]!r:.80}; declare it or leave it out")
    return converted


def text_of(content: Any, location: str) -> str:
    """The text of a message's content, a text or its parts. Raises `Refused` for images and other parts."""
    parts = _Parts(content, location)
    if parts.thoughts or parts.calls or parts.results:
        raise Refused(f"{location}: expected text, got {content!r:.80}")
    return "".join(parts.texts)


def _is_normal(message: Any) -> bool:
    """Whether a message has this module's form; keys without a value would make it another prompt."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        and message["role"] not in (*_CALLING, *_ANSWERING)
        and message.keys().isdisjoint(_OTHER_NAMES)
        and all(value not in (None, []) for value in message.values())
        and isinstance(message.get("reasoning_content", ""), str)
        and message.get("reasoning_content") != ""
        and isinstance(message.get("tool_calls", []), list)
        and all(map(_is_normal_call, message.get("tool_calls", [])))
    )


def _is_normal_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), dict)
    )


def _normal(value: Any, location: str) -> Messages:
    """Convert a message; tool results among its parts become messages before it."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise Refused(
            f"{location}: expected a message with 'role' and 'content' (or 'tool_calls'), got {value!r:.80}"
        )
    content = value.get("content")
    if value["role"] in _CALLING:  # a call that is a message of its own
        calls = _decoded(content)
        value = {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
    elif value["role"] == "tool" or value["role"] in _ANSWERING:
        text = json.dumps(content, ensure_ascii=False) if isinstance(content, dict) else content
        value = {**value, "role": "tool", "content": text}
    parts = _Parts(value.get("content"), f"{location}.content")
    parts.add_refusal(value, location)
    thought = _reasoning(value, parts.thoughts, location)
    calls = value.get("tool_calls")
    if not isinstance(calls, list | None):
        raise Refused(f"{location}.tool_calls: expected a list, got {calls!r:.80}")
    ids = [call["id"] for call in calls or () if isinstance(call, dict) and call.get("id") is not None]
    parts.calls = [call for call in parts.calls if call.get("id") not in ids]  # LangChain has both
    calls = [*(calls or ()), *parts.calls, *filter(None, [value.get("function_call")])]
    if not (parts.texts or thought or calls):
        if parts.results:
            return parts.results
        if value.get("content") is None:
            raise Refused(f"{location}: expected content, a refusal or tool_calls, got {value!r:.80}")
    dropped = {*_OTHER_NAMES, "reasoning_content", "tool_calls"}
    message = {name: x for name, x in value.items() if name not in dropped and x is not None}
    message["content"] = "".join(parts.texts)
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [_call(call, f"{location}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return [*parts.results, message]


def _reasoning(value: dict[str, Any], parts: list[str], location: str) -> str:
    """A message's reasoning: from a field, from a list of parts, or from `parts`, those of its content."""
    thoughts = [value[name] for name in _REASONING if value.get(name)]
    for thought in thoughts:
        if not isinstance(thought, str):
            raise Refused(f"{location}: reasoning: expected text, got {thought!r:.80}")
    if not thoughts:
        listed = [_Parts(value.get(name), f"{location}.reasoning") for name in _LISTED_REASONING]
        texts = [text for each in listed for text in each.texts]
        thoughts = ["".join(texts + [text for each in listed for text in each.thoughts])]
    unique = list(dict.fromkeys(filter(str.strip, [*thoughts, "".join(parts)])))
    if len(unique) > 1:
        raise Refused(
            f"{location}: expected one reasoning, got two: {unique[0]!r:.60} and {unique[1]!r:.60}; keep one"
        )
    return unique[0] if unique else ""


class _Parts:
    """The parts of a message's content: texts, thoughts, tool calls and tool results."""

    def __init__(self, content: Any, location: str) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[Any] = []
        self.results: Messages = []
        if isinstance(content, str):
            self.texts.append(content)
        elif isinstance(content, list):
            for part in content:
                self._add({"text": part} if isinstance(part, str) else part, location)
        elif content is not None:
            raise Refused(f"{location}: expected text, or parts of text, got {content!r:.80}")

    def add_refusal(self, message: Mapping[str, Any], location: str) -> None:
        """Take a refusal in words for the text of its message, which may have no other, and no audio."""
        refusal = message.get("refusal")
        if message.get("audio"):
            raise Refused(f"{location}: expected text, got audio")
        if refusal and isinstance(refusal, str):
            if "".join(self.texts) not in ("", refusal):
                got = f"got both: {refusal!r:.80}; keep one"
                raise Refused(f"{location}: expected content or a refusal, {got}")
            self.texts = [refusal]

    def _add(self, part: Any, location: str) -> None:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if not isinstance(kind, str):
            raise Refused(f"{location}: expected the type of a part as text, got {kind!r:.80}")
        if kind in _ENCRYPTED:
            return
        if kind in _USES:
            self.calls.append(part)
            return
        if kind in _RESULTS:
            value = next((part[name] for name in _RESULTS[kind] if part.get(name) is not None), "")
            if kind == "tool_call_response" and not isinstance(value, str):
                value = json.dumps(value, ensure_ascii=False)
            result = {"role": "tool", "content": text_of(value, f"{location}.{kind}")}
            call = part.get("tool_use_id", part.get("id"))
            self.results.append(result if call is None else {**result, "tool_call_id": call})
            return
        names = (_TEXTS | _THOUGHTS).get(kind, ())
        text = next((part[name] for name in names if isinstance(part.get(name), str)), None)
        if text is None:
            raise Refused(f"{location}: expected text, got a part of type {kind}")
        (self.thoughts if kind in _THOUGHTS else self.texts).append(text)


def _call(value: Any, location: str) -> dict[str, Any]:
    """Convert a tool call. Arguments that aren't a JSON object stay the text that the model wrote."""
    value = _decoded(value)  # verifiers wrote calls as text until late 2025
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"{location}: expected a call of a tool with its name and arguments, got {value!r:.80}")
    names = ("arguments", "args", "input", "parameters")
    arguments = _decoded(next((function[name] for name in names if function.get(name) is not None), {}))
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return call if value.get("id") is None else {"id": value["id"], **call}


def _decoded(value: Any) -> Any:
    """Decode text that is a JSON object or list; other values stay, and blank text is an empty object."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return {}
    try:
        inner = json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return value
    return inner if isinstance(inner, dict | list) else value


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def prompt_hash(prompt: Text) -> str:
    """The default `prompt_id`: 16 hex digits of SHA-256 of the text, or of the messages as sorted JSON."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return _hash(text)


@lru_cache(maxsize=64)  # a prompt's responses come one after the other
def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def conversation(prompt: Any, location: str) -> Text:
    """Convert a prompt to the form that samples have: text, or normalized messages.

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
    """Normalize messages that follow a prompt. Raises `Refused` unless the last one is the assistant's."""
    messages = normalized(turns, location)
    if messages[-1]["role"] == "assistant":
        return messages
    raise Refused(
        f"{location}: expected a list of messages with 'role' and 'content' (or 'tool_calls'), the last one "
        f"the assistant's, got {turns!r:.80}"
    )


@dataclass(frozen=True)
class Prompt:
    """A prompt for the policy. `id` makes the group; `columns` hold what a reward may read (`answer`, …).

    Tool declarations in `columns` ("tools") become part of messages, and of their identity.
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
