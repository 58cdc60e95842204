"""The clock of the leaderboard, and the accuracy at which it stops. Needs torch and transformers only.

The board's own runs and those of TRL, in another environment, are measured by this one file.
"""

from __future__ import annotations

import json
import runpy
import time
from pathlib import Path
from typing import Any

import torch

GOAL = 0.90
BATCH = 256  # prompts that are answered at a time


class Clock:
    """CPU seconds of training until held-out accuracy reaches the goal. Measuring it isn't counted.

    `job` has: prompts and answers (lists), right (the function that scores completions), max_new (tokens),
    every (updates between two measurements).
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []
        self.began = time.process_time()

    def after(self, update: int, model: Any, tokenizer: Any) -> None:
        """After an update; 0 is before the first."""
        if update:
            self.seconds += time.process_time() - self.began
        if update % self.job["every"] == 0:
            share = accuracy(model, tokenizer, self.job)
            self.curve.append({"update": update, "cpu_seconds": self.seconds, "accuracy": share})
            print(f"update {update}: {self.seconds:.0f} CPU s, accuracy {share:.3f}", flush=True)
        self.began = time.process_time()

    def result(self) -> dict[str, Any]:
        """`minutes` is None where the goal isn't reached."""
        reached = [point for point in self.curve if point["accuracy"] >= GOAL]
        minutes = reached[0]["cpu_seconds"] / 60 if reached else None
        return {"minutes": minutes, "curve": self.curve}


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, job: dict[str, Any]) -> float:
    """Share of held-out prompts that are answered right, one response each at temperature 1."""
    texts: list[str] = []
    training, pad = model.training, tokenizer.pad_token_id
    model.eval()
    with torch.random.fork_rng(devices=[]):  # training stays as it is without measurements
        torch.manual_seed(0)
        for first in range(0, len(job["prompts"]), BATCH):
            rows = [tokenizer.encode(prompt) for prompt in job["prompts"][first : first + BATCH]]
            width = max(map(len, rows))
            tokens = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
            ids = model.generate(
                input_ids=tokens,
                attention_mask=mask,
                max_new_tokens=job["max_new"],
                pad_token_id=pad,
                eos_token_id=tokenizer.eos_token_id,
                **sampling,
            )
            texts += tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
    model.train(training)
    scores = job["right"](prompts=job["prompts"], completions=texts, answer=job["answers"])
    return float(sum(scores) / len(scores))


def load_job(folder: Path) -> dict[str, Any]:
    """A job from its folder: job.json, held_out.jsonl and reward.py; `model` and `log` are paths."""
    job: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    lines = (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {
        **job,
        "prompts": [row["prompt"] for row in rows],
        "answers": [row["answer"] for row in rows],
        "right": runpy.run_path(str(folder / "reward.py"))[job["right"]],
    }
