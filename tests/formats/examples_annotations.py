"""Exports of annotation tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from example import Example, parquet_table


def one_list(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A JSON document that is a list."""
    path.write_text(json.dumps(list(rows)), encoding="utf-8")


def said(*values: Any) -> list[dict[str, Any]]:
    return [{"value": value, "user_id": str(i)} for i, value in enumerate(values)]


TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "A color?"},
]
PAIR = {"instruction": "A color?", "context": "For a wall.", "response-1": "No.", "response-2": "Blue."}
ARGILLA: dict[str, Any] = {
    "id": "r1",
    "fields": PAIR,
    "metadata": {"origin": "test"},
    "suggestions": {"preference": {"value": "response-1", "score": 0.9, "agent": "gpt-4"}},
    "responses": {
        "preference": said("response-2", "response-2", "response-1", "tie"),
        "comment": said("Good."),
    },
    "vectors": {},
    "_server_id": None,
}
ASKED = "A color?\nFor a wall."
RANKS = {"response-2": 1, "response-1": 2}
FEEDBACK: dict[str, Any] = {  # of 1.x
    "fields": PAIR,
    "metadata": {},
    "vectors": {},
    "responses": [
        {
            "user_id": "u",
            "status": "submitted",
            "values": {
                "ranking": {"value": [{"value": "response-2", "rank": 1}, {"value": "response-1", "rank": 2}]}
            },
        },
        {
            "user_id": "v",
            "status": "discarded",
            "values": {
                "ranking": {"value": [{"value": "response-1", "rank": 1}, {"value": "response-2", "rank": 2}]}
            },
        },
    ],
    "suggestions": [],
    "external_id": "7",
}
FLAT: dict[str, Any] = {
    "id": "r2",
    "status": "completed",
    "_server_id": "s2",
    "prompt": "A color?",
    "response": "Blue.",
    "source": "form",
    "quality.responses": [5, 3, 1],
    "quality.responses.users": ["u", "v", "w"],
    "quality.responses.status": ["submitted", "submitted", "draft"],
    "quality.suggestion": 4,
    "quality.suggestion.score": None,
    "quality.suggestion.agent": "gpt-4",
}
# Ratings of distilabel's generations, as Argilla 1.x wrote them with `datasets`.
DATASET: dict[str, Any] = {
    "instruction": "A color?",
    "generations-0": "Blue.",
    "generations-1": "No.",
    "generations-0-rating": [{"user_id": "u", "value": 5, "status": "submitted"}],
    "generations-0-rating-suggestion": 4,
    "generations-0-rating-suggestion-metadata": {"type": "model", "score": None, "agent": "gpt-4"},
    "generations-1-rating": [],
    "generations-1-rating-suggestion": 1,
    "generations-1-rating-suggestion-metadata": {"type": "model", "score": None, "agent": "gpt-4"},
    "ranking": [
        {
            "user_id": "u",
            "value": {"rank": [2, 1], "value": ["generations-0", "generations-1"]},
            "status": "submitted",
        }
    ],
    "ranking-suggestion": None,
    "ranking-suggestion-metadata": {"type": None, "score": None, "agent": None},
    "external_id": "e3",
    "metadata": '{"length": 5}',
}


def result(question: str, subject: str, kind: str, value: Any) -> dict[str, Any]:
    key = {"pairwise": "selected", "textarea": "text"}.get(kind, kind)
    return {
        "id": "x",
        "from_name": question,
        "to_name": subject,
        "type": kind,
        "value": {key: value},
        "origin": "manual",
    }


def annotation(*results: dict[str, Any], cancelled: bool = False) -> dict[str, Any]:
    return {"id": 9, "completed_by": 1, "result": list(results), "was_cancelled": cancelled, "lead_time": 4.5}


def task(data: dict[str, Any], *annotations: dict[str, Any]) -> dict[str, Any]:
    return {"id": 4, "data": data, "annotations": list(annotations), "project": 3}


SIDES = {"prompt": "A color?", "answer1": "No.", "answer2": "Blue.", "row": 7}
COMPARED = task(
    SIDES,
    annotation(result("comparison", "comparison", "pairwise", "right")),
    annotation(result("comparison", "answer2,answer1", "pairwise", "left")),
    annotation(result("comparison", "comparison", "pairwise", "left"), cancelled=True),
)
ITEMS = [{"id": name, "title": name, "body": body} for name, body in zip("abc", ("Red.", "Blue.", "No."))]
RANKED = task(
    {"prompt": "A color?", "items": ITEMS},
    annotation(result("rank", "answers", "ranker", ["b", "a", "c"])),
    annotation(result("rank", "answers", "ranker", {"rank": ["b", "c", "a"]})),
    annotation(result("rank", "answers", "ranker", {"good": ["b"], "bad": ["c"], "_": ["a"]})),
)

