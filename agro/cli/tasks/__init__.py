"""First tasks: a folder with everything to train a small new model, without a download."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.io.peers import did_you_mean

Rows = dict[str, list[dict[str, Any]]]


def _digits(rng: random.Random) -> Rows:
    """Sort three digits."""
    numbers = [f"{number:03}" for number in range(1000)]
    rng.shuffle(numbers)
    prompts = [{"prompt": f"{number}>", "answer": "".join(sorted(number))} for number in numbers]
    return {"prompts.jsonl": prompts[:700], "held_out.jsonl": prompts[700:956]}


def _own_log(rng: random.Random) -> Rows:
    """Sort four digits, from the log of a careless writer, who replaces a fifth of the digits at random."""
    numbers = [f"{number:04}" for number in range(10_000)]
    rng.shuffle(numbers)
    log = []
    for number in numbers[:2000]:
        for _ in range(4):
            text = "".join(rng.choice("0123456789") if rng.random() < 0.2 else d for d in sorted(number))
            right = text == "".join(sorted(number))
            log.append({"question": f"{number}>", "output": text, "score": float(right)})
    prompts = [{"prompt": f"{number}>", "answer": "".join(sorted(number))} for number in numbers[2000:2256]]
    return {"log.jsonl": log, "held_out.jsonl": prompts}


def _chat(rng: random.Random) -> Rows:
    """Say which of two digits is larger, in chat messages."""
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    rng.shuffle(pairs)
    questions = []
    for a, b in pairs:
        message = {"role": "user", "content": f"{a} or {b}?"}
        questions.append({"prompt": [message], "answer": str(max(a, b))})
    return {"prompts.jsonl": questions[:60], "held_out.jsonl": questions[60:]}


def _multi_turn(rng: random.Random) -> Rows:
    """Guess a digit between two others in at most three turns."""
    prompts = []
    for low in range(10):
        for high in range(low + 3, 10):
            for secret in range(low, high + 1):
                ranged = f"{low}-{high}:"
                prompts.append({"prompt": ranged, "secret": secret, "prompt_id": f"{ranged}{secret}"})
    rng.shuffle(prompts)
    return {"prompts.jsonl": prompts[40:], "held_out.jsonl": prompts[:40]}


class StarterTask(NamedTuple):
    """`rows`: generates its JSONL files' lines at random; its other files lie in a folder of its name.

    `minutes`: CPU time of `agro train recipe.toml` on one thread of an Intel Xeon (2 shared cores).
    """

    title: str
    rows: Callable[[random.Random], Rows]
    minutes: float


TASKS = {
    "digits": StarterTask("sort digits: fresh samples and a reward function", _digits, 0.6),
    "own-log": StarterTask(
        "become better than another model, from a JSONL log of its responses", _own_log, 0.6
    ),
    "chat": StarterTask("prompts that are messages, and a chat template", _chat, 0.4),
    "multi-turn": StarterTask("episodes of several turns with an environment", _multi_turn, 0.5),
}


def create(folder: Path, name: str) -> list[Path]:
    """Write a task's files, the same each time, and return their paths.

    Raises `Refused` for an unknown task or a folder that isn't empty.
    """
    name = name.replace("_", "-")
    if name not in TASKS:
        raise Refused(
            f"--task: expected one of {', '.join(TASKS)}, got {name!r}; {did_you_mean(name, TASKS)}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder}: expected an empty or a new folder; use another name")
    task = TASKS[name]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for source in sorted((Path(__file__).parent / name.replace("-", "_")).glob("[!_.]*.*")):
        written.append(Path(shutil.copy(source, folder / source.name)))
    for name, rows in task.rows(random.Random(0)).items():
        path = folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        written.append(path)
    return written
