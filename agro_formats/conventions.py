"""Conventions for the attributes of model calls.

OpenTelemetry's have messages in parts, and the forms before them; OpenInference's, as Phoenix exports them,
are flat, nested, or columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, unpacked
from agro.logs.fields import call, listed, settings
from agro.logs.model_calls import Message, responses, scored, turn, unflatten
from agro.logs.protocol import Context, Item, Row, SkipRecord
from agro.types.conversation import normalized_message

Scores = Mapping[str, list[Any]]
OPERATIONS = ("chat", "text_completion", "generate_content")
_GENAI_INPUT, _GENAI_OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
_SYSTEM, _TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
_SAMPLING = ("temperature", "top_p", "top_k", "seed")
_OLD = ("gen_ai.prompt.", "gen_ai.completion.")


def is_genai_call(attributes: Mapping[str, Any]) -> bool:
    """Whether a span is of a model's call; one of an agent repeats the messages of its calls."""
    operation = attributes.get("gen_ai.operation.name")
    return operation in OPERATIONS or (operation is None and has_genai_messages(attributes))


def has_genai_messages(attributes: Mapping[str, Any]) -> bool:
    return _GENAI_OUTPUT in attributes or any(name.startswith(_OLD) for name in attributes)


def read_genai(attributes: Row, scores: Scores, context: Context) -> list[Item]:
    """The responses of a call. `scores`: of its evaluations, by name."""
    if not has_genai_messages(attributes):
        raise Refused(
            f"{_GENAI_OUTPUT}: missing; the program doesn't record the content of calls unless it is told to "
            "(OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT)"
        )
    if _GENAI_OUTPUT in attributes:
        prompt = []
        system = unpacked(attributes.get(_SYSTEM))
        if isinstance(system, str):
            prompt.append({"role": "system", "content": system})
        elif system is not None:
            prompt += _messages({"role": "system", "parts": system}, _SYSTEM)
        for i, message in enumerate(objects(unpacked(attributes.get(_GENAI_INPUT)), _GENAI_INPUT)):
            prompt += _messages(message, f"{_GENAI_INPUT}[{i}]")
        replies = []
        for i, message in enumerate(objects(unpacked(attributes[_GENAI_OUTPUT]), _GENAI_OUTPUT)):
            parsed = _messages(message, f"{_GENAI_OUTPUT}[{i}]")
            if len(parsed) != 1:
                raise Refused(f"{_GENAI_OUTPUT}[{i}]: expected one message, got {len(parsed)}")
            replies.append(parsed[0] | {"finish_reason": message.get("finish_reason")})
    else:
        prompt, replies = _old(attributes)
    request = {name: attributes.get(f"gen_ai.request.{name}") for name in _SAMPLING}
    extras = omit(attributes, (_GENAI_INPUT, _GENAI_OUTPUT, _SYSTEM, _TOOLS))
    meta = {name: value for name, value in extras.items() if not name.startswith(_OLD)}
    model = attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model")
    common = {"model": model, "sampling": settings(request, _SAMPLING), "tools": attributes.get(_TOOLS)}
    return _items(prompt, replies, scores, context, meta, common)


def _items(
    prompt: list[Message], replies: list[Message], scores: Scores, context: Context, meta: Row, common: Row
) -> list[Item]:
    common = {name: value for name, value in common.items() if name != "tools" or value is not None}
    meta = {**meta, **({"scores": dict(scores)} if scores else {})}
    return responses(prompt, replies, "output", {**common, "reward": scored(scores, context), "meta": meta})


def _messages(message: Mapping[str, Any], name: str) -> list[Message]:
    """A message of parts, after a message of a tool for each of a tool's responses."""
    parts = objects(message.get("parts"), f"{name}.parts")
    return normalized_message({"role": message.get("role"), "content": parts}, name)


