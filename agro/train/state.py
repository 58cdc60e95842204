"""The position of a run between two steps, and the checkpoint that stores it.

A checkpoint is a folder of safetensors and JSON, never pickles. It is written to a temporary folder, synced
and renamed, and its parent is synced. Only then does one transaction of the store write (run, step, digest),
the row that makes the checkpoint valid. The last few are kept, since a disk may damage one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agro.io.files import complete_folder, digest
from agro.store import Commit

POSITION = "position.json"


@dataclass(frozen=True)
class Position:
    """The position of a run between two steps."""

    phase: str = ""
    step: int = 0  # of the run, the last one done
    version: int = 0  # optimizer steps
    prompts: int = 0  # sampled from in this phase
    skipped: int = 0  # updates in a row that weren't made
    beta: float | None = None  # where it is tuned to a target KL
    # Of the steps before, per unit of learning rate: √(2 KL), and the share of their promise that they lost.
    speed: float | None = None
    lost: float | None = None
    rate: float | None = None  # the phase's largest, which was found where train.lr is "auto"
    rollbacks: int = 0  # to an earlier checkpoint; each halves the learning rate
    # The last entry of other runs that may be used from the cache of reference log-probs; -1: not begun.
    cached: int = -1
    monitors: Mapping[str, Any] = field(default_factory=dict)  # state of each monitor, by its name
    stopped: str = ""  # why the run ended before its last step
    anchor: str = ""  # digest of the checkpoint that the phase began with
    digest: str = ""  # of the last checkpoint; it can't stand in that checkpoint itself

    def columns(self) -> dict[str, Any]:
        """Those of metrics.jsonl that tell steps apart."""
        return {"step": self.step, "phase": self.phase, "version": self.version}


def write_checkpoint(folder: Path, position: Position, save: Callable[[Path], None]) -> dict[str, str]:
    """Write a checkpoint, to which `save` adds the learner's files; returns the SHA-256 of each file."""
    with complete_folder(folder) as temporary:
        save(temporary)
        content = asdict(replace(position, digest=""))
        (temporary / POSITION).write_text(json.dumps(content, indent=1), encoding="utf-8")
        return _digests(temporary)


def read_position(folder: Path, digest: str) -> Position:
    content = json.loads((folder / POSITION).read_text(encoding="utf-8"))
    return Position(**{**content, "digest": digest})


def damage(folder: Path, commit: Commit) -> str:
    """Which files of a committed checkpoint are missing or changed; empty where it is complete."""
    if not folder.is_dir():
        return f"{folder} is missing"
    present = _digests(folder)
    problems = []
    for name, expected in commit.files.items():
        if name not in present:
            problems.append(f"{folder / name} is missing")
        elif present[name] != expected:
            problems.append(f"{folder / name} was changed after it was written")
    return ", ".join(problems)


def digest_of(files: Mapping[str, str]) -> str:
    """SHA-256 over the names and digests of a checkpoint's files."""
    return hashlib.sha256("".join(f"{name} {files[name]}\n" for name in sorted(files)).encode()).hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: digest(path) for path in folder.iterdir()}
