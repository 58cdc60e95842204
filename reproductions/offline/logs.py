"""The log that is trained on, as a store, its prompts, and the held-out ones."""

from __future__ import annotations

import gzip
import json
import runpy
from pathlib import Path
from typing import Any

from reproductions import harness

FOLDER = harness.SHARED / "peers/trl"
MODEL = FOLDER / "models/tiny"
LOG = FOLDER / "logged.jsonl.gz"
HELD_OUT = 1024
COLUMNS = ("prompt=prompt", "response=responses", "reward=rewards")


def prepare(out: Path) -> dict[str, Path]:
    """The model's own log with its log-probs, and prompts, written into `out` where they aren't there yet."""
    files = {"own": out / "own.db"} | {name: out / f"{name}.jsonl" for name in ("held_out", "prompts")}
    if all(f.exists() for f in files.values()):
        return files
    out.mkdir(parents=True, exist_ok=True)
    for f in files.values():
        f.unlink(missing_ok=True)
    with_logps = (*COLUMNS, "tokens=token_ids", "behavior_logp=logprobs")
    harness.import_log(LOG, files["own"], with_logps, "--tokenizer", MODEL)
    task = runpy.run_path(str(harness.need(FOLDER / "task.py")))  # which made the log
    asked = {"held_out": task["make_prompts"](HELD_OUT, task["EVAL_SEED"])}
    asked["prompts"] = [group["prompt"] for group in groups()]
    for name, prompts in asked.items():
        harness.write_prompts(
            files[name], prompts, lambda prompt: str(sum(map(int, prompt.rstrip("=").split("+"))))
        )
    return files


def groups() -> list[dict[str, Any]]:
    with gzip.open(harness.need(LOG), "rt", encoding="utf-8") as log:
        return [json.loads(line) for line in log]
