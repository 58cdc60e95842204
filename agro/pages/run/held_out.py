"""Responses to the first held-out prompts, from held_out.jsonl: how they changed over the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from agro.errors import Refused
from agro.io.strictjson import loads
from agro.runs.rundata import RunData
from agro.types import Text


@dataclass(frozen=True)
class HeldOutResponse:
    """A response at a step, and its reward (None: scoring failed)."""

    step: int
    response: str
    reward: float | None
    best: bool  # whether this is the step with the best held-out measurement


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt with the responses of the first, the best and the last evaluation."""

    prompt: Text
    answer: Any
    responses: tuple[HeldOutResponse, ...]


def held_out(run: RunData) -> list[HeldOutPrompt]:
    """The prompts in their order; empty without the file. Raises `Refused` naming FILE:LINE."""
    path = run.folder / "held_out.jsonl"
    if not path.exists():
        return []
    evaluations = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # what has no newline is torn
        try:
            row = loads(line.decode("utf-8"))
            evaluations[int(row["step"])] = {_key(r): r for r in row["responses"]}
        except (ValueError, TypeError, KeyError) as error:
            raise Refused(f"{path}:{number}: expected the responses of an evaluation: {error}") from None
    if not evaluations:
        return []
    best: int = -1
    if run.best_row is not None:
        best = run.rows[run.best_row]["step"]
    shown = {min(evaluations), best, max(evaluations)}
    prompts = []
    for key, row in evaluations[max(evaluations)].items():
        steps = [step for step in sorted(evaluations) if step in shown and key in evaluations[step]]
        responses = [_response(step, evaluations[step][key], best) for step in steps]
        prompts.append(HeldOutPrompt(row["prompt"], row.get("answer"), tuple(responses)))
    return prompts


def _key(row: dict[str, Any]) -> str:
    return repr(row["prompt"])


def _response(step: int, row: dict[str, Any], best: int) -> HeldOutResponse:
    reward = row["reward"]
    if reward is not None and not math.isfinite(float(reward)):
        reward = None
    return HeldOutResponse(step, str(row["response"]), reward, step == best)
