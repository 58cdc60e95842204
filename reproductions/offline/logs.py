"""The logs that are trained on, as stores, and the held-out prompts."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

from reproductions import harness

FOLDER = harness.SHARED / "peers/trl"
MODEL = FOLDER / "models/tiny"
LOG = FOLDER / "logged.jsonl.gz"
HELD_OUT = 1024
SLIP = 0.35  # how often the other writer adds wrongly in a step
COLUMNS = ("prompt=prompt", "response=responses", "reward=rewards")
WITH_LOGPS = (*COLUMNS, "tokens=token_ids", "behavior_logp=logprobs")


def task() -> Any:
    """The module that made the log."""
    spec = importlib.util.spec_from_file_location("task", harness.need(FOLDER / "task.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare(out: Path) -> dict[str, Path]:
    """The model's own log with and without its log-probs, that of an unknown mixture, and prompts.

    Written into `out` where they aren't there yet.
    """
    files = {name: out / f"{name}.db" for name in ("own", "plain", "mixture")}
    files |= {name: out / f"{name}.jsonl" for name in ("held_out", "prompts")}
    if all(f.exists() for f in files.values()):
        return files
    out.mkdir(parents=True, exist_ok=True)
    for f in files.values():
        f.unlink(missing_ok=True)
    harness.import_log(LOG, files["own"], WITH_LOGPS, "--tokenizer", MODEL)
    harness.import_log(LOG, files["plain"], COLUMNS)
    mixture = out / "mixture.jsonl"
    mixture.write_text(_mixture())
    harness.import_log(mixture, files["mixture"], COLUMNS)
    made = task()
    asked = {"held_out": made.make_prompts(HELD_OUT, made.EVAL_SEED)}
    asked["prompts"] = [group["prompt"] for group in groups()]
    for name, prompts in asked.items():
        harness.write_prompts(files[name], prompts, lambda prompt: str(_total(prompt)))
    return files


def groups() -> list[dict[str, Any]]:
    with gzip.open(harness.need(LOG), "rt", encoding="utf-8") as log:
        return [json.loads(line) for line in log]


def _mixture() -> str:
    """Two responses of the model and two of another writer for each prompt, graded by how far off they are.

    The reward is 1/(1 + |error|), 0 without a number. Nothing says who wrote what.
    """
    made, rng, lines = task(), random.Random(0), []
    for group in groups():
        prompt = group["prompt"]
        others = [made.solve(prompt, SLIP, rng) for _ in range(2)]
        responses = [*group["responses"][:2], *others]
        rewards = [_graded(prompt, text) for text in responses]
        lines.append(json.dumps({"prompt": prompt, "responses": responses, "rewards": rewards}) + "\n")
    return "".join(lines)


def _graded(prompt: str, response: str) -> float:
    answer = response.rpartition("#")[2]
    return 1 / (1 + abs(int(answer) - _total(prompt))) if answer.isdecimal() else 0.0


def _total(prompt: str) -> int:
    return sum(int(number) for number in prompt.rstrip("=").split("+"))
