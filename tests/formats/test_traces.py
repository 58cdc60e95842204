"""Traces of model calls: several responses, tools, reasoning, scores of several kinds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from example import json_lines
from examples_observability import (
    ANSWERED,
    BRAIN,
    INFERENCE,
    LOGGED,
    OPIK,
    OUTER,
    RESULT,
    SECOND,
    THOUGHT,
    TRACE,
    WEAVE,
    braintrust,
    opik_span,
)
from examples_traces import (
    ASKED,
    CALL,
    CHAIN,
    FUSE,
    LANG,
    LOOKED,
    PHOENIX,
    TEXT,
    TOOLS,
    attributes,
    judged,
    logs,
    span,
    spans,
)

from agro.errors import Refused
from agro.logs.format_table import FORMATS, Recognizer, format_at, lines_of
from agro.logs.importing import import_files
from agro.logs.interchange import from_record
from agro.logs.protocol import Context
from agro.store import Store
from agro_formats.otlp import unflatten
from agro_formats.traces import scored

PATH = Path("traces.jsonl")
CONTEXT = Context(PATH)


def read(name: str, row: Mapping[str, Any], context: Context = CONTEXT) -> list[dict[str, Any]]:
    return [item.records[0] for item in FORMATS[name].read(row, context)]


def test_a_call_may_have_several_responses() -> None:
    """In OpenTelemetry an output message each, in OpenAI's form a choice each."""
    parts = [{"type": "text", "content": "Red."}]
    messages: list[Any] = [*json.loads(TEXT["gen_ai.output.messages"]), {"role": "assistant", "parts": parts}]
    of_span = read("otlp", spans(span("a", {**TEXT, "gen_ai.output.messages": messages})))
    assert [record["response"] for record in of_span] == ["Blue.", "Red."]
    choices = [{"message": {"role": "assistant", "content": text}} for text in ("Blue.", "Red.")]
    of_run = read("langsmith", {**LANG, "outputs": {"choices": choices}})
    assert [record["response"] for record in of_run] == ["Blue.", "Red."]
    assert of_span[0]["prompt"] == of_span[1]["prompt"]


def test_reasoning_and_calls_of_tools_are_kept() -> None:
    (record,) = read("otlp", spans(span("a", TOOLS)))
    turn: dict[str, Any] = {"role": "assistant", "content": "Blue.", "reasoning_content": "It is."}
    assert record["meta"]["continuation"] == [turn]
    (record,) = read("langsmith", CHAIN)
    turn = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": LOOKED}
    assert record["meta"]["continuation"] == [turn]
    (record,) = read("openinference", PHOENIX)
    called = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}]
    assert record["meta"]["continuation"] == [{"role": "assistant", "content": "", "tool_calls": called}]


def test_a_message_of_something_else_than_text_is_refused() -> None:
    image = [{"role": "user", "parts": [{"type": "blob", "content": "…"}]}]
    with pytest.raises(
        Refused, match=r"gen_ai\.input\.messages\[0\]\.content: expected text, got a part of type blob"
    ):
        read("otlp", spans(span("a", {**TEXT, "gen_ai.input.messages": image})))


def test_integers_that_are_no_integers_are_refused() -> None:
    wrong = {"key": "gen_ai.request.top_k", "value": {"intValue": "4.5"}}
    with pytest.raises(Refused, match=r"expected an integer, got '4.5'"):
        read("otlp", spans({**span("a", TEXT), "attributes": [*attributes(TEXT), wrong]}))


def test_evaluations_are_found_wherever_they_are(tmp_path: Path) -> None:
    """By the response's id, or by the span's; also before it in the file, and in a compressed one."""
    event, inner = judged("liked", 0.5)
    early = logs({"spanId": "a", "eventName": event, "attributes": attributes(inner)})
    late = span("z", {}, judged("liked", 1.0, "r2"))
    path = tmp_path / "traces.jsonl.gz"
    rows = [early, spans(span("a", {**TEXT, "gen_ai.response.id": "r1"}), span("b", TOOLS)), spans(late)]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    format = format_at(path)
    assert format is FORMATS["otlp"]
    found = [read("otlp", line.value) for line in lines_of(path, format) if line.value["is_call"]]
    assert [record["reward"] for (record,) in found] == [0.5, 1.0]


def test_a_label_is_no_number() -> None:
    label = {"gen_ai.evaluation.name": "tone", "gen_ai.evaluation.score.label": "kind"}
    row = spans(span("a", TEXT, ("gen_ai.evaluation.result", label)))
    (record,) = read("otlp", row)
    assert record["reward"] is None
    assert record["meta"]["scores"] == {"tone": ["kind"]}
    with pytest.raises(Refused, match="--reward tone: its values are text, such as 'kind', and no numbers"):
        read("otlp", row, Context(PATH, rewards={"tone": 1.0}))


