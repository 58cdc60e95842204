"""Exports of annotation tools."""

from __future__ import annotations

from typing import Any

from example import Example, json_list


def said(*values: Any) -> list[dict[str, Any]]:
    return [{"value": value, "user_id": str(i)} for i, value in enumerate(values)]


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
        write=json_list,
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
