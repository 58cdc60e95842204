"""OTLP as JSON: traces and logs of OpenTelemetry, with calls of models.

Their attributes are of the GenAI conventions or of OpenInference (see `conventions`).
Fields as in opentelemetry-proto's JSON form: 64-bit integers are text. Spans that aren't of a model's call
are left out. Evaluations (the event gen_ai.evaluation.result) are those of their span's or response's id,
wherever in the file they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.io.json_values import entry
from agro.io.jsonlines import RECORD_ERRORS, Line, content, reason_of
from agro.io.record_files import read_records
from agro.logs.fields import integer, listed
from agro.logs.protocol import Context, Item, Row, SkipRecord, line_of
from agro_formats import conventions

_BEGINS = re.compile(rb'^(\xef\xbb\xbf)?\s*\[?\s*\{\s*"resource(Spans|Logs)"')
_EVALUATION, _DETAILS = "gen_ai.evaluation.result", "gen_ai.client.inference.operation.details"
_SCORE = "gen_ai.evaluation.score."
_SPANS = ("resourceSpans", "scopeSpans", "spans")
_LOGS = ("resourceLogs", "scopeLogs", "logRecords")


class _Event(NamedTuple):
    name: str
    attributes: dict[str, Any]
    span: str  # id


@dataclass
class _EventIndex:
    """What the events of a file say of its spans."""

    scores: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """Values by name of the evaluation, by the id of a span or of a response."""
    detailed: set[str] = field(default_factory=set)  # spans whose content is in an event

    def add(self, event: _Event) -> None:
        if event.name == _DETAILS:
            self.detailed.add(event.span)
        if event.name == _EVALUATION:
            attributes = event.attributes
            id = str(attributes.get("gen_ai.response.id") or event.span)
            name = str(attributes.get("gen_ai.evaluation.name"))
            value = attributes.get(f"{_SCORE}value", attributes.get(f"{_SCORE}label"))
            self.scores.setdefault(id, {}).setdefault(name, []).append(value)

    def scores_of(self, span: str, attributes: Mapping[str, Any]) -> dict[str, list[Any]]:
        span_scores = self.scores.get(span, {})
        response_scores = self.scores.get(str(attributes.get("gen_ai.response.id")), {})
        return {name: list(values) for name, values in (span_scores | response_scores).items()}


def is_export(path: Path) -> bool:
    if not path.is_file() or ".json" not in "".join(path.suffixes):
        return False
    try:
        with content(path) as (file, is_parquet):
            return not is_parquet and bool(_BEGINS.match(file.read(200)))
    except Refused:
        return False


def records(path: Path) -> Iterator[Line]:
    """A record a span: attributes and scores. The file is read twice, since scores may come later."""
    events, number = _EventIndex(), 0
    for line in read_records(path):
        with suppress(*RECORD_ERRORS):  # which the second reading reports
            for event in _events(line.value):
                events.add(event)
    for line in read_records(path):
        for call in _lines(line, events):
            number += 1
            yield call._replace(number=number)


def _lines(line: Line, events: _EventIndex) -> Iterator[Line]:
    """The calls of a line, and what of it can't be read."""
    try:
        for span, read in () if line.error else _calls(line.value, events):
            call = line_of(f"{line.where}, span {span}" if span else line.where, 0, read)
            if call.value or call.error:
                yield call
    except RECORD_ERRORS as error:
        line = Line(line.where, 0, {}, reason_of(error))
    if line.error:
        yield line


def read(row: Row, context: Context) -> list[Item]:
    if "attributes" in row:
        return _responses(row, context)
    events = _EventIndex()
    for event in _events(row):
        events.add(event)
    calls = [read() for _, read in _calls(row, events)]
    return [item for call in calls if call.get("is_call") for item in _responses(call, context)]


def _responses(row: Row, context: Context) -> list[Item]:
    attributes, scores = row["attributes"], row["scores"]
    if not row["is_call"]:
        raise SkipRecord("spans that aren't of a model's call")
    if conventions.is_openinference_call(attributes):
        return conventions.read_openinference(attributes, scores, context)
    return conventions.read_genai(attributes, scores, context)


def _calls(row: Row, events: _EventIndex) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The ids of spans, and what reads each: an empty record where there is none. One may be refused, the
    others aren't then."""
    for span in _inner(row, *_SPANS):
        yield _id(span), partial(_span_call, span, events)
    for log in _inner(row, *_LOGS):
        yield _id(log), partial(_log_call, log, events)


def _span_call(span: Row, events: _EventIndex) -> dict[str, Any]:
    attributes = _attributes(span.get("attributes"), "attributes")
    details = next((event for event in _span_events(span) if event.name == _DETAILS), None)
    if details is not None:
        attributes = {**attributes, **details.attributes}
    elif _id(span) in events.detailed and not conventions.has_genai_messages(attributes):
        return {}  # its content is in a log record, which is a call as well
    is_call = conventions.is_openinference_call(attributes) or conventions.is_genai_call(attributes)
    return _call(attributes, span, events, is_call=is_call)


def _log_call(log: Row, events: _EventIndex) -> dict[str, Any]:
    event = _log_event(log)
    return _call(event.attributes, log, events) if event.name == _DETAILS else {}


def _call(
    attributes: dict[str, Any], record: Row, events: _EventIndex, *, is_call: bool = True
) -> dict[str, Any]:
    """The record of a span, or of a log record."""
    span, scores = _id(record), events.scores_of(_id(record), attributes)
    ids = {"trace_id": record.get("traceId"), "span_id": record.get("spanId"), "span": record.get("name")}
    attributes = attributes | {name: value for name, value in ids.items() if value}
    return {"span": span, "attributes": attributes, "scores": scores, "is_call": is_call}


def _events(row: Row) -> Iterator[_Event]:
    """Events in spans and in logs. Those of details in spans are left with them."""
    for span in _inner(row, *_SPANS):
        with suppress(*RECORD_ERRORS):  # `_calls` reports them
            yield from (event for event in _span_events(span) if event.name != _DETAILS)
    for log in _inner(row, *_LOGS):
        with suppress(*RECORD_ERRORS):
            yield _log_event(log)


def _span_events(span: Row) -> Iterator[_Event]:
    for event in listed(span.get("events"), "events"):
        attributes = _attributes(event.get("attributes"), "events.attributes")
        yield _Event(str(event.get("name")), attributes, _id(span))


def _log_event(log: Row) -> _Event:
    attributes = _attributes(log.get("attributes"), "logRecords.attributes")
    return _Event(str(log.get("eventName") or attributes.get("event.name")), attributes, _id(log))


def _id(record: Row) -> str:
    return str(record.get("spanId") or "")


def _inner(row: Row, resources: str, scopes: str, names: str) -> Iterator[dict[str, Any]]:
    for resource in listed(row.get(resources), resources):
        for scope in listed(resource.get(scopes), scopes):
            yield from listed(scope.get(names), names)


def _attributes(value: Any, name: str) -> dict[str, Any]:
    return {
        str(pair.get("key")): _value(entry(pair.get("value"), name), name) for pair in listed(value, name)
    }


def _value(value: Row, name: str) -> Any:
    """A value, named by its type. Raises `Refused` for other types."""
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