def _old(attributes: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    """Messages one attribute a field, from 0 on."""
    named = {name: value for name, value in attributes.items() if name.startswith(_OLD)}
    tree = entry(unflatten(named).get("gen_ai"), "gen_ai")
    prompt, replies = (
        [_old_message(m, f"{name}{i}") for i, m in enumerate(listed(tree.get(name.split(".")[1]), name))]
        for name in _OLD
    )
    return prompt, [{**message, "role": message.get("role") or "assistant"} for message in replies]


def _old_message(message: Mapping[str, Any], name: str) -> Message:
    calls = [
        call(each.get("name"), each.get("arguments"), each.get("id"))
        for each in listed(message.get("tool_calls"), f"{name}.tool_calls")
    ]
    fields = {"role": "assistant", **message, "content": unpacked(message.get("content"))}
    return turn(fields | ({"tool_calls": calls} if calls else {}), name)


_OPENINFERENCE_INPUT, _OPENINFERENCE_OUTPUT = "llm.input_messages", "llm.output_messages"
_KINDS = {"annotations": "annotation", "evaluations": "evaluation"}


def is_openinference_call(attributes: Mapping[str, Any]) -> bool:
    """Whether flat attributes are of a model's call."""
    return any(name.startswith((_OPENINFERENCE_INPUT, _OPENINFERENCE_OUTPUT)) for name in attributes)


def _flat(row: Row) -> dict[str, Any]:
    """The attributes of a span, and what else is known of it, with dots in the names."""
    attributes = unpacked(row.get("attributes"))
    columns = {name.removeprefix("attributes."): v for name, v in row.items() if name != "attributes"}
    flat = {**columns, **(attributes if isinstance(attributes, dict) else {})}
    llm = flat.pop("llm", None)
    if isinstance(llm, dict):
        flat |= {f"llm.{name}": value for name, value in llm.items()}
    return {name: value for name, value in flat.items() if value is not None}


def read(row: Row, context: Context) -> list[Item]:
    flat = _flat(row)
    if not is_openinference_call(flat):  # of a chain, a tool, a retriever
        raise SkipRecord("spans that aren't of a model's call")
    return read_openinference(flat, {}, context)


def fits(row: Row) -> bool:
    return is_openinference_call(_flat(row)) or "attributes.openinference.span.kind" in row


def read_openinference(attributes: Row, scores: Scores, context: Context) -> list[Item]:
    """The responses of a call. `scores`: of evaluations that aren't among the attributes, by name."""
    tree = unflatten({name: unpacked(value) for name, value in attributes.items()})
    llm = entry(tree.get("llm"), "llm")
    prompt, replies = (
        [_message(m, f"{name}.{i}") for i, m in enumerate(objects(llm.get(name.removeprefix("llm.")), name))]
        for name in (_OPENINFERENCE_INPUT, _OPENINFERENCE_OUTPUT)
    )
    parameters = llm.get("invocation_parameters")
    prefixes = (_OPENINFERENCE_INPUT, _OPENINFERENCE_OUTPUT, *_KINDS)
    meta = {name: value for name, value in attributes.items() if not name.startswith(prefixes)}
    tools = [entry(each.get("tool", each), "llm.tools") for each in listed(llm.get("tools"), "llm.tools")]
    common = {
        "model": llm.get("model_name"),
        "sampling": settings(parameters if isinstance(parameters, dict) else {}, _SAMPLING),
        "tools": [unpacked(tool.get("json_schema")) for tool in tools] or None,
    }
    return _items(prompt, replies, _scores(tree) | dict(scores), context, meta, common)


def _message(value: Mapping[str, Any], name: str) -> Message:
    message = entry(value.get("message", value), name)
    parts = [entry(part.get("message_content", part), name) for part in listed(message.get("contents"), name)]
    fields: Message = {key: message.get(key) for key in ("role", "content", "name", "tool_call_id")}
    if fields["content"] is None:
        fields["content"] = parts
    for each in listed(message.get("tool_calls"), name):
        called = entry(each.get("tool_call", each), name)
        function = entry(called.get("function"), f"{name}.tool_calls.function")
        fields.setdefault("tool_calls", []).append(
            call(function.get("name"), function.get("arguments"), called.get("id"))
        )
    return turn(fields, name)


def _scores(tree: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Scores of annotations and evaluations by name; the label of one without."""
    scores: dict[str, list[Any]] = {}
    for plural, singular in _KINDS.items():
        for item in listed(tree.get(plural), plural):
            judged = entry(item.get(singular, item), plural)
            if judged.get("name") is None:
                raise Refused(f"{plural}: expected {singular}.name, got {item!r:.80}")
            scores.setdefault(str(judged["name"]), []).append(judged.get("score", judged.get("label")))
    return scores
