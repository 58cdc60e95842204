"""Read logged model calls: prompts, replies and how these ended, in the forms of the providers' APIs; and
chat completions, next to their requests, of OpenAI and of compatible servers (vLLM, SGLang, llama.cpp).

The forms are chat completions, Anthropic's messages, items of OpenAI's Responses (openai-python 3.3.1:
types/responses/response_input_item.py, response_output_item.py), and messages as LangChain writes them
(langchain-core 1.8.2: langchain_core/tracers/core.py, load/serializable.py:228).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, is_unknown, objects, omit, text, unpacked
from agro.logs.protocol import Context, Item, Row
from agro.logs.records import call, reply, settings, token_fields, user
from agro.logs.values import listed, wrong
from agro.rollout.prompts import openai_prompt
from agro.types import end_in
from agro.types.conversation import declarations, normalized_message, text_of, with_tools

Message = dict[str, Any]

_MORE = ("reasoning_content", "tool_calls", "function_call", "refusal", "audio")  # `additional_kwargs` too
_LANGCHAIN = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
_CALLS = {  # the key of the arguments by the type of a tool call's item
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "web_search_call": "action",
}
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_PROMPT_KEYS = ("messages", "input", "prompt", "prompts")  # the prompt of a request
_REQUEST_KEYS = (*_PROMPT_KEYS, "role", "content", "kwargs", "data")
_MESSAGE_KEYS = ("role", "content", "tool_calls", "kwargs")
_RESPONSE_KEYS = ("choices", "generations", "output", "messages", "message", *_MESSAGE_KEYS)

_REASONS = (  # keys that tell how a response ended
    *("finish", "finish_reason", "finishReason", "finish_reasons", "finish_details", "native_finish_reason"),
    *("stop_reason", "stopReason", "stop_type", "done_reason", "completion_reason", "completionReason"),
    *("gen_ai.response.finish_reasons", "llm.finish_reason"),
)
_FLAGS = ("truncated", "is_truncated", "isTruncated", "was_truncated")
_TRUE = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_INNER = ("response_metadata", "generation_info", "message", "completion")
NAMES = frozenset((*_REASONS, *_FLAGS, *_INNER, "incomplete_details"))
FINISH = {"finished": "stop", "cut": "length"}  # `meta["finish"]` by the end; missing if unknown


def reported(value: Any) -> Any:
    """The end that an object (a choice, a message, a run, …) reports for its response; None without a report.

    If several reports differ, one of a cut wins.
    """
    if not isinstance(value, Mapping):
        return None
    ends = [unpacked(value[name]) for name in _REASONS if not is_unknown(value.get(name))]
    for name in _FLAGS:
        flag = value.get(name)
        flag = _TRUE.get(flag.strip().casefold(), flag) if isinstance(flag, str) else flag
        if not is_unknown(flag):
            ends.append({True: "truncated", False: "complete"}.get(flag, flag) if flag in (0, 1) else flag)
    details = value.get("incomplete_details")
    if isinstance(details, Mapping):
        ends.append(details.get("reason") or "incomplete")
    is_of_responses = not value.keys().isdisjoint(("output", "incomplete_details"))  # OpenAI's
    if is_of_responses and value.get("status") in ("incomplete", "completed"):
        ends.append(value["status"])
    ends += [inner for name in _INNER if (inner := reported(unpacked(value.get(name)))) is not None]
    order = ("cut", "finished", None, "unknown")
    return min(ends, key=lambda each: order.index(end_in(each)), default=None)


def settle(meta: dict[str, Any]) -> Any:
    """Set `meta["finish"]` to "stop" (finished) or "length" (cut), or delete it (unknown), as `meta` reports.

    Another word there moves to `finish_reason`. Returns a reported end that agro doesn't know, else None.
    """
    if NAMES.isdisjoint(meta):
        return None
    report = reported(meta)
    end = end_in(report)
    finish, prior = FINISH.get(end or ""), meta.pop("finish", None)
    if finish is not None:
        meta["finish"] = finish
    if prior not in (None, finish):
        meta.setdefault("finish_reason", prior)
    return report if end is None else None


def turn(value: Any, name: str) -> Message:
    """A message in the form of OpenAI's API, with its content as text; other known keys stay."""
    message = {"content": "", **{key: x for key, x in entry(value, name).items() if x is not None}}
    return normalized_message(message, name)[-1]


