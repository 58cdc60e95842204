"""A run whose processes a test kills: its configuration, its progress, and what has to hold in the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agro.io.processes import LocalProcess
from agro.place.placement import PlacedRecord
from agro.store import Store
from agro.store.location import located
from reproductions.systems import tiny

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GROUPS, RESPONSES = 4, 3
PATIENCE = 240.0  # seconds for a step to be made, whatever died before
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": f"{ROOT}",
}


def configuration(folder: Path, steps: int, max_age: int, **sections: Any) -> Path:
    """A recipe as JSON: copy a digit; a few thousand parameters."""
    config = tiny.config(
        folder,
        data__max_age=max_age,
        sampler__n=RESPONSES,
        reward__name=f"{HERE.parent}/recorded/reward.py:share",
        source={"kind": "elsewhere", "lease_seconds": 4.0},
        train={"steps": steps, "groups": GROUPS, "micro_batch": 4, "lr": 1e-2, "checkpoint_every": 2},
        **sections,
    )
    path = folder / "recipe.json"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    return path


class PlacedRun:
    """`agro train RECIPE --place WHERE` in a process, and the processes that it has started."""

    def __init__(self, folder: Path, recipe: Path, where: str, overrides: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "agro", "train", str(recipe), *overrides]
        command += ["--out", str(folder / "run"), "--place", where]
        self.folder, self.log = folder / "run", folder / "supervisor.log"
        self.process = LocalProcess(command, ENVIRONMENT, self.log, "")

    def pids(self, role: str) -> dict[str, int]:
        """By name, the living processes of a role."""
        placed = PlacedRecord.read(self.folder)
        processes = placed.processes if placed else []
        return {p["name"]: p["pid"] for p in processes if p["role"] == role and not p["ended"] and p["pid"]}

    def step(self) -> int:
        """The last step in the metrics; -1 before there is one."""
        return last_step(self.folder)

    def wait_for(self, step: int) -> float:
        """Until the metrics have a step; returns how many seconds it took."""
        began = time.monotonic()
        while self.step() < step:
            if self.process.poll() is not None and self.step() < step:
                raise AssertionError(f"it ended before step {step}: {tail(self.log)}")
            if time.monotonic() - began > PATIENCE:
                raise AssertionError(f"step {step} wasn't made within {PATIENCE:g} s: {tail(self.log)}")
            time.sleep(0.02)
        return time.monotonic() - began

    def end(self, seconds: float = 600.0) -> int | None:
        """The exit code; None where it still runs after so many seconds."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.process.poll()


def last_step(folder: Path) -> int:
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
        return int(json.loads(lines[-1])["step"])
    except (FileNotFoundError, IndexError, ValueError):
        return -1


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]


def findings(run: Path, steps: int) -> dict[str, Any]:
    """What has to hold of a run that has ended, whatever was killed."""
    rows = tiny.metrics(run)
    record = json.loads((run / "config.json").read_text())
    run_id = record["run"]
    with Store.open(located(record["data"]["store"], run), read_only=True) as store:
        drawn = [draw.sample for draw in store.draws.drawn(run_id)]
        samples = list(store.samples())
        damage = store.tables.damage()
    made = Counter((s.meta["index"], s.prompt_id) for s in samples)
    return {
        "steps": [row["step"] for row in rows] == list(range(1, steps + 1)),
        "groups_complete": all(row["groups"] == GROUPS for row in rows),
        "drawn_once": len(drawn) == len(set(drawn)) == steps * GROUPS * RESPONSES,
        "made_once": max(made.values()) == 1,
        "intact": not damage,
        "responses": len(samples),
        "staleness_max": max(row["staleness_max"] for row in rows),
    }


def holds(found: Mapping[str, Any]) -> bool:
    return all(value for value in found.values() if isinstance(value, bool))
