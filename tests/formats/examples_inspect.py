"""Logs of Inspect: zip files with one member a sample or several, and JSON."""

from __future__ import annotations

import json
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard
from example import Example

TASK = {
    "task": "addition",
    "task_id": "t",
    "model": "openai/gpt-x",
    "model_generate_config": {"temperature": 0.5},
}
HEADER = {"version": 2, "status": "success", "eval": TASK, "plan": {}, "results": {}, "stats": {}}


def document(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text(json.dumps({**HEADER, "samples": list(rows)}))


def members(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"_journal/start.json": {"version": 2, "eval": TASK}, "summaries.json": []}
    for at, row in enumerate(rows):
        found[f"samples/{at}_epoch_{row.get('epoch')}.json"] = row
    return found | {"header.json": HEADER}


def deflated(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """As older versions wrote it; it isn't finished, and has no header yet."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in members(rows).items():
            if name != "header.json":
                archive.writestr(name, json.dumps(value))


def zstd(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    packed(path, members(rows))


def chunked(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The messages in parts of two, and the attachments, of the first sample; the others in one member."""
    found = members(rows)
    shell = dict(found.pop(f"samples/0_epoch_{rows[0].get('epoch')}.json"))
    messages = shell.pop("messages")
    for start in range(0, len(messages), 2):
        found[f"samples/0_epoch_1/messages/{start}.json"] = messages[start : start + 2]
    found["samples/0_epoch_1/attachments/0.json"] = ["unused", "What is 2+2?"]
    found["samples/0_epoch_1/events/stats.json"] = {}
    packed(path, found | {"samples/0_epoch_1/sample.json": shell})


def packed(path: Path, found: Mapping[str, Any]) -> None:
    """A zip file whose members are packed with Zstandard, which Python writes from 3.14 on."""
    body, directory = b"", b""
    for name, value in found.items():
        data = json.dumps(value).encode()
        small = zstandard.compress(data)
        sizes = (zlib.crc32(data), len(small), len(data), len(name), 0)
        central = struct.pack("<4s6H3L5H2L", b"PK\1\2", 63, 63, 0, 93, 0, 33, *sizes, 0, 0, 0, 0, len(body))
        directory += central + name.encode()
        body += struct.pack("<4s5H3L2H", b"PK\3\4", 63, 0, 93, 0, 33, *sizes) + name.encode() + small
    count = len(found)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), len(body), 0)
    path.write_bytes(body + directory + end)


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {
        "id": "m",
        "content": content,
        "source": "generate",
        "role": "assistant",
        "model": "gpt-x",
        **more,
    }


def given(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"id": "m", "content": content, "source": "input", "role": role, **more}


def choice(content: Any, stop: str = "stop") -> dict[str, Any]:
    return {"message": said(content), "stop_reason": stop}


def score(value: Any, **more: Any) -> dict[str, Any]:
    return {"value": value, "answer": "4", "explanation": None, "metadata": None, "history": [], **more}


def sample(epoch: int, content: Any, value: Any = "C", **more: Any) -> dict[str, Any]:
    return {
        "id": 1,
        "epoch": epoch,
        "input": "What is 2+2?",
        "choices": None,
        "target": "4",
        "messages": [given("user", "What is 2+2?"), said(content)],
        "output": {"model": "gpt-x", "choices": [choice(content)], "completion": content, "error": None},
        "scores": {"match": score(value)},
        "metadata": {},
        "events": [{"event": "model"}],
        "attachments": {},
        "error": None,
        "limit": None,
        **more,
    }


