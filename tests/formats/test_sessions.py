"""Files of sessions that are cut off or damaged, and what their lines can't say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from example import parts_of, rows_of
from writers import json_lines

from agro.errors import Refused
from agro.logs import exchanges
from agro.logs.format_table import FORMATS
from agro.logs.importing import import_files
from agro.logs.protocol import Context
from agro.store import Store

CLAUDE, CODEX = rows_of("claude-code"), rows_of("codex")


def line(kind: str, uuid: str, parent: str | None, content: Any, **others: Any) -> dict[str, Any]:
    """A line of Claude Code, of the user or the assistant."""
    like = parts_of("claude-code")[kind]
    message = like["message"] | {"content": content} | ({"id": uuid} if kind == "assistant" else {})
    return like | {"uuid": uuid, "parentUuid": parent, "message": message} | others


def text(said: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": said}]


def rollout(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    """A line of Codex."""
    return {"timestamp": "2026-03-26T10:00:00.000Z", "type": kind, "payload": payload}


def read(name: str, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    items = FORMATS[name].read({"events": [dict(event) for event in events]}, Context(Path("log.jsonl")))
    return [item.records[0] for item in items]


def test_the_last_line_of_a_session_may_be_cut_off(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    complete = "".join(json.dumps(event) + "\n" for event in CODEX)
    path.write_text(complete + '{"timestamp": "2026-03-26T10:00:00.000Z", "type": "resp')
    report = import_files(store, [path])
    assert (report.samples, [r.where for r in report.refused]) == (3, [f"{path}:{len(CODEX) + 1}"])


def test_a_damaged_line_within_a_session_refuses_it(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [json.dumps(event) for event in CLAUDE]
    path.write_text("\n".join([*lines[:5], "{", *lines[6:]]))
    with pytest.raises(Refused, match=r"log.jsonl:6: expected one JSON object.*can't be understood"):
        import_files(store, [path])


def test_a_folder_of_sessions_is_refused_by_session(store: Store, tmp_path: Path) -> None:
    """One that can't be read doesn't keep the others out."""
    json_lines(tmp_path / "a.jsonl", CODEX)
    json_lines(tmp_path / "b.jsonl", [*CODEX[:5], rollout("compacted", {"message": "?"})])
    report = import_files(store, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert report.samples == 3
    assert [r.where for r in report.refused] == [f"{tmp_path / 'b.jsonl'}:1"]
    assert "events[5].payload.replacement_history: expected a list of objects" in report.refused[0].reason


def test_more_turns_rolled_back_than_there_were_are_refused() -> None:
    back = rollout("event_msg", {"type": "thread_rolled_back", "num_turns": 3})
    with pytest.raises(Refused, match=r"events\[16\].payload.num_turns: expected 1 to 2 turns, got 3"):
        read("codex", [*CODEX[:16], back])


def test_a_session_without_a_turn_is_refused() -> None:
    failed = line("assistant", "a1", "u1", text("API Error"), isApiErrorMessage=True)
    said = [{"type": "output_text", "text": "Hi."}]
    greeting = {"type": "message", "role": "assistant", "content": said}
    with pytest.raises(Refused, match="expected a turn of the assistant, got none"):
        read("claude-code", [line("user", "u1", None, "Hi."), failed])
    with pytest.raises(Refused, match="expected a message before the first one of the assistant"):
        read("codex", [rollout("session_meta", {"id": "1"}), rollout("response_item", greeting)])


def test_a_summary_begins_another_response() -> None:
    """As Claude Code writes one: a boundary without a parent, and a message of the user after it."""
    boundary = line("user", "b", None, "", type="system", subtype="compact_boundary")
    boundary |= {"message": {"role": "system", "content": ""}}
    summary = line("user", "u9", "b", "Files were listed.", isCompactSummary=True)
    answer = line("assistant", "a9", "u9", text("Go on."))
    records = read("claude-code", [*CLAUDE, boundary, summary, answer])
    assert [record["response"] for record in records] == ["Yes.", "None.", "Go on."]
    assert records[2]["prompt"] == [{"role": "user", "content": "Files were listed."}]
    assert {record["episode"] for record in records} == {"s"}


def test_a_result_stands_at_its_call_wherever_its_line_is() -> None:
    """Results of two calls: the second one's line names the first one's as the event before it."""
    late = [event for event in CLAUDE if event.get("uuid") not in ("r1", "r2")]
    results = [
        line("user", uuid, parent, [{"type": "tool_result", "tool_use_id": call, "content": call}])
        for uuid, parent, call in (("r2", "a3", "c2"), ("r1", "r2", "c1"))
    ]
    at = next(i for i, event in enumerate(late) if event.get("uuid") == "e1")
    first = read("claude-code", [*late[:at], *results, {**late[at], "parentUuid": "r1"}, *late[at + 1 :]])[0]
    turns = first["meta"]["continuation"][:4]
    assert [turn["role"] for turn in turns] == ["assistant", "tool", "tool", "assistant"]
    assert [turn["content"] for turn in turns[1:3]] == ["c2", "c1"]


def test_lines_without_links_follow_each_other() -> None:
    bare = [{k: x for k, x in event.items() if k != "parentUuid"} for event in CLAUDE[2:13]]
    (record,) = read("claude-code", bare)
    assert record["prompt"] == [{"role": "user", "content": "List the files."}]
    assert record["response"] == "Yes."


def test_items_of_openai_responses_are_messages() -> None:
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]},
        {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": {"content": "blue", "success": True}},
    ]
    called = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert exchanges.messages(items, "output") == [
        {"role": "assistant", "content": "Look:", "reasoning_content": "Hm.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "blue"},
    ]
    (reply,) = exchanges.replies({"id": "resp_1", "object": "response", "output": items[:3]}, "output")
    assert reply == exchanges.messages(items[:3], "output")[0]
    asked = exchanges.prompt({"instructions": "Be brief.", "input": "A color?"}, "input")
    assert asked == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A color?"}]


@pytest.mark.parametrize("answer", ['{"color": "blue"}', "[1, 2]", "[{}]", "{not JSON}"])
def test_a_response_that_is_json_is_text(answer: str) -> None:
    assert exchanges.replies(answer, "output") == [{"content": answer}]
    assert exchanges.prompt(answer, "input") == answer
    assert exchanges.replies(json.dumps({"role": "assistant", "content": answer}), "output") == [
        {"role": "assistant", "content": answer}
    ]
