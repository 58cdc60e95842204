"""Platforms that observe model calls: Langfuse, LangSmith, Braintrust and Opik.

Langfuse: exported observations as JSON, JSON Lines or CSV, and rows of its tables.

Columns as in Langfuse v4.16: packages/shared's features/batchExport/types.ts, and the ClickHouse migrations
0002 (observations) and 0003 (scores), which write names with underscores.

LangSmith: runs, and their feedback.

Fields as in langsmith-sdk bc8dd67 (python/langsmith/schemas.py:307-420).

Braintrust: rows of experiments and logs, one a span, as exported or fetched.

Fields as in braintrust-sdk a696a72, js/src/generated_types.ts:715-780 (`ExperimentEvent`, `SpanAttributes`);
`/v1/experiment/ID/fetch` answers with `events`.

Opik: exported traces with their spans and feedback scores.

Fields as in opik 2.2.122: cli/exports/project.py:705, rest_api/types/trace_public.py, span_public.py,
feedback_score_public.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, unpacked
from agro.io.jsonlines import Line
from agro.io.strictjson import loads
from agro.logs import exchanges, spans
from agro.logs.fields import grouped, listed, number, settings, unlisted
from agro.logs.model_calls import (
    identified,
    identified_by_first,
    joined_scores,
    responses,
    score_key,
    scored,
)
from agro.logs.protocol import Context, Item, Row, SkipRecord, unreadable
from agro_formats.table import declared

_TRACE = ("traceId", "trace_id")
_MODEL = ("model", "providedModelName", "provided_model_name")
_PARAMETERS = ("modelParameters", "model_parameters")
_SAMPLING = ("temperature", "top_p", "top_k", "seed")
_LANGFUSE_COLUMNS = ("input", "output", "scores", *_MODEL)


def _langfuse_read(row: Row, context: Context) -> list[Item]:
    if row.get("type") not in (None, "GENERATION"):
        raise SkipRecord("observations that aren't generations")
    prompt = exchanges.prompt(_cell(row["input"], "input", context), "input")
    replies = exchanges.replies(_cell(row["output"], "output", context), "output")
    scores = _langfuse_scores(row, context)
    parameters = _known(row, _PARAMETERS)
    parameters = parameters if isinstance(parameters, dict) else {}
    common = {
        "reward": scored(scores, context),
        "model": _known(row, _MODEL),
        "sampling": {name: parameters[name] for name in _SAMPLING if name in parameters} or None,
        "meta": omit(row, _LANGFUSE_COLUMNS) | ({"scores": scores} if scores else {}),
    }
    return responses(prompt, replies, "output", common)


def _known(row: Row, names: tuple[str, ...]) -> Any:
    return next((unpacked(row[name]) for name in names if row.get(name) is not None), None)


def _cell(value: Any, name: str, context: Context) -> Any:
    """A value that may be written as JSON in a text. Raises `Refused` where that is cut off."""
    if not isinstance(value, str):
        return value
    parsed = unpacked(value)
    if isinstance(parsed, str) and parsed.lstrip()[:2] in ('{"', "[{"):
        raise Refused(f"{name}: expected JSON, got {value!r:.80}; it may be cut off: export it anew")
    if context.is_text and value[:1] == value[-1:] == '"':
        parsed = _string(value)
    return parsed


def _string(value: str) -> Any:
    try:
        return loads(value)
    except ValueError:
        return value


def _langfuse_scores(row: Row, context: Context) -> dict[str, list[Any]]:
    """Values of the scores by name, of the column and of --join's rows."""
    scores = {
        name: values if isinstance(values, list) else [values]
        for name, values in entry(unpacked(row.get("scores")), "scores").items()
    }
    return scores | joined_scores(context, "scores", row.get("id"))


declared(
    "langfuse",
    _langfuse_read,
    lambda row: row.keys() >= {"input", "output"} and not row.keys().isdisjoint(_TRACE),
    identity=lambda row: identified(row, row.get("id")),
)
declared(
    "langfuse-scores",
    unreadable("these are scores without texts; import the observations, with --join and this file"),
    lambda row: (
        row.keys() >= {"name", "value"} and not row.keys().isdisjoint({"observation_id", "observationId"})
    ),
    joined_by=lambda row: score_key(row.get("observation_id", row.get("observationId")), row["name"]),
)


_LANGSMITH_COLUMNS = ("inputs", "outputs", "feedback_stats", "extra")


def _langsmith_read(row: Row, context: Context) -> list[Item]:
    """Runs of other types (chains, tools) repeat what the model's runs have."""
    if row["run_type"] != "llm":
        raise SkipRecord("runs that aren't of a model's call")
    prompt = exchanges.prompt(row["inputs"], "inputs")
    if row.get("error") and not row.get("outputs"):
        raise Refused(f"error: the run has no response: {row['error']!r:.80}")
    replies = exchanges.replies(row["outputs"], "outputs")
    extra = entry(unpacked(row.get("extra")), "extra")
    parameters = entry(extra.get("invocation_params"), "extra.invocation_params")
    metadata = entry(extra.get("metadata"), "extra.metadata")
    scores = _langsmith_scores(row, context)
    common = {
        "reward": scored(scores, context),
        "model": metadata.get("ls_model_name") or parameters.get("model") or parameters.get("model_name"),
        "sampling": settings(parameters, _SAMPLING),
        "meta": omit(row, _LANGSMITH_COLUMNS)
        | omit({"extra": extra or None}, ())
        | ({"scores": scores} if scores else {}),
    }
    if parameters.get("tools"):
        common["tools"] = parameters["tools"]
    return responses(prompt, replies, "outputs", common)


