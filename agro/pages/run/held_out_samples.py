"""Responses to held-out prompts at every evaluation, for the page's browser of samples.

They come from `held_out.jsonl` (the first prompts that are evaluated) and from `side_by_side.json` (prompts
chosen by a hash, with the best response of the log).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from agro.errors import Refused
from agro.io.strictjson import loads
from agro.runs.rundata import RunData
from agro.runs.side_by_side import Answer, SideBySide
from agro.types import Text, prompt_hash

LONGEST = 2000  # characters of a text on the page
TOTAL = 1_500_000  # characters of all responses on the page; beyond it evaluations are left out evenly


@dataclass(frozen=True)
class PromptResponses:
    """A prompt with the response of each evaluation that has one, by step, and the best one of the log."""

    prompt: Text
    responses: Mapping[int, Answer]
    answer: Any = None
    log: Answer | None = None
    key: str = ""  # the prompt's id


@dataclass(frozen=True)
class HeldOutSamples:
    """Prompts in their order. `steps`: those of the evaluations on the page; `best`: the best of them, None
    where it isn't known. `about`: where the responses come from."""

    prompts: tuple[PromptResponses, ...]
    steps: tuple[int, ...]
    best: int | None
    about: str

    @property
    def columns(self) -> list[tuple[str, int]]:
        """What the page shows beside each other without its script: names and steps, in their order."""
        if not self.steps:
            return []
        first, last = self.steps[0], self.steps[-1]
        names = {first: "the start" if first == 0 else f"step {first}"}
        if self.best is not None:
            names.setdefault(self.best, f"step {self.best}, the best")
        names.setdefault(last, f"the trained model, step {last}")
        return [(names[step], step) for step in sorted(names)]

    @property
    def data(self) -> Markup:
        """Every response as JSON: `steps`, and by prompt and step its parts with its reward, or null.

        No character of it ends the element that holds it.
        """
        rows = [
            [None if (a := p.responses.get(step)) is None else [a.parts, a.reward] for step in self.steps]
            for p in self.prompts
        ]
        text = json.dumps({"steps": self.steps, "responses": rows}, allow_nan=False)
        escapes = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}
        return Markup(text.translate(escapes))


def held_out_samples(run: RunData) -> HeldOutSamples | None:
    """None where no response was recorded. Raises `Refused` naming FILE:LINE."""
    evaluated = _evaluated(run.folder / "held_out.jsonl")
    beside = SideBySide.load(run.folder)
    prompts = _with_log(evaluated, beside)
    if not any(p.responses or p.log for p in prompts):
        return None
    best = None
    if run.best_row is not None:
        best = int(run.rows[run.best_row]["step"])
    every = sorted({step for p in prompts for step in p.responses})
    if best not in every:
        best = None
    size = sum(len(a.response) for p in prompts for a in p.responses.values())
    stride = max(1, math.ceil(size / TOTAL))
    steps = [s for i, s in enumerate(every) if i % stride == 0 or s in (best, every[-1])]
    about = []
    if evaluated:
        about.append(
            f"One response each to the first {len(evaluated)} held-out prompts at every evaluation, with "
            "the same random numbers."
        )
    if beside is not None and ("log" in beside.sides or not evaluated):
        about.append(beside.about)
    return HeldOutSamples(tuple(prompts), tuple(steps), best, " ".join(about))


def _evaluated(path: Path) -> list[PromptResponses]:
    """The prompts of held_out.jsonl, in the order of its last evaluation."""
    if not path.exists():
        return []
    found: dict[str, PromptResponses] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):  # what has no newline is torn
        try:
            row = loads(line.decode("utf-8"))
            step, responses = (
                int(row["step"]),
                [(r["prompt"], _answer(r), r.get("answer"), _key(r)) for r in row["responses"]],
            )
        except (ValueError, TypeError, KeyError) as error:
            raise Refused(f"{path}:{number}: expected the responses of an evaluation: {error}") from None
        for prompt, response, answer, key in responses:
            earlier = found.pop(key, None)
            before = {} if earlier is None else earlier.responses
            found[key] = PromptResponses(prompt, {**before, step: response}, answer, key=key)
    return list(found.values())


def _key(row: Mapping[str, Any]) -> str:
    """The id of a prompt, of which several may have one text; that of runs of earlier versions."""
    return str(row.get("prompt_id") or prompt_hash(row["prompt"]))


def _answer(row: Mapping[str, Any]) -> Answer:
    reward = row["reward"]
    if reward is not None and not math.isfinite(float(reward)):
        reward = None
    return Answer(str(row["response"])[:LONGEST], reward, row.get("observations", []))


def _with_log(evaluated: list[PromptResponses], beside: SideBySide | None) -> list[PromptResponses]:
    """The evaluated prompts with the log's responses, and then those that are only in `beside`."""
    if beside is None:
        return evaluated
    rows = {row.prompt_id: row for row in beside.rows}
    prompts = []
    for p in evaluated:
        row = rows.pop(p.key, None)
        prompts.append(p if row is None else replace(p, log=row.log))
    for row in rows.values():
        answers = {0: row.start}
        if beside.step is not None:
            answers[beside.step] = row.trained
        prompts.append(
            PromptResponses(row.prompt, {k: a for k, a in answers.items() if a is not None}, log=row.log)
        )
    return prompts
