"""Experiment trackers: MLflow and Weave.

MLflow: traces with their assessments, as JSON (`Trace.to_json`) or rows of `search_traces`.

Fields as in mlflow-tracing 3.17.2: entities/trace.py, entities/trace_info.py, entities/span.py:357,
entities/assessment.py:170-250, tracing/constant.py:107-135; spans of versions before 3 have other names.

Weave: exported calls with their feedback.

Fields as in weave 0.54: trace/call.py:52-90 and 326-350, trace/feedback_types.py, trace/feedback.py:385-430;
of evaluations evaluation/eval.py:276-313.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, unpacked
from agro.io.jsonlines import Line
from agro.io.strictjson import loads
from agro.logs import spans
from agro.logs.fields import grouped, listed, settings
from agro.logs.model_calls import identified, identified_by_first
from agro.logs.protocol import Context, Item, Row
from agro_formats.table import declared

_CALLS = ("LLM", "CHAT_MODEL")
_JUDGEMENTS = {"yes": 1.0, "no": 0.0}  # what MLflow's judges say
_MLFLOW_COLUMNS = (
    "trace",
    "request",
    "response",
    "spans",
    "assessments",
    "request_preview",
    "response_preview",
)


def _mlflow_read(row: Row, context: Context) -> list[Item]:
    info, listed_spans = _parts(row)
    span_scores: dict[Any, spans.Scores] = {}
    answer = None
    for assessed in listed(info.get("assessments"), "assessments"):
        if assessed.get("feedback") is not None and assessed.get("valid", True):
            name, value = _judgement(assessed)
            span_scores.setdefault(assessed.get("span_id"), {}).setdefault(name, []).append(value)
        elif assessed.get("assessment_name") == "expected_response":
            answer = entry(assessed.get("expectation"), "assessments.expectation").get("value")
    parsed = [_mlflow_span(span, span_scores, f"spans[{i}]") for i, span in enumerate(listed_spans)]
    trace_scores = {
        name: scores for name, scores in span_scores.items() if name not in {s.id for s in parsed}
    }
    scores: spans.Scores = {}
    for part in trace_scores.values():
        for name, values in part.items():
            scores.setdefault(name, []).extend(values)
    return spans.read(parsed, scores, context, spans.described(info, _MLFLOW_COLUMNS), answer)


def _parts(row: Row) -> tuple[Row, list[dict[str, Any]]]:
    """What is known of the trace, and its spans in order."""
    info = row
    listed_spans = unpacked(row.get("spans"))
    if "data" in row:
        info, data = entry(row["info"], "info"), entry(row["data"], "data")
        listed_spans = data.get("spans")
    parsed = objects(listed_spans, "spans")
    return info, sorted(parsed, key=lambda s: s.get("start_time_unix_nano", s.get("start_time")) or 0)


def _judgement(assessed: Row) -> tuple[str, Any]:
    feedback = entry(assessed["feedback"], "assessments.feedback")
    value = feedback.get("value")
    if isinstance(value, str):
        value = _JUDGEMENTS.get(value.lower(), value)
    elif isinstance(value, dict | list):
        raise Refused(f"assessments.feedback.value: expected a number, a flag or text, got {value!r:.80}")
    return str(assessed.get("assessment_name")), None if feedback.get("error") else value


def _mlflow_span(span: Row, scores: dict[Any, spans.Scores], name: str) -> spans.TraceSpan:
    attributes = entry(span.get("attributes"), f"{name}.attributes")
    request = _attribute(attributes, "mlflow.spanInputs")
    kind = _attribute(attributes, "mlflow.spanType")
    context = entry(span.get("context"), f"{name}.context")
    span_id = span.get("span_id", context.get("span_id"))
    inputs = request if isinstance(request, dict) else {}
    status = span.get("status")
    code, message = span.get("status_code", status), span.get("status_message")
    if isinstance(status, dict):
        code, message = status.get("code"), status.get("message")
    return spans.TraceSpan(
        id=span_id,
        parent=span.get("parent_span_id", span.get("parent_id")),
        input=request,
        output=_attribute(attributes, "mlflow.spanOutputs"),
        is_call=kind in _CALLS,
        is_judge=kind == "EVALUATOR",
        error=str(message or code) if str(code).endswith("ERROR") else None,
        model=_attribute(attributes, "mlflow.llm.model") or inputs.get("model"),
        sampling=settings(inputs),
        scores=scores.get(span_id, {}),
    )


def _attribute(attributes: Row, name: str) -> Any:
    """A value, which is written as JSON."""
    value = attributes.get(name)
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except ValueError:
        return value


def _fits(row: Row) -> bool:
    info, data = row.get("info"), row.get("data")
    if isinstance(info, dict) and isinstance(data, dict):
        return "spans" in data and not info.keys().isdisjoint(("trace_id", "request_id"))
    named = not row.keys().isdisjoint(("trace_id", "request_id"))
    return named and row.keys() >= {"request", "response", "spans", "tags"}


def _mlflow_identity(row: Row) -> str:
    info = row.get("info")
    info = info if isinstance(info, dict) else row
    return identified(row, info.get("trace_id", info.get("request_id")))


declared("mlflow", _mlflow_read, _fits, identity=_mlflow_identity)


_REQUEST_KEYS = ("messages", "input", "prompt")
_RESPONSE_KEYS = ("choices", "content", "output", "generations")
_REACTIONS = {"👍": 1.0, "👎": 0.0}
_EXAMPLE = "predict_and_score"
_WEAVE_COLUMNS = ("inputs", "output", "summary", "feedback", "attributes", "storage_size_bytes")


def _gather(lines: Iterator[Line]) -> Iterator[Line]:
    """A record a trace, and of an evaluation a record an example."""
    for line in grouped(lines, lambda row: str(row.get("trace_id")), "calls"):
        if line.error:
            yield line
            continue
        for calls in _examples(line.value["calls"]):
            yield line._replace(value={"calls": calls})


def _examples(calls: list[Row]) -> list[list[Row]]:
    """The calls of each example of an evaluation; of another trace all of them."""
    roots = {call.get("id"): [call] for call in calls if _op(call).endswith(_EXAMPLE)}
    parents = {call.get("id"): call.get("parent_id") for call in calls}
    for call in calls:
        ancestor, seen = call.get("parent_id"), set[Any]()
        while ancestor is not None and ancestor not in roots and ancestor not in seen:
            seen.add(ancestor)
            ancestor = parents.get(ancestor)
        if ancestor in roots and call.get("id") not in roots:
            roots[ancestor].append(call)
    return list(roots.values()) or [calls]


def _op(call: Row) -> str:
    """The name of what was called: weave:///ENTITY/PROJECT/op/NAME:VERSION."""
    return str(call.get("op_name")).rpartition("/")[2].partition(":")[0]