def _langsmith_scores(row: Row, context: Context) -> dict[str, list[Any]]:
    """Averages of the run's feedback by key, and the feedback of --join's rows."""
    stats = entry(unpacked(row.get("feedback_stats")), "feedback_stats")
    scores = {}
    for key, one in stats.items():
        location = f"feedback_stats.{key}"
        scores[key] = [number(entry(one, location).get("avg"), f"{location}.avg")]
    return scores | joined_scores(context, "feedback", row.get("id"), columns=("score", "value"))


declared("langsmith", _langsmith_read, identity=lambda row: identified(row, row.get("id")))
declared(
    "langsmith-feedback",
    unreadable("this is feedback without texts; import the runs, with --join and this file"),
    joined_by=lambda row: score_key(row["run_id"], row["key"]),
)


_BRAINTRUST_COLUMNS = (
    "input",
    "output",
    "expected",
    "scores",
    "metrics",
    "context",
    "span_attributes",
    "span_parents",
)


def _gather(lines: Iterator[Line]) -> Iterator[Line]:
    """A record a trace."""
    rows = unlisted(lines, lambda row: row.get("events"))
    return grouped(rows, lambda row: str(row.get("root_span_id")), "spans")


def _braintrust_read(row: Row, context: Context) -> list[Item]:
    rows = objects(row.get("spans", [row]), "spans")
    rows = sorted(rows, key=_start)
    root = next((span for span in rows if not _parents(span)), rows[0])
    parsed = [_braintrust_span(span, f"spans[{i}]") for i, span in enumerate(rows)]
    answer = unpacked(root.get("expected"))
    return spans.read(parsed, {}, context, spans.described(root, _BRAINTRUST_COLUMNS), answer)


def _start(span: Row) -> Any:
    metrics = unpacked(span.get("metrics"))
    start = metrics.get("start") if isinstance(metrics, dict) else None
    return (bool(_parents(span)), start if isinstance(start, int | float) else 0, str(span.get("created")))


def _parents(span: Row) -> list[Any]:
    parents = unpacked(span.get("span_parents"))
    return parents if isinstance(parents, list) else []


def _braintrust_span(span: Row, name: str) -> spans.TraceSpan:
    kind = entry(unpacked(span.get("span_attributes")), f"{name}.span_attributes")
    metadata = entry(unpacked(span.get("metadata")), f"{name}.metadata")
    scores = entry(unpacked(span.get("scores")), f"{name}.scores")
    is_judge = kind.get("purpose") == "scorer" or kind.get("type") == "score"
    parents = _parents(span)
    return spans.TraceSpan(
        id=span.get("span_id"),
        parent=parents[0] if parents else None,
        input=span.get("input"),
        output=span.get("output"),
        is_call=kind.get("type") == "llm",
        is_judge=is_judge,
        error=span.get("error"),
        model=metadata.get("model"),
        sampling=settings(metadata),
        scores={} if is_judge else {score: [value] for score, value in scores.items()},
    )


def _braintrust_fits(row: Row) -> bool:
    events = row.get("events")
    if isinstance(events, list) and events and isinstance(events[0], dict):
        row = events[0]
    return row.keys() >= {"span_id", "root_span_id", "input", "output"}


declared(
    "braintrust",
    _braintrust_read,
    _braintrust_fits,
    gather=_gather,
    identity=lambda row: identified_by_first(row, "spans", "root_span_id"),
)


_OPIK_COLUMNS = ("input", "output", "feedback_scores", "span_feedback_scores")


def _opik_read(row: Row, context: Context) -> list[Item]:
    """A trace alone is one response."""
    trace = entry(row.get("trace", row), "trace")
    inner = sorted(listed(row.get("spans"), "spans"), key=lambda span: str(span.get("start_time")))
    parsed = [_opik_span(trace, "trace", None)]
    parsed += [
        _opik_span(s, f"spans[{i}]", s.get("parent_span_id") or trace.get("id")) for i, s in enumerate(inner)
    ]
    return spans.read(parsed, {}, context, spans.described(trace, _OPIK_COLUMNS))


def _opik_span(span: Row, name: str, parent: Any) -> spans.TraceSpan:
    scores: spans.Scores = {}
    for score in listed(span.get("feedback_scores"), f"{name}.feedback_scores"):
        scores.setdefault(str(score.get("name")), []).append(score.get("value"))
    request = span.get("input")
    inner = request if isinstance(request, dict) else {}
    metadata = span.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return spans.TraceSpan(
        id=span.get("id"),
        parent=parent,
        input=request,
        output=span.get("output"),
        is_call=span.get("type") == "llm",
        error=span.get("error_info"),
        model=span.get("model") or inner.get("model"),
        sampling=settings({**metadata, **inner}),
        scores=scores,
    )


def _opik_fits(row: Row) -> bool:
    trace = row.get("trace")
    if isinstance(trace, dict):
        return "spans" in row and trace.keys() >= {"id", "input", "output"}
    return row.keys() >= {"id", "start_time", "input", "output", "feedback_scores"} and "trace_id" not in row


def _opik_identity(row: Row) -> str:
    return identified(row, entry(row.get("trace", row), "trace").get("id"))


declared("opik", _opik_read, _opik_fits, identity=_opik_identity)
