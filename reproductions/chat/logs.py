"""The log that two of the jobs train on: responses of the start, with rewards or with thumbs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agro.config import PolicyConfig, SamplerConfig
from agro.models.policy import Policy
from agro.rollout.prompts import load_prompts
from agro.types import Sample
from reproductions import harness

TEMPERATURE, RESPONSES, MAX_NEW = 0.8, 4, 8
FLIPPED = 0.1  # share of thumbs that are wrong


class Files:
    """Where the data are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trained, self.held_out = folder / "trained.jsonl", folder / "held_out.jsonl"
        self.log, self.thumbs = folder / "log.jsonl", folder / "thumbs.jsonl"
        self.texts, self.facts = folder / "texts.json", folder / "facts.json"  # of the start, of the data

    def store(self, job: str) -> Path:
        """Of all runs of a job, so that the reference's log-probs of a response are computed once."""
        return self.folder / f"{job}.db"


def write(model: Path, files: Files) -> dict[str, Any]:
    """Sample the start at another temperature; write all responses, and the first ones with thumbs."""
    began = time.process_time()
    policy = Policy.load(PolicyConfig(model=str(model), threads=1))
    sampler = SamplerConfig(n=RESPONSES, temperature=TEMPERATURE, max_new=MAX_NEW, batch=256)
    samples = harness.responses(policy, load_prompts(files.trained), sampler)
    noise = random.Random(0)
    rows = [{"prompt": s.prompt, "response": s.response, "reward": right(s)} for s in samples]
    firsts = [
        {"prompt": s.prompt, "response": s.response, "thumb": thumb(right(s), noise)}
        for s in samples[::RESPONSES]
    ]
    for path, records in ((files.log, rows), (files.thumbs, firsts)):
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return {
        "log": {"responses": len(rows), "right": sum(r["reward"] for r in rows) / len(rows)},
        "mixed_groups": mixed([r["reward"] for r in rows]),
        "thumbs": {"responses": len(firsts), "up": sum(r["thumb"] == "up" for r in firsts) / len(firsts)},
        "cpu_seconds": time.process_time() - began,
    }


def right(sample: Sample) -> float:
    """As the library's reward `exact`."""
    return float(sample.response.strip() == sample.meta["answer"])


def thumb(reward: float, noise: random.Random) -> str:
    is_up = bool(reward) != (noise.random() < FLIPPED)
    return "up" if is_up else "down"


def mixed(rewards: Sequence[float]) -> int:
    """Prompts whose responses have different rewards."""
    groups = [rewards[i : i + RESPONSES] for i in range(0, len(rewards), RESPONSES)]
    return sum(len(set(group)) > 1 for group in groups)


def import_into(store: Path, files: Files, job: str) -> None:
    if job == "log":
        harness.import_log(files.log, store, ["reward=reward"])
    else:
        harness.import_log(files.thumbs, store, ["reward=thumb"], "--reward-map", "up=1,down=0")
