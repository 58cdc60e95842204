"""The input and the output of a logged call of a model, in the forms of the providers' interfaces.

Chat completions, Anthropic's messages, items of OpenAI's Responses (openai-python 3.3.1:
types/responses/response_input_item.py, response_output_item.py), and messages as LangChain writes them
(langchain-core 1.8.2: langchain_core/tracers/core.py, load/serializable.py:228).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, text, unpacked
from agro.logs.fields import call, listed, plain
from agro.logs.model_calls import NAMES, Completion, Message, reported, turn
from agro.types.conversation import normalized_message, with_tools

_LANGCHAIN = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
_CALLS = {  # items of a tool's call: the names of its arguments
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "web_search_call": "action",
}
_PROMPT_KEYS = ("messages", "input", "prompt", "prompts")  # of what is asked, in a request
_REQUEST_KEYS = (*_PROMPT_KEYS, "role", "content", "kwargs", "data")
_MESSAGE_KEYS = ("role", "content", "tool_calls", "kwargs")
_RESPONSE_KEYS = ("choices", "generations", "output", "messages", "message", *_MESSAGE_KEYS)
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


def _opened(value: Any, forms: tuple[str, ...]) -> Any:
    """What is written as JSON in a text, where it has one of these keys; another text is what it is."""
    inner = head = unpacked(value)
    while isinstance(head, list) and head:
        head = head[0]
    is_form = isinstance(head, dict) and not head.keys().isdisjoint(forms)
    return inner if is_form else value


def prompt(value: Any, name: str) -> str | list[Message]:
    """What a call was asked: text, or messages, alone or in an object with the settings beside them."""
    value = _opened(value, _REQUEST_KEYS)
    if not isinstance(value, dict):
        return text(value, name) if not isinstance(value, list) else messages(value, name)
    for key in _PROMPT_KEYS:
        if value.get(key) is None:
            continue
        request = unpacked(value[key])
        location = f"{name}.{key}"
        if key == "prompts" and isinstance(request, list):
            request = _only(request, location)
        system = value.get("system", value.get("instructions"))
        if system is None and isinstance(request, str):
            return request
        asked = (
            request if isinstance(request, list) else [{"role": "user", "content": text(request, location)}]
        )
        opening = [] if system is None else [{"role": "system", "content": system}]
        return with_tools(
            messages([*opening, *asked], location), value.get("tools") or value.get("functions")
        )
    raise Refused(f"{name}: expected text or messages, got an object of {', '.join(value) or 'nothing'}")


def replies(value: Any, name: str) -> list[str | Message]:
    """What a call answered, one or several responses."""
    value = _opened(value, _RESPONSE_KEYS)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return _listed_replies(value, name)
    output = entry(value, name)
    if "choices" in output:
        return _choices(output["choices"], f"{name}.choices")
    if "generations" in output:
        lists = output["generations"]
        if isinstance(lists, list) and lists and isinstance(lists[0], list):
            lists = _only(lists, f"{name}.generations")
        return _choices(lists, f"{name}.generations")
    if isinstance(output.get("output"), list):
        return [_one_message(messages(output["output"], f"{name}.output"), name, output)]
    if isinstance(output.get("messages"), list):
        return _listed_replies(output["messages"], f"{name}.messages")
    message = output.get("message", output)
    if isinstance(message, dict) and not message.keys().isdisjoint(_MESSAGE_KEYS):
        defaults = {"role": "assistant"} if message.keys().isdisjoint(("role", "kwargs", "data")) else {}
        return [_one_message(messages([{**defaults, **message}], name), name, output)]
    raise Refused(
        f"{name}: expected text, a message, choices or generations, got {', '.join(output) or 'nothing'}"
    )


def _listed_replies(values: list[Any], name: str) -> list[str | Message]:
    if values and all(isinstance(v, dict) and "message" in v for v in values):
        return _choices(values, name)
    return [_one_message(messages(values, name), name, values[-1] if values else None)]


def _one_message(parsed: list[Message], name: str, source: Any) -> Message:
    """The only one, with what `source` says of its end."""
    if len(parsed) != 1:
        raise Refused(f"{name}: expected one message, got {len(parsed)}")
    inner = source if isinstance(source, dict) else {}
    finish = reported(inner)
    for key in ("kwargs", "data"):  # of LangChain
        finish = reported(inner.get(key)) if finish is None else finish
    return parsed[0] if finish is None else parsed[0] | {"finish_reason": finish}


def _choices(choices: Any, name: str) -> list[str | Message]:
    """Choices of a completion, or LangChain's generations; of text, or each with a message."""
    parsed = list[str | Message]()
    for choice in objects(choices, name):
        message = choice.get("message")
        if message is None:
            parsed.append(Completion.of(text(choice.get("text"), f"{name}.text"), reported(choice)))
        else:
            source = choice if reported(choice) is not None else message
            parsed.append(_one_message(messages([message], f"{name}.message"), name, source))
    return parsed