ASK = [{"role": "user", "content": "What is 2+2?"}]
EDITED = score("I", history=[{"value": "I"}, {"value": 0.75}, {"value": "UNCHANGED", "answer": "5"}])
CALL = {"id": "c", "function": "add", "arguments": {"a": 2, "b": 2}, "type": "function"}
LONG = [
    given("system", "Be brief."),
    given("user", "What is 1+1?"),
    given("assistant", "2"),
    given("user", "attachment://1"),
    said([{"type": "reasoning", "reasoning": "Add."}, {"type": "text", "text": ""}], tool_calls=[CALL]),
    {"role": "tool", "content": "4", "tool_call_id": "c", "function": "add"},
    said("It is 4."),
    {"role": "user", "content": "Go on."},
]
EXAMPLES = (
    Example(
        "inspect",
        [
            sample(1, "4"),
            sample(2, "5", "I"),
            sample(3, "4?", "P"),
            sample(4, "No.", "N"),
            sample(5, "Four", None),
            sample(6, "IV", "I", scores={"match": EDITED}),
            sample(7, "4!", 0.25, limit={"type": "token", "limit": 9}),
        ],
        [
            {
                "prompt": ASK,
                "response": "4",
                "reward": 1.0,
                "source": "openai/gpt-x",
                "sampling": {"temperature": 0.5},
                "meta": {
                    "answer": "4",
                    "id": 1,
                    "epoch": 1,
                    "scores": {"match": score("C")},
                    "finish": "stop",
                },
            },
            {"response": "5", "reward": 0.0},
            {"response": "4?", "reward": 0.5},
            {"response": "No.", "reward": 0.0},
            {"response": "Four", "reward": None},
            {"response": "IV", "reward": 0.75},
            {
                "response": "4!",
                "reward": 0.25,
                "meta": {
                    "answer": "4",
                    "id": 1,
                    "epoch": 7,
                    "scores": {"match": score(0.25)},
                    "finish": "stop",
                    "limit": {"type": "token", "limit": 9},
                },
            },
        ],
        file="log.eval",
        write=zstd,
        groups=1,
        corrupt={
            "output": ("4", "output: expected an object, got '4'"),
            "scores": ({"match": score("maybe")}, "scores.match.value: expected a number, C, I, P, N"),
            "messages": ("4", "messages: expected a list of objects, got '4'"),
        },
    ),
    Example(
        "inspect",
        [
            sample(1, "It is 4.", messages=LONG, attachments={}),
            sample(1, "4", messages=[], input="attachment://hash", attachments={"hash": "What is 2+2?"}),
        ],
        [
            {
                "prompt": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "What is 1+1?"},
                    {"role": "assistant", "content": "2"},
                    {"role": "user", "content": "What is 2+2?"},
                ],
                "response": "It is 4.",
                "meta": {
                    "continuation": [
                        {
                            "role": "assistant",
                            "content": "",
                            "reasoning_content": "Add.",
                            "tool_calls": [
                                {
                                    "id": "c",
                                    "type": "function",
                                    "function": {"name": "add", "arguments": {"a": 2, "b": 2}},
                                }
                            ],
                        },
                        {"role": "tool", "content": "4", "tool_call_id": "c", "name": "add"},
                        {"role": "assistant", "content": "It is 4."},
                    ],
                    "answer": "4",
                    "id": 1,
                    "epoch": 1,
                    "scores": {"match": score("C")},
                    "finish": "stop",
                },
            },
            {"prompt": ASK, "response": "4"},
        ],
        file="log.eval",
        write=chunked,
    ),
    Example(
        "inspect",
        [
            sample(1, "4", messages=[], output={"choices": [choice("4", "max_tokens"), choice("5")]}),
            sample(2, "", messages=ASK, output={"choices": []}, error={"message": "out of money"}),
        ],
        [{"response": "4", "reward": 1.0}, {"response": "5", "reward": None}],
        file="log.eval",
        write=deflated,
        refused=["no response was generated; error: out of money"],
        corrupt={"input": (7, "input: expected a list of objects, got 7")},
    ),
    Example(
        "inspect",
        [
            sample(1, "4", scores={"match": score("C"), "judge": score({"style": 0.5, "truth": 1})}),
            sample(2, "5", scores={"match": score("I"), "judge": score({"style": math.nan, "truth": 0})}),
        ],
        [{"response": "4", "reward": 0.5}, {"response": "5", "reward": None}],
        file="log.json",
        write=document,
        options={"choose": {"scorer": "judge"}, "rewards": {"style": 1.0}},
        corrupt={
            "scores": ({"match": score("C")}, "expected --choose scorer=NAME of match, got judge"),
        },
    ),
)
