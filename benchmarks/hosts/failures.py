"""What happens to a run when one of its processes dies, stops or can't be reached."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from placed import PATIENCE, PlacedRun, configuration, findings, last_step, tail

ENDLESS = 100_000  # steps of a run that is stopped when enough was killed


@dataclass
class Failure:
    """A row of the table: one kind of failure, as often as it happened."""

    what: str
    way: str  # local or Ray
    count: int = 0
    steps_meanwhile: list[int] = field(default_factory=list)  # of the run, until all was back
    back_after: list[float] = field(default_factory=list)  # seconds
    ended_after: list[float] = field(default_factory=list)  # seconds, of ranks without the other one


@dataclass
class Result:
    """Failures of one run, and what held of it in the end."""

    name: str
    failures: list[Failure]
    found: dict[str, Any]
    seconds: float = 0.0


def report_of(run: Path, name: str) -> dict[str, Any]:
    """What a process last said of itself; empty where it has said nothing."""
    for file in run.glob(f"processes/{name}.json"):
        try:
            return dict(json.loads(file.read_text()))
        except (FileNotFoundError, ValueError):
            return {}
    return {}


def kill(run: PlacedRun, role: str, rng: random.Random) -> tuple[int, float]:
    """Kill a process of a role; returns the steps that were made, and the seconds, until it was back."""
    pids = run.pids(role)
    name = rng.choice(sorted(pids))
    step, began = run.step(), time.monotonic()
    os.kill(pids[name], signal.SIGKILL)
    if role == "collector":
        wait_for_collector(run, name, pids[name])
    else:
        run.wait_for(step + 2)  # a step's samples may have been there already
    return run.step() - step, time.monotonic() - began


def wait_for_collector(run: PlacedRun, name: str, pid: int) -> None:
    """Until a collector samples again in another process."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        report = report_of(run.folder, name)
        if report.get("pid", pid) != pid and report.get("responses"):
            return
        assert run.process.poll() is None, tail(run.log)
        time.sleep(0.05)
    raise AssertionError(f"{name} wasn't back within {PATIENCE:g} s: {tail(run.log)}")


def random_kills(folder: Path, kills: int, seed: int) -> Result:
    """Trainer and two collectors, killed in random order at random times."""
    rng = random.Random(seed)
    run = PlacedRun(folder, configuration(folder, ENDLESS, max_age=2), "local:2")
    failures = {role: Failure(f"{role} killed", "local") for role in ("trainer", "collector")}
    run.wait_for(3)
    roles = [list(failures)[i % 2] for i in range(kills)]
    rng.shuffle(roles)
    for role in roles:
        time.sleep(rng.uniform(0, 1.0))
        steps, seconds = kill(run, role, rng)
        note(failures[role], steps, seconds)
    run.wait_for(run.step() + 3)
    run.process.stop()
    code = run.end(120)
    assert code == 130, (code, tail(run.log))
    return Result("random kills", [*failures.values()], findings(run.folder, last_step(run.folder)))


def equal_weights(folder: Path, kills: int, seed: int, url: str | None = None) -> Result:
    """Staleness 0 and one collector: a run with kills ends with the weights of one without, bit for bit.

    `url`: of a database, where the stores are to be in one."""
    rng = random.Random(seed)
    steps, models = 12 + 4 * kills, []
    failures = {role: Failure(f"{role} killed", "local") for role in ("trainer", "collector")}
    for name in ("undisturbed", "killed"):
        (folder / name).mkdir()
        recipe = configuration(folder / name, steps, max_age=0)
        store = () if url is None else (f"data.store={url}?schema={name}",)
        run = PlacedRun(folder / name, recipe, "local:1", store)
        if name == "killed":
            run.wait_for(2)
            for i in range(kills):
                role = list(failures)[i % 2]
                note(failures[role], *kill(run, role, rng))
        assert run.end() == 0, tail(run.log)
        models.append((run.folder / "model" / "model.safetensors").read_bytes())
    found = findings(run.folder, steps)
    name = "equal weights" if url is None else "equal weights on PostgreSQL"
    return Result(name, [*failures.values()], {**found, "equal_weights": models[0] == models[1]})


def note(failure: Failure, steps: int, seconds: float) -> None:
    failure.count += 1
    failure.steps_meanwhile.append(steps)
    failure.back_after.append(round(seconds, 2))