def _only(items: list[Any], name: str) -> Any:
    if len(items) != 1:
        raise Refused(f"{name}: expected those of one call, got {len(items)}")
    return items[0]


def messages(values: Any, name: str) -> list[Message]:
    """Messages as OpenAI's chat completions have them, of messages in any of the forms."""
    if isinstance(values, list) and values and isinstance(values[0], list):
        values = _only(values, name)
    parsed = list[Message]()
    for i, value in enumerate(objects(values, name)):
        location, kind = f"{name}[{i}]", value.get("type")
        is_message = "role" in value
        if kind in (*_CALLS, *_OUTPUTS) or (kind == ("message" if is_message else "reasoning")):
            add_item(parsed, value, location)
        elif is_message:
            parsed += normalized_message({k: x for k, x in value.items() if k not in NAMES}, location)
        else:
            parsed.append(_langchain(value, location))
    return parsed


def add_item(parsed: list[Message], item: Mapping[str, Any], name: str) -> None:
    """Add an item of OpenAI's Responses: reasoning, text and calls that follow each other are one message.

    Summaries of reasoning aren't what the model wrote, and are left out.
    """
    kind = item["type"]
    if kind in _OUTPUTS:
        output = item.get("output")
        if isinstance(output, dict):  # of older versions
            output = output.get("content")
        content = output if isinstance(output, str) else plain(output, f"{name}.output")
        parsed.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "message" and item["role"] != "assistant":
        role = "system" if item["role"] == "developer" else item["role"]
        parsed.append({"role": role, "content": plain(item.get("content"), f"{name}.content")})
    else:
        new = kind != "message" and kind not in _CALLS
        message = parsed[-1] if parsed and parsed[-1]["role"] == "assistant" else None
        if message is None or (new and (message["content"] or message.get("tool_calls"))):
            message = {"role": "assistant", "content": ""}
            parsed.append(message)
        if kind == "message":
            message["content"] += plain(item.get("content"), f"{name}.content")
        elif kind == "reasoning":
            parts = listed(item.get("content"), f"{name}.content")
            thought = "".join(text(part.get("text"), f"{name}.content.text") for part in parts)
            if thought:
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
        else:
            tool = item.get("name") or kind.removesuffix("_call")
            converted = call(tool, item.get(_CALLS[kind]), item.get("call_id"))
            message.setdefault("tool_calls", []).append(converted)


def _langchain(value: Mapping[str, Any], name: str) -> Message:
    """A message of LangChain: a constructor with its class and arguments, or an object with `type`."""
    fields, kind = value, value.get("type")
    if isinstance(value.get("kwargs"), dict):
        fields = value["kwargs"]
        path = value.get("id")
        last = str(path[-1]) if isinstance(path, list) and path else ""
        # The type that the last part of the id names: AIMessageChunk is ai.
        kind = fields.get("type") or last.removesuffix("Chunk").removesuffix("Message").lower()
    elif isinstance(value.get("data"), dict):
        fields = value["data"]
    role = fields.get("role") or _LANGCHAIN.get(str(kind).lower())
    if role is None:
        raise Refused(
            f"{name}: expected a message with role, or LangChain's of a known class, got {value!r:.80}"
        )
    converted: Message = {"role": role, "content": fields.get("content")}
    calls = listed(fields.get("tool_calls") or None, f"{name}.tool_calls")
    if calls:
        converted["tool_calls"] = [call(c.get("name"), c.get("args"), c.get("id")) for c in calls]
    if fields.get("tool_call_id") is not None:
        converted["tool_call_id"] = fields["tool_call_id"]
    return turn(converted, name)
