"""First tasks: a folder that holds all that a run needs, and trains a small new model without a download."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agro.cli.tasks import chat, digits, multi_turn, own_log
from agro.errors import Refused
from agro.io.nearest import nearest

Rows = Mapping[str, Iterable[Mapping[str, Any]]]


@dataclass(frozen=True)
class StarterTask:
    """`files`: copied from the task's package. `rows`: the lines of its JSONL files, drawn at random.

    `minutes`: of `agro train recipe.toml`, processor time on one thread of an Intel Xeon (2 shared cores).
    """

    title: str
    package: str
    files: tuple[str, ...]
    rows: Callable[[random.Random], Rows]
    minutes: float


TASKS = {
    "digits": StarterTask(
        "sort digits: fresh samples and a reward function",
        "digits",
        ("recipe.toml", "reward.py", "README.md"),
        digits.rows,
        0.6,
    ),
    "own-log": StarterTask(
        "become better than another model, from a JSONL log of its responses",
        "own_log",
        ("recipe.toml", "reward.py", "README.md"),
        own_log.rows,
        0.6,
    ),
    "chat": StarterTask(
        "prompts that are messages, and a chat template",
        "chat",
        ("recipe.toml", "reward.py", "template.jinja", "README.md"),
        chat.rows,
        0.4,
    ),
    "multi-turn": StarterTask(
        "episodes of several turns with an environment",
        "multi_turn",
        ("recipe.toml", "guess.py", "README.md"),
        multi_turn.rows,
        0.5,
    ),
}


def create(folder: Path, name: str) -> list[Path]:
    """Write the files of a task, the same each time, and return their paths.

    Raises `Refused` where there is no such task, or where the folder isn't empty.
    """
    name = name.replace("_", "-")
    if name not in TASKS:
        near = nearest(name, TASKS)
        hint = f"; did you mean {near}?" if near else ""
        raise Refused(f"--task: expected one of {', '.join(TASKS)}, got {name!r}{hint}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder}: expected an empty folder or a new one; give another name")
    task = TASKS[name]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for file in task.files:
        written.append(Path(shutil.copy(Path(__file__).parent / task.package / file, folder / file)))
    for file, rows in task.rows(random.Random(0)).items():
        path = folder / file
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        written.append(path)
    return written
