"""Logs of trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from example import MISSING, Example
from pyarrow import parquet


def table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A Parquet file."""
    parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)


VERL = {
    "input": "user\nWhat is 2+2?\nassistant\n",
    "output": "4",
    "gts": "4",
    "score": 1.0,
    "step": 3,
    "acc": True,
}
SKY = [{"role": "user", "content": "What color is the sky?"}]
ANSWER = [{"role": "assistant", "content": "It is blue."}]
CLAIM = [{"role": "assistant", "content": "It is green."}]
CALL = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}],
    },
    {"role": "tool", "name": "look", "content": "blue"},
]

EXAMPLES = (
    Example(
        "verl-rollouts",
        [VERL, {**VERL, "output": "5", "score": 0.0, "acc": False}, {**VERL, "output": "?", "score": None}],
        [
            {
                "prompt": "user\nWhat is 2+2?\nassistant\n",
                "response": "4",
                "reward": 1.0,
                "meta": {"answer": "4", "step": 3, "acc": True},
            },
            {"response": "5", "reward": 0.0},
            {"response": "?", "reward": None},
        ],
        file="3.jsonl",
        corrupt={
            "input": (7, "input: expected text, got 7"),
            "output": (None, "output: expected text, got None"),
            "score": ("1.0", "score: expected a finite number, or null"),
            "step": (1.5, "step: expected an integer, got 1.5"),
        },
    ),
    Example(
        "verl-rollouts",
        [{**VERL, "uid": uid, "output": uid} for uid in ("a_0_0", "a_0_1", "a_1_0", "b_0_0")],
        [
            {"prompt_id": "DIR/3.jsonl:a", "episode": "DIR/3.jsonl:a_0"},
            {"prompt_id": "DIR/3.jsonl:a", "episode": "DIR/3.jsonl:a_0"},
            {"prompt_id": "DIR/3.jsonl:a", "episode": "DIR/3.jsonl:a_1"},
            {"prompt_id": "DIR/3.jsonl:b", "episode": "DIR/3.jsonl:b_0"},
        ],
        file="DIR/3.jsonl",
        groups=2,
        corrupt={
            "uid": ("a0", "uid: expected SAMPLE_ROLLOUT_OUTPUT, got 'a0'"),
            "num_turns": (4, "num_turns: 4 turns in one text"),
        },
    ),
    Example(
        "trl-completions",
        [
            {"step": 1, "prompt": "2+2=", "completion": "4", "exact": 1.0, "advantage": 0.7},
            {"step": 1, "prompt": "2+2=", "completion": "5", "exact": 0.0, "advantage": -0.7},
            {"step": 1, "prompt": "2+2=", "completion": "?", "exact": None, "advantage": None},
        ],
        [
            {
                "prompt": "2+2=",
                "response": "4",
                "reward": 1.0,
                "meta": {"step": 1, "exact": 1.0, "advantage": 0.7},
            },
            {"response": "5", "reward": 0.0},
            {"response": "?", "reward": None},
        ],
        file="completions_00001.parquet",
        write=table,
    ),
    Example(
        "trl-completions",
        [{"step": 1, "prompt": SKY, "completion": ANSWER, "a": 1.0, "b": 0.5, "advantage": 0.0}],
        [{"prompt": SKY, "response": "It is blue.", "reward": 2.0}],
        options={"rewards": {"a": 1.5, "b": 1.0}},
        corrupt={
            "a": (MISSING, "--reward a: no such column; there are b"),
            "completion": (SKY, "the last one the assistant's"),
        },
    ),
    Example(
        "trl-preference",
        [{"chosen": SKY + ANSWER, "rejected": SKY + CLAIM}],
        [{"prompt": SKY, "response": "It is blue.", "meta": {}}, {"prompt": SKY, "response": "It is green."}],
        pairs=[(0, 1)],
        corrupt={"rejected": (CLAIM, "prompt: expected chosen and rejected to begin with the same messages")},
    ),
    Example(
        "trl-unpaired",
        [
            {"prompt": "2+2=", "completion": "4", "label": True},
            {"prompt": "2+2=", "completion": "5", "label": False},
        ],
        [{"prompt": "2+2=", "response": "4", "reward": 1.0}, {"response": "5", "reward": 0.0}],
        corrupt={"label": (1, "label: expected true or false, got 1")},
    ),
    Example(
        "trl-prompt-completion",
        [{"prompt": "2+2=", "completion": "4"}],
        [{"prompt": "2+2=", "response": "4", "reward": None, "role": "expert"}],
        corrupt={"completion": (4, "completion: expected text or a list of messages, got 4")},
    ),
    Example(
        "trl-preference",
        [
            {
                "prompt": SKY,
                "chosen": SKY + ANSWER,
                "rejected": SKY + CLAIM,
                "score_chosen": 8.5,
                "score_rejected": 3,
            }
        ],
        [
            {"prompt": SKY, "response": "It is blue.", "reward": 8.5},
            {"prompt": SKY, "response": "It is green.", "reward": 3.0},
        ],
        pairs=[(0, 1)],
        corrupt={
            "score_chosen": ("high", "score_chosen: expected a number or 'N/A', got 'high'"),
            "score_rejected": ([3], "score_rejected: expected a finite number"),
            "prompt": (4, "prompt: expected text or a list of messages, got 4"),
            "chosen": (CLAIM + SKY, "the last one the assistant's"),
        },
    ),
    Example(
        "trl-preference",
        [{"chosen": "The sky is blue.", "rejected": "The sky is black."}],
        [{"prompt": "The sky is", "response": " blue."}, {"prompt": "The sky is", "response": " black."}],
        pairs=[(0, 1)],
        corrupt={"rejected": ("The sky is blue.", "begin with the same text, and then differ")},
    ),
    Example(
        "trl-unpaired",
        [{"prompt": SKY, "completion": ANSWER, "label": True}],
        [{"prompt": SKY, "response": "It is blue.", "reward": 1.0}],
        corrupt={"completion": (SKY, "the last one the assistant's")},
    ),
    Example(
        "trl-prompt-completion",
        [{"prompt": SKY, "completion": ANSWER, "topic": "sky"}],
        [{"prompt": SKY, "response": "It is blue.", "role": "expert", "meta": {"topic": "sky"}}],
        corrupt={"prompt": (4, "prompt: expected text or a list of messages, got 4")},
    ),
    Example(
        "trl-stepwise",
        [
            {
                "prompt": "Which is larger?",
                "completions": ["9.8 is larger.", "So 9.11."],
                "labels": [True, False],
            }
        ],
        [
            {
                "prompt": "Which is larger?",
                "response": "9.8 is larger.\nSo 9.11.",
                "reward": None,
                "meta": {"steps": ["9.8 is larger.", "So 9.11."], "step_labels": [True, False]},
            }
        ],
        corrupt={
            "prompt": (SKY, "prompt: expected text, got"),
            "completions": (["9.8", 9], r"completions\[1\]: expected text, got 9"),
            "labels": ([True], "labels: expected 2 of true and false, as completions has"),
        },
    ),
    Example(  # NaN is what a reward function gave None for
        "trl-completions",
        [
            {"step": 1, "prompt": "2+2=", "completion": "4", "a": float("nan"), "b": 1.0, "advantage": 0.0},
            {"step": 1, "prompt": "2+2=", "completion": "4", "a": None, "b": float("nan"), "advantage": 0.0},
        ],
        [{"reward": 2.0, "meta": {"step": 1, "b": 1.0, "advantage": 0.0}}, {"reward": None}],
        file="completions_00002.parquet",
        write=table,
        groups=1,
        options={"rewards": {"a": 1.0, "b": 2.0}},
    ),
    Example(  # tools
        "trl-completions",
        [{"step": 2, "prompt": SKY, "completion": [*CALL, *ANSWER], "a": 1.0, "advantage": 0.0}],
        [
            {
                "prompt": SKY,
                "response": "It is blue.",
                "meta": {"step": 2, "a": 1.0, "advantage": 0.0, "continuation": [*CALL, *ANSWER]},
            }
        ],
        corrupt={
            "prompt": (7, "prompt: expected text or a list of messages, got 7"),
            "step": ("x", "step: expected"),
        },
    ),
)
