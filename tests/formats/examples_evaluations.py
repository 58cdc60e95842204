"""Runs of HELM, whose states and statistics are files of a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from example import MISSING, Example

QUESTION = "Q: What is 2+2?\nA:"


def state(name: str, texts: list[str], **more: Any) -> dict[str, Any]:
    """A state of a request of HELM; nulls are left out."""
    end = {"finish_reason": {"reason": "stop"}, "logprob": -0.5, "tokens": [{"text": "4", "logprob": -0.5}]}
    reference = {"output": {"text": "4"}, "tags": ["correct"]}
    return {
        "instance": {
            "input": {"text": "What is 2+2?"},
            "references": [reference],
            "split": "test",
            "id": name,
        },
        "train_trial_index": 0,
        "request": {"model": "m", "prompt": QUESTION, "temperature": 0.5, "num_completions": len(texts)},
        "result": {"success": True, "completions": [{"text": text, **end} for text in texts]},
        **more,
    }


def stats(name: str, trial: int = 0, **means: float) -> dict[str, Any]:
    found = [
        {"name": {"name": k, "split": "test"}, "count": 1, "sum": v, "mean": v} for k, v in means.items()
    ]
    return {"instance_id": name, "train_trial_index": trial, "stats": found}


def helm(*scores: dict[str, Any]) -> Any:
    def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        path.mkdir()
        states = {"adapter_spec": {"method": "generation"}, "request_states": list(rows)}
        (path / "scenario_state.json").write_text(json.dumps(states))
        (path / "per_instance_stats.json").write_text(json.dumps(scores))

    return write


HELM = (
    Example(
        "helm",
        [
            state("id1", [" 4"]),
            state("id2", [" 5"]),
            state("id1", [" 4"], reference_index=0, request_mode="original"),
            state("id3", [], result={"success": False, "error": "quota", "completions": []}),
        ],
        [
            {
                "prompt": QUESTION,
                "response": " 4",
                "reward": 1.0,
                "source": "m",
                "sampling": {"temperature": 0.5},
                "meta": {
                    "answer": "4",
                    "instance": state("id1", [])["instance"],
                    "train_trial_index": 0,
                    "stats": {"em": 1.0},
                    "completion": {"logprob": -0.5, "tokens": [{"text": "4", "logprob": -0.5}]},
                    "finish": "stop",
                },
            },
            {"response": " 5", "reward": 0.0},
        ],
        file="run",
        write=helm(stats("id2", em=0.0), stats("id1", em=1.0), stats("id1", 1, em=0.5)),
        refused=["result.success: expected true, got False: quota"],
        corrupt={
            "instance": ("id1", "instance: expected an object, got 'id1'"),
            "request": ({}, "request.prompt: expected text, got None"),
            "result": (MISSING, "result.success: expected true, got None"),
        },
    ),
    Example(
        "helm",
        [state("id1", [" 4", " 5"])],
        [{"response": " 4", "reward": None}, {"response": " 5", "reward": None}],
        file="run",
        write=helm(stats("id1", em=1.0)),
    ),
    Example(
        "helm",
        [state("id1", [" 4"])],
        [{"response": " 4", "reward": 0.25}],
        file="run",
        write=helm(stats("id1", em=1.0, f1=0.25)),
        options={"rewards": {"f1": 1.0}},
    ),
)

EXAMPLES = HELM
