"""Traces of model calls: where scores are found, and what is refused alone in a file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from example import otlp_attributes, parts_of
from writers import json_lines

from agro.errors import Refused
from agro.logs.format_table import FORMATS
from agro.logs.importing import import_files
from agro.logs.protocol import Context
from agro.store import Store
from agro_formats.otlp import unflatten
from agro_formats.traces import scored

PATH = Path("traces.jsonl")
CONTEXT = Context(PATH)
TEXT, TOOLS = (parts_of("otlp")[name] for name in ("text", "tools"))  # attributes of two calls
BRAINTRUST, WEAVE = parts_of("braintrust"), parts_of("weave")


def span(name: str, given: dict[str, Any], *events: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "traceId": "5b8e",
        "spanId": name,
        "name": "chat m",
        "attributes": otlp_attributes(given),
        "events": [{"name": event, "attributes": otlp_attributes(inner)} for event, inner in events],
    }


def spans(*given: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(given)}]}]}


def judged(name: str, score: Any, **more: str) -> tuple[str, dict[str, Any]]:
    """An event of OpenTelemetry."""
    inner = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": score}
    return "gen_ai.evaluation.result", inner | more


def test_evaluations_are_found_wherever_they_are(tmp_path: Path) -> None:
    """By the response's id, or by the span's; also before it in the file, and in a compressed one."""
    event, inner = judged("liked", 0.5)
    record = {"spanId": "a", "eventName": event, "attributes": otlp_attributes(inner)}
    early = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}
    late = span("z", {}, judged("liked", 1.0, **{"gen_ai.response.id": "r2"}))
    path = tmp_path / "traces.jsonl.gz"
    rows = [early, spans(span("a", {**TEXT, "gen_ai.response.id": "r1"}), span("b", TOOLS)), spans(late)]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    with Store.open(tmp_path / "store.db") as store:
        import_files(store, [path])
        assert [sample.reward for sample in store.samples()] == [0.5, 1.0]


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


def test_a_span_is_the_same_in_another_export() -> None:
    identity, attributes = FORMATS["otlp"].identity, {"trace_id": "t", "span_id": "s"}
    assert identity is not None
    assert identity({"attributes": attributes}) == identity({"attributes": attributes | {"scores": 1}})
    assert identity({"attributes": attributes}) != identity({"attributes": attributes | {"span_id": "u"}})
    assert identity({"attributes": {"a": 1}}) != identity({"attributes": {"a": 2}})


def test_names_with_dots_are_objects() -> None:
    assert unflatten({"a.1.b": 2, "a.0.b": 1, "c": [{"d.e": 3}]}) == {
        "a": [{"b": 1}, {"b": 2}],
        "c": [{"d": {"e": 3}}],
    }


def test_a_bad_span_refuses_its_trace_alone(tmp_path: Path) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    root, *calls = (BRAINTRUST[name] for name in ("root", "first", "second"))
    bad = {**calls[0], "span_id": "f", "root_span_id": "f", "span_parents": None, "input": image}
    json_lines(tmp_path / "log.jsonl", [root, bad, *calls])
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
    text = [json.dumps(WEAVE["around"]), "{", json.dumps(WEAVE["call"])]
    path.write_text("\n".join(text))
    with Store.open(tmp_path / "store.db") as store:
        report = import_files(store, [path])
    assert (report.samples, [r.where for r in report.refused]) == (1, [f"{path}:2"])


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({"results": [parts_of("promptfoo")["result"], 7], "stats": {}}, "row 2"),
        ({"inferences": [parts_of("tensorzero")["inference"], None]}, "row 2"),
        ({"events": [BRAINTRUST["root"] | {"input": "?"}, "a"]}, "row 2"),
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