def blocks(content: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a message's content; text is one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else objects(content, name)


def _opened(value: Any, forms: tuple[str, ...]) -> Any:
    """The value of a JSON text with one of these keys; other texts and values unchanged."""
    inner = head = unpacked(value)
    while isinstance(head, list) and head:
        head = head[0]
    is_form = isinstance(head, dict) and not head.keys().isdisjoint(forms)
    return inner if is_form else value


def _declares(message: Any) -> bool:
    """Whether it declares a tool, as Langfuse's callback for LangChain adds to messages."""
    content = message.get("content") if isinstance(message, dict) and message.get("role") == "tool" else None
    is_declaration = isinstance(content, dict) and (content.get("function") or content.get("input_schema"))
    return bool(is_declaration and not message.get("tool_call_id"))


def prompt(value: Any, name: str) -> str | list[Message]:
    """The prompt of a call, a text or messages, alone or in a request with its settings."""
    value = _opened(value, _REQUEST_KEYS)
    if isinstance(value, list):
        parsed = messages([message for message in value if not _declares(message)], name)
        return with_tools(parsed, [message["content"] for message in value if _declares(message)])
    if not isinstance(value, dict):
        return text(value, name)
    key = next((key for key in _PROMPT_KEYS if value.get(key) is not None), None)
    if key is None:
        raise Refused(f"{name}: expected text or messages, got an object of {', '.join(value) or 'nothing'}")
    request, location = unpacked(value[key]), f"{name}.{key}"
    if key == "prompts" and isinstance(request, list):
        request = _only(request, location)
    instructions, tools = value.get("system", value.get("instructions")), value.get("tools")
    tools = tools or value.get("functions")
    if instructions is None and isinstance(request, str) and not declarations(tools):
        return request
    if not isinstance(request, list):
        request = [user(text(request, location))]
    if instructions is not None:
        request = [{"role": "system", "content": instructions}, *request]
    return with_tools(messages(request, location), tools)


def replies(value: Any, name: str) -> list[Message]:
    """The responses of a call; one without a role is a text. `finish_reason` is the reported end of each."""
    value = _opened(value, _RESPONSE_KEYS)
    if isinstance(value, str):
        return [{"content": value}]
    output = {"messages": value} if isinstance(value, list) else entry(value, name)
    inner = name if isinstance(value, list) else f"{name}.messages"
    if "choices" in output:
        return _choices(output["choices"], f"{name}.choices")
    if "generations" in output:
        lists = output["generations"]
        if isinstance(lists, list) and lists and isinstance(lists[0], list):
            lists = _only(lists, f"{name}.generations")
        return _choices(lists, f"{name}.generations")
    if isinstance(output.get("output"), list):
        return [_one_message(messages(output["output"], f"{name}.output"), name, output)]
    if isinstance(values := output.get("messages"), list):
        if values and all(isinstance(v, dict) and "message" in v for v in values):
            return _choices(values, inner)
        return [_one_message(messages(values, inner), inner, values[-1] if values else None)]
    message = output.get("message", output)
    if isinstance(message, dict) and not message.keys().isdisjoint(_MESSAGE_KEYS):
        defaults = {"role": "assistant"} if message.keys().isdisjoint(("role", "kwargs", "data")) else {}
        return [_one_message(messages([{**defaults, **message}], name), name, output)]
    raise Refused(
        f"{name}: expected text, a message, choices or generations, got {', '.join(output) or 'nothing'}"
    )


def _one_message(parsed: list[Message], name: str, source: Any) -> Message:
    """The only message, with the end that `source` reports."""
    if len(parsed) != 1:
        raise Refused(f"{name}: expected one message, got {len(parsed)}")
    inner = source if isinstance(source, dict) else {}
    finish = reported(inner)
    for key in ("kwargs", "data"):  # LangChain's
        finish = reported(inner.get(key)) if finish is None else finish
    return parsed[0] if finish is None else parsed[0] | {"finish_reason": finish}


def _choices(choices: Any, name: str) -> list[Message]:
    """The messages or texts of a completion's choices, or of LangChain's generations."""
    parsed = list[Message]()
    for choice in objects(choices, name):
        message = choice.get("message")
        if message is None:
            content = [{"content": text(choice.get("text"), f"{name}.text")}]
        else:
            content = messages([message], f"{name}.message")
        reports_end = message is None or reported(choice) is not None
        parsed.append(_one_message(content, name, choice if reports_end else message))
    return parsed


def _only(items: list[Any], name: str) -> Any:
    if len(items) != 1:
        raise Refused(f"{name}: expected those of one call, got {len(items)}")
    return items[0]


def messages(values: Any, name: str) -> list[Message]:
    """Convert messages in any of the forms to those of OpenAI's chat completions."""
    if isinstance(values, list) and values and isinstance(values[0], list):
        values = _only(values, name)
    parsed = list[Message]()
    for i, value in enumerate(objects(values, name)):
        location, kind = f"{name}[{i}]", value.get("type")
        is_message = "role" in value
        is_item = kind == ("message" if is_message else "reasoning") and "stop_reason" not in value
        if kind in (*_CALLS, *_OUTPUTS) or is_item:  # Anthropic's messages have a stop_reason
            add_item(parsed, value, location)
        elif is_message:
            known = {k: x for k, x in value.items() if k not in NAMES}
            parsed += normalized_message(_with_more(known), location)
        else:
            parsed.append(_langchain(value, location))
    return parsed


def add_item(parsed: list[Message], item: Mapping[str, Any], name: str) -> None:
    """Add an item of OpenAI's Responses. Consecutive reasoning, text and calls are one message.

    Summaries of reasoning are left out, since the model didn't write them.
    """
    kind = item["type"]
    if kind in _OUTPUTS:
        output = item.get("output")
        if isinstance(output, dict):  # older versions
            output = output.get("content")
        content = output if isinstance(output, str) else text_of(output, f"{name}.output")
        parsed.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        return
    if kind == "message" and item["role"] != "assistant":
        role = "system" if item["role"] == "developer" else item["role"]
        parsed.append({"role": role, "content": text_of(item.get("content"), f"{name}.content")})
        return
    begins = kind != "message" and kind not in _CALLS  # reasoning precedes text and calls
    message = parsed[-1] if parsed and parsed[-1]["role"] == "assistant" else None
    if message is None or (begins and (message["content"] or message.get("tool_calls"))):
        message = {"role": "assistant", "content": ""}
        parsed.append(message)
    if kind == "message":
        message["content"] += text_of(item.get("content"), f"{name}.content")
    elif kind == "reasoning":
        parts = listed(item.get("content"), f"{name}.content")
        if thought := "".join(text(part.get("text"), f"{name}.content.text") for part in parts):
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
    else:
        tool = item.get("name") or kind.removesuffix("_call")
        converted = call(tool, item.get(_CALLS[kind]), item.get("call_id"))
        message.setdefault("tool_calls", []).append(converted)


def _langchain(value: Mapping[str, Any], name: str) -> Message:
    """Convert a LangChain message: a constructor with class and arguments, or an object with `type`."""
    fields, kind = value, value.get("type")
    if isinstance(value.get("kwargs"), dict):
        fields = value["kwargs"]
        path = value.get("id")
        class_name = str(path[-1]) if isinstance(path, list) and path else ""
        # The last part of the id names the type: AIMessageChunk is ai.
        kind = fields.get("type") or class_name.removesuffix("Chunk").removesuffix("Message").lower()
    elif isinstance(value.get("data"), dict):
        fields = value["data"]
    role = fields.get("role") or _LANGCHAIN.get(str(kind).lower())
    if role is None:
        raise wrong(name, "a message with role, or LangChain's of a known class", value)
    fields = _with_more(fields)
    converted: Message = {"role": role, "content": fields.get("content")}
    for key in ("tool_call_id", "name", *_MORE):
        if fields.get(key):
            converted[key] = fields[key]
    return turn(converted, name)


def _with_more(fields: Mapping[str, Any]) -> Message:
    """The fields of a message with LangChain's `additional_kwargs`, and calls that it couldn't read."""
    more = entry(fields.get("additional_kwargs"), "additional_kwargs")
    merged = {**fields, **{key: more[key] for key in _MORE if more.get(key) and not fields.get(key)}}
    if invalid := listed(fields.get("invalid_tool_calls"), "invalid_tool_calls"):
        merged["tool_calls"] = [*listed(fields.get("tool_calls"), "tool_calls"), *invalid]
    if merged.get("tool_calls") and not fields.get("function_call"):
        merged.pop("function_call", None)  # Gemini's repeats the last of its calls
    return merged


_EXCHANGE_COLUMNS = ("request", "messages", "input", "prompt", "response", "output", "completion")
_COMPLETION = ("id", "object", "created", "choices", "prompt_token_ids", "prompt_text", "model")


def is_completion(value: Any) -> bool:
    return isinstance(value, dict) and "choices" in value


def read_completion(row: Row, context: Context) -> list[Item]:
    """Read a completion, alone or next to its request: {request, response}, {messages, response} and such."""
    body: Any = row
    if "choices" not in row:
        columns = [row.get(name) for name in ("response", "output", "completion")]
        body = next(filter(is_completion, columns), None)
        if body is None:
            raise Refused("response: expected a chat completion (an object with choices), got none")
    request: Row = {name: row[name] for name in ("messages", "input", "prompt") if row.get(name) is not None}
    if isinstance(row.get("request"), dict):
        request = entry(row["request"].get("body"), "request.body") or row["request"]
    elif not request and isinstance(body.get("prompt_text"), str):
        request = {"prompt": body["prompt_text"]}
    if not request and not isinstance(row.get("request"), dict):
        raise Refused(
            "prompt: a chat completion doesn't hold its prompt; log it in another column: request, messages "
            "or prompt"
        )
    return list(choices(body, openai_prompt(request), request, omit(row, (*_EXCHANGE_COLUMNS, *_COMPLETION))))


def choices(body: Row, prompt: Any, request: Row, meta: dict[str, Any]) -> Iterator[Item]:
    """The responses of a completion; all choices answer one prompt."""
    answers = objects(body.get("choices"), "choices")
    meta = omit(body, (*_EXCHANGE_COLUMNS, *_COMPLETION)) | meta
    if not answers:
        raise Refused("choices: expected one or more, got none")
    for index, choice in enumerate(answers):
        location = f"choices[{index}]"
        message = choice.get("message")
        if message is None:  # a text completion
            message = {"content": text(choice.get("text"), f"{location}.text")}
        message = entry(message, f"{location}.message")
        # Log-probs go into `meta`: they belong to text pieces, or are those before temperature and top-p.
        aside = omit(choice, ("index", "message", "text", "finish_reason", "token_ids"))
        details = omit({"id": body.get("id"), "finish": choice.get("finish_reason"), **aside}, ())
        names = ("messages", f"{location}.message")
        record = reply(prompt, message, names, meta | details, sampling=settings(request))
        if body.get("model") is not None:
            record["model"] = text(body["model"], "model")
        prompt_ids, response_ids = body.get("prompt_token_ids"), choice.get("token_ids")
        if prompt_ids is not None and response_ids is not None:  # vLLM's, if they were requested
            for name, ids in (("prompt_token_ids", prompt_ids), (f"{location}.token_ids", response_ids)):
                if not isinstance(ids, list):
                    raise wrong(name, "a list of token ids", ids)
            record |= token_fields(prompt_ids, response_ids)
        yield Item.of(record, location)


def joined_key(*ids: Any) -> str:
    """A record's key in --join: its id, or the scored object's id and the name of the score."""
    return str(ids[0]) if len(ids) == 1 else json.dumps(list(map(str, ids)))