def test_scores_of_several_names_are_asked_for() -> None:
    scores = {"liked": [1], "short": [0]}
    with pytest.raises(Refused, match=r"several columns of rewards .liked, short"):
        scored(scores, CONTEXT)
    assert scored(scores, Context(PATH, rewards={"liked": 2.0, "short": 1.0})) == 2.0
    assert scored({"short": [0]}, Context(PATH, rewards={"liked": 1.0})) is None


@pytest.mark.parametrize(("how", "reward"), [("mean", 0.25), ("last", 0.5)])
def test_several_values_of_a_score_are_asked_for(how: str, reward: float) -> None:
    with pytest.raises(Refused, match="liked: expected one value of this score"):
        scored({"liked": [0.0, 0.5]}, CONTEXT)
    assert scored({"liked": [0.0, 0.5]}, Context(PATH, choose={"scores": how})) == reward
    assert scored({"liked": [0.5, 0.5, None]}, CONTEXT) == 0.5


def test_joined_scores_need_a_name() -> None:
    joined = Context(PATH, joined={'["u1", "liked"]': {"score": 1}, '["o1", "liked"]': {"value": 1}})
    for name, row in (("langsmith", LANG), ("langfuse", FUSE)):
        with pytest.raises(Refused, match="reward: say which of the joined"):
            read(name, row, joined)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("langfuse-scores", {"observation_id": "o1", "name": "liked", "value": 1}),
        ("langsmith-feedback", {"run_id": "u1", "key": "liked", "score": 1}),
    ],
)
def test_scores_alone_are_no_log(name: str, row: dict[str, Any]) -> None:
    assert FORMATS[name].fits(row)
    with pytest.raises(Refused, match=r"without texts; import the .*--join"):
        read(name, row)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("otlp", [spans(span("a", TEXT), span("b", {**TEXT, "gen_ai.operation.name": "invoke_agent"}))]),
        (
            "openinference",
            [PHOENIX, {**dict.fromkeys(PHOENIX), "attributes.openinference.span.kind": "TOOL"}],
        ),
        ("langfuse", [FUSE, {**FUSE, "type": "SPAN"}]),
        ("langsmith", [LANG, {**LANG, "run_type": "chain"}]),
    ],
)
def test_what_is_no_call_of_a_model_is_counted(name: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    json_lines(tmp_path / "log.jsonl", rows)
    with Store.open(tmp_path / "store.db") as store:
        report = import_files(store, [tmp_path / "log.jsonl"])
    assert name in report.recognized
    assert (report.samples, list(report.left_out.values())) == (1, [1])


@pytest.mark.parametrize(("name", "row"), [("langfuse", FUSE), ("langsmith", LANG)])
def test_a_call_is_the_same_in_another_export(name: str, row: dict[str, Any]) -> None:
    identity = FORMATS[name].identity
    assert identity is not None
    assert identity(row) == identity({**row, "scores": {}, "feedback_stats": {}})
    assert identity(row) != identity({**row, "id": "another"})
    assert identity({**row, "id": None}) != identity({**row, "id": None, "name": "another"})


def test_a_span_is_the_same_in_another_export() -> None:
    identity, attributes = FORMATS["otlp"].identity, {"trace_id": "t", "span_id": "s"}
    assert identity is not None
    assert identity({"attributes": attributes}) == identity({"attributes": attributes | {"scores": 1}})
    assert identity({"attributes": attributes}) != identity({"attributes": attributes | {"span_id": "u"}})
    assert identity({"attributes": {"a": 1}}) != identity({"attributes": {"a": 2}})


def test_calls_without_content_say_how_to_record_it() -> None:
    with pytest.raises(Refused, match="OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"):
        read("otlp", spans(span("a", CALL)))


def test_names_with_dots_are_objects() -> None:
    assert unflatten({"a.1.b": 2, "a.0.b": 1, "c": [{"d.e": 3}]}) == {
        "a": [{"b": 1}, {"b": 2}],
        "c": [{"d": {"e": 3}}],
    }


def test_calls_that_do_not_continue_each_other_are_responses_of_their_own() -> None:
    """Each has the scores of the trace, but its own where it has one of the name."""
    other = [{"role": "user", "content": "A number?"}]
    own = opik_span("2", {"messages": other}, "One.", feedback_scores=[{"name": "liked", "value": 0.25}])
    records = read("opik", {**OPIK, "spans": [opik_span("1", {"messages": ASKED}, SECOND), own]})
    assert [(record["response"], record["reward"]) for record in records] == [("Blue.", 1.0), ("One.", 0.25)]


def test_a_bad_span_refuses_its_trace_alone(tmp_path: Path) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    bad = {**braintrust("f", [], "llm", image, "?"), "root_span_id": "f"}
    json_lines(tmp_path / "log.jsonl", [BRAIN, bad, THOUGHT, ANSWERED])
    with Store.open(tmp_path / "store.db") as store:
        report = import_files(store, [tmp_path / "log.jsonl"])
    assert report.samples == 1
    assert [(r.where, r.reason) for r in report.refused] == [
        (
            f"{tmp_path / 'log.jsonl'}:2",
            "spans[0].input[0].content: expected text, got a part of type image_url",
        )
    ]


def test_a_line_that_can_not_be_read_is_refused_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    text = [json.dumps(OUTER), "{", json.dumps(WEAVE)]
    path.write_text("\n".join(text))
    with Store.open(tmp_path / "store.db") as store:
        report = import_files(store, [path])
    assert (report.samples, [r.where for r in report.refused]) == (1, [f"{path}:2"])


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({"results": [RESULT, 7], "stats": {}}, "row 2"),
        ({"inferences": [INFERENCE, None]}, "row 2"),
        ({"events": [BRAIN | {"input": "?"}, "a"]}, "row 2"),
    ],
)
def test_what_a_document_lists_is_refused_by_its_place(
    row: dict[str, Any], where: str, tmp_path: Path
) -> None:
    json_lines(tmp_path / "log.json", [row])
    with Store.open(tmp_path / "store.db") as store:
        report = import_files(store, [tmp_path / "log.json"])
    assert report.samples == 1
    assert [r.where for r in report.refused] == [f"{tmp_path / 'log.json'}:1, {where}"]