def _weave_read(row: Row, context: Context) -> list[Item]:
    calls = sorted(objects(row.get("calls", [row]), "calls"), key=lambda call: str(call.get("started_at")))
    root = next((call for call in calls if _op(call).endswith(_EXAMPLE)), None)
    judges = set[Any]()
    scores: spans.Scores = {}
    if root is not None:  # its first call is the model's, the others score
        judges = {call["id"] for call in calls if call.get("parent_id") == root["id"]} - {_first(calls, root)}
        result = entry(root.get("output"), "output")
        scores = {name: [value] for name, value in _numbers(entry(result.get("scores"), "output.scores"))}
    parsed = [_weave_span(call, f"calls[{i}]", judges) for i, call in enumerate(calls)]
    outermost = root or next((call for call in calls if call.get("parent_id") is None), calls[0])
    return spans.read(parsed, scores, context, spans.described(outermost, _WEAVE_COLUMNS))


def _first(calls: list[dict[str, Any]], root: Row) -> Any:
    return next((call["id"] for call in calls if call.get("parent_id") == root["id"]), None)


def _weave_span(call: Row, name: str, judges: set[Any]) -> spans.TraceSpan:
    request, response = call.get("inputs"), call.get("output")
    inputs = request if isinstance(request, dict) else {}
    for key in _REQUEST_KEYS:
        if isinstance(inputs.get(key), str) and inputs[key].startswith("weave:///"):
            raise Refused(f"{name}.inputs.{key}: expected its value, got a reference; export it expanded")
    attributes = entry(unpacked(call.get("attributes")), f"{name}.attributes")
    kind = entry(attributes.get("weave"), f"{name}.attributes.weave").get("kind")
    is_example = _op(call).endswith(_EXAMPLE)
    output = response if isinstance(response, dict) else {}
    asks = not inputs.keys().isdisjoint(_REQUEST_KEYS) and not output.keys().isdisjoint(_RESPONSE_KEYS)
    return spans.TraceSpan(
        id=call.get("id"),
        parent=None if is_example else call.get("parent_id"),
        input=request,
        output=output.get("output", output.get("model_output")) if is_example else response,
        is_call=not is_example and (kind == "llm" or asks),
        is_judge=call.get("id") in judges,
        error=call.get("exception"),
        model=output.get("model") or inputs.get("model"),
        sampling=settings(inputs),
        scores=_feedback(call, name),
    )


def _feedback(call: Row, name: str) -> spans.Scores:
    """People's reactions and annotations, and results of scorers, by name."""
    weave_summary = entry(entry(call.get("summary"), f"{name}.summary").get("weave"), f"{name}.summary.weave")
    calls = call.get("feedback") or weave_summary.get("feedback")
    scores: spans.Scores = {}
    for one in listed(calls, f"{name}.feedback"):
        kind, payload = str(one.get("feedback_type")), entry(one.get("payload"), f"{name}.feedback.payload")
        if kind == "wandb.reaction.1":
            emoji = payload.get("emoji")
            scores.setdefault("reaction", []).append(_REACTIONS.get(str(emoji), emoji))
        elif kind.startswith("wandb.annotation."):
            scores.setdefault(kind.removeprefix("wandb.annotation."), []).append(payload.get("value"))
        elif kind.startswith("wandb.runnable."):
            for part, value in _numbers({kind.removeprefix("wandb.runnable."): payload.get("output")}):
                scores.setdefault(part, []).append(value)
        elif not kind.startswith("wandb."):
            for part, value in _numbers({kind: payload}):
                scores.setdefault(part, []).append(value)
    return scores


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers and flags in an object, named by their path."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{part}", inner) for part, inner in _numbers(value))
        elif isinstance(value, bool | int | float):
            yield name, value


declared(
    "weave",
    _weave_read,
    gather=_gather,
    identity=lambda row: identified_by_first(row, "calls", "trace_id", "id"),
)
