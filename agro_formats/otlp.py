"""Read OTLP as JSON, OpenTelemetry's traces and logs with model calls; and Phoenix's exports of spans.

The attributes of calls follow OpenTelemetry's GenAI conventions, which have messages in parts, or the forms
before them; or OpenInference's, flat, nested, or as columns. Fields are those of opentelemetry-proto's JSON
form, with 64-bit integers as text. Spans other than model calls are left out. Evaluations (the event
gen_ai.evaluation.result) belong to the span or response with their id, wherever in the file they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, unpacked
from agro.io.jsonlines import RECORD_ERRORS, Line, content, reason_of
from agro.io.record_files import read_records
from agro.logs.exchanges import Message, turn
from agro.logs.protocol import Context, Item, Row, SkipRecord, line_of
from agro.logs.records import SAMPLER, settings, system
from agro.logs.values import integer, listed
from agro.types.conversation import normalized_message
from agro_formats.traces import responses, scored

Scores = Mapping[str, list[Any]]
OPERATIONS = ("chat", "text_completion", "generate_content")
_GENAI_INPUT, _GENAI_OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
_SYSTEM, _TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
_OLD, _FUNCTIONS = ("gen_ai.prompt.", "gen_ai.completion."), "llm.request.functions."  # OpenLLMetry's


def is_genai_call(attributes: Mapping[str, Any]) -> bool:
    """Whether a span is a model call; an agent's span repeats the messages of its calls."""
    operation = attributes.get("gen_ai.operation.name")
    return operation in OPERATIONS or (operation is None and has_genai_messages(attributes))


def has_genai_messages(attributes: Mapping[str, Any]) -> bool:
    return _GENAI_OUTPUT in attributes or any(name.startswith(_OLD) for name in attributes)


def read_genai(attributes: Row, scores: Scores, context: Context) -> list[Item]:
    """The responses of a call. `scores`: the values of its evaluations, by name."""
    if not has_genai_messages(attributes):
        raise Refused(
            f"{_GENAI_OUTPUT}: missing; programs record the content of calls only with the variable "
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
        )
    if _GENAI_OUTPUT in attributes:
        prompt = []
        instructions = unpacked(attributes.get(_SYSTEM))
        if isinstance(instructions, str):
            prompt.append(system(instructions))
        elif instructions is not None:
            prompt += _genai_message({"role": "system", "parts": instructions}, _SYSTEM)
        for i, message in enumerate(objects(unpacked(attributes.get(_GENAI_INPUT)), _GENAI_INPUT)):
            prompt += _genai_message(message, f"{_GENAI_INPUT}[{i}]")
        replies = []
        for i, message in enumerate(objects(unpacked(attributes[_GENAI_OUTPUT]), _GENAI_OUTPUT)):
            parsed = _genai_message(message, f"{_GENAI_OUTPUT}[{i}]")
            if len(parsed) != 1:
                raise Refused(f"{_GENAI_OUTPUT}[{i}]: expected one message, got {len(parsed)}")
            replies.append(parsed[0] | {"finish_reason": message.get("finish_reason")})
    else:
        prompt, replies = _old(attributes)
    request = {name: attributes.get(f"gen_ai.request.{name}") for name in SAMPLER}
    extras = omit(attributes, (_GENAI_INPUT, _GENAI_OUTPUT, _SYSTEM, _TOOLS))
    meta = {name: value for name, value in extras.items() if not name.startswith((*_OLD, _FUNCTIONS))}
    model = attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model")
    named = {key: unpacked(x) for key, x in attributes.items() if key.startswith(_FUNCTIONS)}
    functions = unflatten({key.removeprefix(_FUNCTIONS): x for key, x in named.items()})
    tools = attributes.get(_TOOLS) or list(functions.values())
    common = {"model": model, "sampling": settings(request, SAMPLER), "tools": tools}
    return _items(prompt, replies, scores, context, meta, common)