def test_scores_of_a_trace_with_several_names_are_asked_for() -> None:
    row = {"spans": [{**BRAIN, "input": "A color?", "scores": {"Exact": 0.5, "Short": None}}]}
    with pytest.raises(Refused, match=r"several columns of rewards .Exact, Short"):
        read("braintrust", row)
    (record,) = read("braintrust", row, Context(PATH, rewards={"Exact": 2.0}))
    assert record["reward"] == 1.0
    (record,) = read("braintrust", row, Context(PATH, rewards={"Short": 1.0}))
    assert record["reward"] is None


def test_reactions_and_results_of_scorers_are_scores() -> None:
    feedback = [
        {"feedback_type": "wandb.runnable.judge", "payload": {"output": {"good": True, "why": "…"}}},
        {"feedback_type": "wandb.annotation.quality", "payload": {"value": 3}},
        {"feedback_type": "stars", "payload": {"value": 5}},
    ]
    context = Context(PATH, rewards={"judge.good": 1.0, "quality": 0.5, "stars.value": 0.25})
    (record,) = read("weave", {"spans": [{**WEAVE, "parent_id": None, "feedback": feedback}]}, context)
    assert record["reward"] == 1.0 + 0.5 * 3 + 0.25 * 5


def test_anthropic_calls_in_a_trace() -> None:
    answered = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm."},
            {"type": "text", "text": "Wait."},
            {"type": "tool_use", "id": "c", "name": "look", "input": {"n": 1}},
        ],
        "stop_reason": "tool_use",
    }
    asked = {
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "A color?"}],
        "model": "claude-m",
    }
    (record,) = read("opik", {**OPIK, "spans": [opik_span("1", asked, answered)]})
    assert record["prompt"] == ASKED
    assert record["meta"]["continuation"] == [
        {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": LOOKED}
    ]


def test_redacted_calls_are_refused() -> None:
    hidden = [{"role": "user", "content": "redacted-by-litellm"}]
    with pytest.raises(Refused, match="expected texts, got those that LiteLLM redacted"):
        read("litellm", {**LOGGED, "messages": hidden})


def test_joined_metrics_need_a_name() -> None:
    joined = Context(PATH, joined={'["i1", "liked"]': {"value": True}})
    with pytest.raises(Refused, match="reward: say which of the joined metrics"):
        read("tensorzero", INFERENCE, joined)
    with pytest.raises(Refused, match=r"without texts; import the .*--join"):
        read("tensorzero-feedback", {"target_id": "i1", "metric_name": "liked", "value": True})


@pytest.mark.parametrize(("name", "row"), [("langfuse", FUSE), ("opik", TRACE)])
def test_a_completion_as_output_is_no_chat_completion(name: str, row: dict[str, Any]) -> None:
    """Chat completions beside their requests fit too, and say less."""
    format = Recognizer(None).recognize({**row, "output": SECOND})
    assert format is FORMATS[name]


def test_traces_say_which_tools_were_declared() -> None:
    """OpenTelemetry's attribute, and the parameters of LangSmith's runs."""
    declared = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    attributes = {**TEXT, "gen_ai.tool.definitions": json.dumps(declared)}
    run = {**LANG, "extra": {"invocation_params": {"tools": [{"type": "function", "function": declared[0]}]}}}
    schema = [{"tool": {"json_schema": json.dumps({"type": "function", "function": declared[0]})}}]
    phoenix = {**PHOENIX, "attributes.llm.tools": schema}
    records = (
        read("otlp", spans(span("a", attributes))),
        read("langsmith", run),
        read("openinference", phoenix),
    )
    for (record,) in records:
        first = from_record(record).prompt[0]
        assert first["role"] == "tools"
        assert json.loads(first["content"])[0]["function"]["name"] == "look"