EXAMPLES = (
    Example(
        "argilla",
        [ARGILLA, {**ARGILLA, "responses": {}}],
        [
            {
                "prompt": ASKED,
                "response": "No.",
                "reward": None,
                "meta": {
                    "origin": "test",
                    "id": "r1",
                    "suggestions": ARGILLA["suggestions"],
                    "answers": {
                        "preference": ["response-2", "response-2", "response-1", "tie"],
                        "comment": ["Good."],
                    },
                },
            },
            {"response": "Blue."},
            {"response": "No."},
            {"response": "Blue."},
        ],
        pairs=[(1, 0)],
        groups=1,
        file="records.json",
        write=one_list,
        corrupt={
            "fields": ({"text": "A color?"}, "prompt: expected one of the fields prompt, instruction"),
            "responses": (7, "responses: expected a list of objects, got 7"),
        },
    ),
    Example(
        "argilla",
        [FEEDBACK],
        [
            {
                "prompt": ASKED,
                "response": "No.",
                "meta": {"external_id": "7", "answers": {"ranking": [RANKS]}},
            },
            {"response": "Blue."},
        ],
        pairs=[(1, 0)],
    ),
    Example(  # texts that people wrote
        "argilla",
        [{**ARGILLA, "fields": {"chat": TALK}, "responses": {"best": said("Blue."), "why": said("Sky.")}}],
        [{"prompt": TALK, "response": "Blue.", "role": "expert"}],
        options={"choose": {"response": "best"}},
        corrupt={"fields": ({"chat": "Hi", "best": 7}, "best: expected text, got 7")},
    ),
    Example(
        "argilla-datasets",
        [FLAT, {**FLAT, "quality.responses": [None, 2, 1]}],
        [
            {
                "prompt": "A color?",
                "response": "Blue.",
                "reward": 4.0,
                "meta": {
                    "id": "r2",
                    "status": "completed",
                    "_server_id": "s2",
                    "source": "form",
                    "quality.suggestion": 4,
                    "quality.suggestion.agent": "gpt-4",
                    "answers": {"quality": [5, 3]},
                },
            },
            {"reward": 2.0},
        ],
        options={"choose": {"scores": "mean"}},
        corrupt={
            "prompt": (None, "prompt: expected one of the fields"),
            "quality.responses": (5, "quality.responses: expected a list, got 5"),
        },
    ),
    Example(
        "argilla-feedback",
        [DATASET],
        [
            {
                "prompt": "A color?",
                "response": "Blue.",
                "reward": 5.0,
                "meta": {
                    "length": 5,
                    "external_id": "e3",
                    "generations-0-rating-suggestion": 4,
                    "generations-0-rating-suggestion-metadata": {"type": "model", "agent": "gpt-4"},
                    "generations-1-rating-suggestion": 1,
                    "generations-1-rating-suggestion-metadata": {"type": "model", "agent": "gpt-4"},
                    "answers": {
                        "generations-0-rating": [5],
                        "ranking": [{"generations-0": 2, "generations-1": 1}],
                    },
                },
            },
            {"response": "No.", "reward": None},
        ],
        pairs=[(1, 0)],
        file="train.parquet",
        write=parquet_table,
    ),
    Example(
        "label-studio",
        [COMPARED],
        [
            {
                "prompt": "A color?",
                "response": "No.",
                "reward": None,
                "meta": {"id": 4, "project": 3, "row": 7, "answers": {"comparison": ["answer2", "answer2"]}},
            },
            {"response": "Blue."},
        ],
        pairs=[(1, 0)],
        file="export.json",
        write=one_list,
        corrupt={
            "annotations": (
                [annotation(result("comparison", "comparison", "pairwise", "middle"))],
                "pairwise.selected: expected one of left, right, got 'middle'",
            ),
            "data": ({"prompt": "A color?", "answer1": "No."}, "pairwise: expected two responses in data"),
        },
    ),
    Example(  # 2 of 2 for b over the others, 1 of 2 for each of a and c; buckets are no ranking
        "label-studio",
        [RANKED],
        [{"prompt": "A color?", "response": "Red."}, {"response": "Blue."}, {"response": "No."}],
        pairs=[(1, 0), (0, 2), (1, 2)],
        corrupt={
            "data": (
                {"prompt": "?", "items": [ITEMS[0], ITEMS[0]]},
                "items.1..id: expected one that no other",
            )
        },
    ),
    Example(
        "label-studio",
        [
            task(
                {"document": "It is blue.", "summary": "Blue."},
                annotation(
                    result("rating", "summary", "rating", 4), result("flags", "summary", "choices", ["ok"])
                ),
            ),
            task({"document": "It is red.", "summary": "Red."}),
        ],
        [
            {
                "prompt": "It is blue.",
                "response": "Blue.",
                "reward": 4.0,
                "meta": {"id": 4, "project": 3, "answers": {"rating": [4], "flags": ["ok"]}},
            },
            {"response": "Red.", "reward": None},
        ],
        options={"choose": {"prompt": "document", "response": "summary"}},
    ),
    Example(  # texts that people wrote; a task that nobody did is left out
        "label-studio",
        [
            task({"prompt": "A color?"}, annotation(result("instruction", "prompt", "textarea", ["Blue."]))),
            task({"prompt": "Another?"}),
        ],
        [{"prompt": "A color?", "response": "Blue.", "role": "expert"}],
    ),
)