def _items(
    prompt: list[Message], replies: list[Message], scores: Scores, context: Context, meta: Row, common: Row
) -> list[Item]:
    meta = {**meta, **({"scores": dict(scores)} if scores else {})}
    return responses(prompt, replies, "output", {**common, "reward": scored(scores, context), "meta": meta})


def _genai_message(message: Mapping[str, Any], name: str) -> list[Message]:
    """A message with parts, after a tool message for each tool response in it."""
    parts = objects(message.get("parts"), f"{name}.parts")
    turn = {"role": message.get("role"), "name": message.get("name"), "content": parts}
    return normalized_message(turn, name)


def _old(attributes: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    """Messages with one attribute per field, numbered from 0."""
    named = {name: value for name, value in attributes.items() if name.startswith(_OLD)}
    tree = entry(unflatten(named).get("gen_ai"), "gen_ai")
    sides = list[list[Message]]()
    for name in _OLD:
        messages = listed(tree.get(name.split(".")[1]), name)
        messages = [{"role": "assistant", **m, "content": unpacked(m.get("content"))} for m in messages]
        sides.append([turn(message, f"{name}{i}") for i, message in enumerate(messages)])
    return sides[0], sides[1]


_OPENINFERENCE_INPUT, _OPENINFERENCE_OUTPUT = "llm.input_messages", "llm.output_messages"
_KINDS = {"annotations": "annotation", "evaluations": "evaluation"}


def is_openinference_call(attributes: Mapping[str, Any]) -> bool:
    """Whether flat attributes are those of a model call."""
    return any(name.startswith((_OPENINFERENCE_INPUT, _OPENINFERENCE_OUTPUT)) for name in attributes)


def _flat(row: Row) -> dict[str, Any]:
    """The attributes and other columns of a span, with dots in their names."""
    attributes = unpacked(row.get("attributes"))
    columns = {name.removeprefix("attributes."): v for name, v in row.items() if name != "attributes"}
    flat = {**columns, **(attributes if isinstance(attributes, dict) else {})}
    llm = flat.pop("llm", None)
    if isinstance(llm, dict):
        flat |= {f"llm.{name}": value for name, value in llm.items()}
    return {name: value for name, value in flat.items() if value is not None}


def read_openinference_span(row: Row, context: Context) -> list[Item]:
    flat = _flat(row)
    if not is_openinference_call(flat):  # a chain, a tool, a retriever
        raise SkipRecord("spans that aren't of a model's call")
    return read_openinference(flat, {}, context)


def fits_openinference(row: Row) -> bool:
    return is_openinference_call(_flat(row)) or "attributes.openinference.span.kind" in row


def read_openinference(attributes: Row, scores: Scores, context: Context) -> list[Item]:
    """The responses of a call. `scores`: values of evaluations outside the attributes, by name."""
    tree = unflatten({name: unpacked(value) for name, value in attributes.items()})
    llm = entry(tree.get("llm"), "llm")
    prompt, replies = (
        [
            _openinference_message(m, f"{name}.{i}")
            for i, m in enumerate(objects(llm.get(name.removeprefix("llm.")), name))
        ]
        for name in (_OPENINFERENCE_INPUT, _OPENINFERENCE_OUTPUT)
    )
    parameters = llm.get("invocation_parameters")
    prefixes = (_OPENINFERENCE_INPUT, _OPENINFERENCE_OUTPUT, *_KINDS)
    meta = {name: value for name, value in attributes.items() if not name.startswith(prefixes)}
    tools = [entry(each.get("tool", each), "llm.tools") for each in listed(llm.get("tools"), "llm.tools")]
    common = {
        "model": llm.get("model_name"),
        "sampling": settings(parameters if isinstance(parameters, dict) else {}, SAMPLER),
        "tools": [unpacked(tool.get("json_schema")) for tool in tools] or None,
    }
    return _items(prompt, replies, _annotated(tree) | dict(scores), context, meta, common)


def _openinference_message(value: Mapping[str, Any], name: str) -> Message:
    message = entry(value.get("message", value), name)
    parts = [entry(part.get("message_content", part), name) for part in listed(message.get("contents"), name)]
    fields: Message = {key: message.get(key) for key in ("role", "content", "name", "tool_call_id")}
    if fields["content"] is None:
        fields["content"] = parts
    for each in listed(message.get("tool_calls"), name):
        called = entry(each.get("tool_call", each), name)
        fields.setdefault("tool_calls", []).append(called)
    return turn(fields, name)


def _annotated(tree: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The scores of annotations and evaluations by name, or the label of one without a score."""
    scores: dict[str, list[Any]] = {}
    for plural, singular in _KINDS.items():
        for item in listed(tree.get(plural), plural):
            judged = entry(item.get(singular, item), plural)
            if judged.get("name") is None:
                raise Refused(f"{plural}: expected {singular}.name, got {item!r:.80}")
            scores.setdefault(str(judged["name"]), []).append(judged.get("score", judged.get("label")))
    return scores


_BEGINS = re.compile(rb'^(\xef\xbb\xbf)?\s*\[?\s*\{\s*"resource(Spans|Logs)"')
_EVALUATION, _DETAILS = "gen_ai.evaluation.result", "gen_ai.client.inference.operation.details"
_SCORE = "gen_ai.evaluation.score."
_SPANS = ("resourceSpans", "scopeSpans", "spans")
_LOGS = ("resourceLogs", "scopeLogs", "logRecords")


@dataclass
class _EventIndex:
    """The events of a file that concern its spans."""

    scores: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """Values by span or response id, and by evaluation name."""
    detailed: set[str] = field(default_factory=set)  # ids of spans whose content is in a log record

    def add(self, row: Row) -> None:
        """Add the events of a line's spans and log records, except those that `_call` refuses."""
        for record, is_log in _spans_and_logs(row):
            with suppress(*RECORD_ERRORS):
                for name, attributes in _events(record, is_log):
                    if name == _EVALUATION:
                        id = str(attributes.get("gen_ai.response.id") or _id(record))
                        title = str(attributes.get("gen_ai.evaluation.name"))
                        value = attributes.get(f"{_SCORE}value", attributes.get(f"{_SCORE}label"))
                        self.scores.setdefault(id, {}).setdefault(title, []).append(value)
                    elif name == _DETAILS and is_log:
                        self.detailed.add(_id(record))


def is_export(path: Path) -> bool:
    if not path.is_file() or ".json" not in "".join(path.suffixes):
        return False
    try:
        with content(path) as (file, is_parquet):
            return not is_parquet and bool(_BEGINS.match(file.read(200)))
    except Refused:
        return False


def records(path: Path) -> Iterator[Line]:
    """One record per span: attributes and scores. Reads the file twice, since scores may come later."""
    events, number = _EventIndex(), 0
    for line in read_records(path):
        with suppress(*RECORD_ERRORS):  # the second reading reports them
            events.add(line.value)
    for line in read_records(path):
        for each in _lines(line, events):
            number += 1
            yield each._replace(number=number)


def _lines(line: Line, events: _EventIndex) -> Iterator[Line]:
    """The calls of a line. One that can't be read is refused alone."""
    try:
        for record, is_log in () if line.error else _spans_and_logs(line.value):
            location = f"{line.where}, span {_id(record)}" if _id(record) else line.where
            each = line_of(location, 0, partial(_call, record, is_log, events))
            if each.value or each.error:
                yield each
    except RECORD_ERRORS as error:
        line = Line(line.where, 0, {}, reason_of(error))
    if line.error:
        yield line


def read(row: Row, context: Context) -> list[Item]:
    if "attributes" in row:
        return _responses(row, context)
    events = _EventIndex()
    events.add(row)
    calls = [_call(record, is_log, events) for record, is_log in _spans_and_logs(row)]
    return [item for call in calls if call.get("is_call") for item in _responses(call, context)]


def _responses(row: Row, context: Context) -> list[Item]:
    attributes, scores = row["attributes"], row["scores"]
    if not row["is_call"]:
        raise SkipRecord("spans that aren't of a model's call")
    if is_openinference_call(attributes):
        return read_openinference(attributes, scores, context)
    return read_genai(attributes, scores, context)


def _call(record: Row, is_log: bool, events: _EventIndex) -> dict[str, Any]:
    """The call in a span or log record; empty if there is none."""
    details = next((inner for name, inner in _events(record, is_log) if name == _DETAILS), None)
    if is_log:
        attributes, is_call = details or {}, True
    else:
        attributes = _attributes(record.get("attributes"), "attributes") | (details or {})
        is_call = is_openinference_call(attributes) or is_genai_call(attributes)
    # If a log record has the span's content, the record is the call.
    is_elsewhere = _id(record) in events.detailed and not has_genai_messages(attributes)
    if details is None and (is_log or is_elsewhere):
        return {}
    span_scores = events.scores.get(_id(record), {})
    response_scores = events.scores.get(str(attributes.get("gen_ai.response.id")), {})
    scores = {name: list(values) for name, values in (span_scores | response_scores).items()}
    ids = {"trace_id": record.get("traceId"), "span_id": record.get("spanId"), "span": record.get("name")}
    attributes |= {name: value for name, value in ids.items() if value}
    return {"span": _id(record), "attributes": attributes, "scores": scores, "is_call": is_call}


def _events(record: Row, is_log: bool) -> list[tuple[str, dict[str, Any]]]:
    """The names and attributes of a span's events; a log record is one event."""
    if is_log:
        attributes = _attributes(record.get("attributes"), "logRecords.attributes")
        return [(str(record.get("eventName") or attributes.get("event.name")), attributes)]
    events = listed(record.get("events"), "events")
    return [
        (str(event.get("name")), _attributes(event.get("attributes"), "events.attributes"))
        for event in events
    ]


def _id(record: Row) -> str:
    return str(record.get("spanId") or "")


def _spans_and_logs(row: Row) -> Iterator[tuple[dict[str, Any], bool]]:
    """The spans and log records of a line, each with whether it is a log record."""
    for resources, scopes, names in (_SPANS, _LOGS):
        for resource in listed(row.get(resources), resources):
            for scope in listed(resource.get(scopes), scopes):
                for record in listed(scope.get(names), names):
                    yield record, names == "logRecords"


def _attributes(value: Any, name: str) -> dict[str, Any]:
    return {
        str(pair.get("key")): _value(entry(pair.get("value"), name), name) for pair in listed(value, name)
    }


def _value(value: Row, name: str) -> Any:
    """The value in an object whose key is its type. Raises `Refused` for unknown types."""
    for kind, inner in value.items():
        match kind:
            case "stringValue" | "doubleValue" | "boolValue" | "bytesValue":
                return inner
            case "intValue":
                return integer(inner, name)
            case "arrayValue":
                return [_value(item, name) for item in listed(entry(inner, name).get("values"), name)]
            case "kvlistValue":
                return _attributes(entry(inner, name).get("values"), name)
        raise Refused(f"{name}: expected a value such as stringValue, got {kind}")
    return None


def unflatten(value: Any) -> Any:
    """Nest attributes with dots in their names as objects, and as lists if the parts are numbers."""
    if isinstance(value, list):
        return [unflatten(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    tree: dict[str, Any] = {}
    for name, inner in value.items():
        *path, key = name.split(".")
        node = tree
        for part in path:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[key] = unflatten(inner)
    return {name: _numbered(inner) for name, inner in tree.items()}


def _numbered(value: Any) -> Any:
    """An object whose keys are numbers as a list, in their order."""
    if not isinstance(value, dict):
        return value
    inner = {name: _numbered(item) for name, item in value.items()}
    if inner and all(name.isdigit() for name in inner):
        return [inner[name] for name in sorted(inner, key=int)]
    return inner
