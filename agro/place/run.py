"""`agro train CONFIG --place WHERE`: plan the processes of a run, start them, and keep them running."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from agro.errors import Refused
from agro.place.placement import PlacedRecord, Placement, Plan, TrainCommand
from agro.place.supervisor import Launcher, LocalLauncher, Supervised, Supervisor

LOGS = "logs"  # a folder in the run's, of the processes' output
VARIABLES = {"PYTHONUNBUFFERED": "1"}


def place(placement: Placement, command: TrainCommand) -> int:
    """Run all processes until the trainer is done; the exit code of the run."""
    file = command.config  # or the name of a recipe
    file = file.absolute() if file.is_file() else file  # processes may run in other folders
    command = replace(command, config=file, out=command.out.absolute())
    if (command.out / "metrics.jsonl").exists() and not command.resume:
        raise Refused(
            f"{command.out}: there is a run in this folder; continue it with the same command and --resume, "
            "or set another --out"
        )
    plan = Plan.of(placement, command)
    command.out.mkdir(parents=True, exist_ok=True)
    if placement.kind == "ray":
        return _on_ray(plan, command)
    launcher = LocalLauncher(command.out / LOGS, VARIABLES)
    return supervise(plan, launcher, command.out, command.load().place.restarts)


def _on_ray(plan: Plan, command: TrainCommand) -> int:
    """Ray places all of them; this process supervises."""
    from agro.place import on_ray

    config = command.load().place
    ray = on_ray.connect(plan.placement)
    try:
        logs = command.out / LOGS
        launcher = on_ray.RayLauncher(ray, plan.processes, config.ranks, logs, VARIABLES)
        say(f"the trainer writes to {logs / 'trainer.log'}")
        return supervise(plan, launcher, command.out, config.restarts)
    finally:
        ray.shutdown()


def supervise(plan: Plan, launcher: Launcher, folder: Path, restarts: int) -> int:
    """Run the processes of a plan; the exit code of the run."""
    for note in plan.notes:
        say(f"note: {note}")
    names = ", ".join(process.name for process in plan.processes)
    say(f"processes: {names}; agro ps {folder} shows them")

    def record(processes: Sequence[Supervised]) -> None:
        content = [supervised.to_json() for supervised in processes]
        PlacedRecord(str(plan.placement), content).write(folder)

    return Supervisor(plan, launcher, restarts, partial(furthest_step, folder), record, say).run()


def furthest_step(folder: Path) -> int:
    """The furthest step in the metrics of a run; -1 where there is none."""
    furthest = -1
    with suppress(FileNotFoundError):
        for line in (folder / "metrics.jsonl").read_bytes().splitlines():
            with suppress(ValueError, TypeError, KeyError):  # the last line may be cut off
                furthest = max(furthest, int(json.loads(line)["step"]))
    return furthest


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
