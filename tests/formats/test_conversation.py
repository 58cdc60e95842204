"""Rows that hold a whole conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from writing import read_samples

from agro.errors import Refused
from agro.logs.importing import import_files
from agro.logs.records import split
from agro.store import Store, write_samples

ASK = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {}}}],
}
RAW_CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock"}}]}
TOOL = {"role": "tool", "content": "noon"}
SAID = {"role": "assistant", "content": "a"}


def test_the_response_is_what_follows_the_last_user() -> None:
    assert split([*ASK, SAID, ASK[1], SAID], reward=1) == {
        "prompt": [*ASK, SAID, ASK[1]],
        "response": "a",
        "meta": {},
        "reward": 1,
    }


def test_turns_with_tools_stay_whole() -> None:
    found = split([*ASK, RAW_CALL, TOOL, SAID], meta={"n": 1})
    assert found == {"prompt": ASK, "response": "a", "meta": {"n": 1, "continuation": [CALL, TOOL, SAID]}}
    assert split([*ASK, RAW_CALL]) == {
        "prompt": ASK,
        "response": "",
        "meta": {"continuation": [CALL]},
    }


def test_a_prompt_says_where_the_response_begins() -> None:
    found = split([*ASK, SAID, ASK[1], SAID], ASK)
    assert (found["prompt"], found["meta"]) == (ASK, {"continuation": [SAID, ASK[1], SAID]})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": ASK}, "the last one the assistant's"),
        ({"messages": "hello"}, "expected a list of messages"),
        ({"messages": [SAID]}, "expected a message of a user"),
        (
            {"messages": [*ASK, SAID], "prompt": [ASK[1]]},
            "prompt: expected the messages that the conversation begins with",
        ),
        ({"messages": [*ASK, SAID], "prompt": [*ASK, SAID]}, "messages after the prompt's 3"),
        ({"messages": [*ASK, SAID | {"content": [{"type": "image"}]}]}, "content: expected text"),
        ({"messages": [*ASK, SAID], "meta": 3}, "meta: expected an object"),
    ],
)
def test_what_is_no_such_conversation_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        split(**record)


def test_conversations_are_imported_and_exported(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    rows = [
        {"turns": [*ASK, RAW_CALL, TOOL, SAID], "score": 0.5},
        {"turns": [*ASK, SAID], "score": 1},
        {"turns": ASK, "score": 0},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mapping = {"messages": "turns", "reward": "score"}
    with Store.open(tmp_path / "store.db") as store:
        report = import_files(store, [file], mapping=mapping)
        assert (report.samples, report.groups, report.recognized) == (2, 1, "conversation records, mapped")
        assert [r.where for r in report.refused] == [f"{file}:3"]
        assert import_files(store, [file], mapping=mapping).duplicates == 2
        samples = list(store.samples())
    assert [s.meta.get("continuation") for s in samples] == [[CALL, TOOL, SAID], None]
    assert [(s.prompt, s.response, s.reward) for s in samples] == [(ASK, "a", 0.5), (ASK, "a", 1.0)]
    write_samples(tmp_path / "out.jsonl", samples)
    assert list(read_samples(tmp_path / "out.jsonl")) == samples
