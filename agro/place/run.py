"""`agro train CONFIG --place WHERE`: plan the processes of a run, start them, and keep them running."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from agro.errors import Refused
from agro.place.placement import PlacedRecord, Placement, TrainCommand, plan
from agro.place.supervisor import Supervised, Supervisor, launch_here

LOGS = "logs"  # a folder in the run's, of the processes' output
VARIABLES = {"PYTHONUNBUFFERED": "1"}


def place(placement: Placement, command: TrainCommand) -> int:
    """Run all processes until the trainer is done; the exit code of the run."""
    file = command.config  # or the name of a recipe
    file = file.absolute() if file.is_file() else file  # processes may run in other folders
    command = replace(command, config=file, out=command.out.absolute())
    folder, logs = command.out, command.out / LOGS
    if (folder / "metrics.jsonl").exists() and not command.resume:
        raise Refused(
            f"{folder}: there is a run in this folder; continue it with the same command and --resume, "
            "or set another --out"
        )
    processes, notes = plan(placement, command)
    settings = command.load().place
    folder.mkdir(parents=True, exist_ok=True)

    def record(supervised: Sequence[Supervised]) -> None:
        PlacedRecord(str(placement), [each.to_json() for each in supervised]).write(folder)

    def furthest_step() -> int:
        """In the metrics of the run; -1 where there is none."""
        furthest = -1
        with suppress(FileNotFoundError):
            for line in (folder / "metrics.jsonl").read_bytes().splitlines():
                with suppress(ValueError, TypeError, KeyError):  # the last line may be cut off
                    furthest = max(furthest, int(json.loads(line)["step"]))
        return furthest

    with ExitStack() as ended:
        launch = launch_here(logs, VARIABLES)
        if placement.kind == "ray":  # which places all of them; this process supervises
            from agro.place import on_ray

            ray = on_ray.connect(placement)
            ended.callback(ray.shutdown)
            launch = on_ray.RayLauncher(ray, processes, settings.ranks, logs, VARIABLES)
            say(f"the trainer writes to {logs / 'trainer.log'}")
        for note in notes:
            say(f"note: {note}")
        names = ", ".join(process.name for process in processes)
        say(f"processes: {names}; agro ps {folder} shows them")
        return Supervisor(processes, launch, settings.restarts, furthest_step, record, say).run()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
