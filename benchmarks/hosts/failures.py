"""What happens to a run when one of its processes dies, stops or can't be reached.

    RAYPYTHON benchmarks/hosts/failures.py FOLDER RESULT.json [--kills 24] [--url URL]

runs the failures on a cluster of Ray of two nodes, by a Python that has Ray: processes, actors and a node are
killed. The run's store is a file, or a schema of the database that `--url` names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from placed import PATIENCE, PlacedRun, configuration, findings, last_step, tail  # noqa: E402

ENDLESS = 100_000  # steps of a run that is stopped when enough was killed
MEMORY = 100 << 20  # bytes of the object store of a node of Ray, which is hardly used


@dataclass
class Failure:
    """A row of the table: one kind of failure, as often as it happened."""

    what: str
    way: str  # local or Ray
    count: int = 0
    steps_meanwhile: list[int] = field(default_factory=list)  # of the run, until all was back
    back_after: list[float] = field(default_factory=list)  # seconds

    def note(self, steps: int, seconds: float) -> None:
        self.count += 1
        self.steps_meanwhile.append(steps)
        self.back_after.append(round(seconds, 2))


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
        failures[role].note(steps, seconds)
    run.wait_for(run.step() + 3)
    stop(run)
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
                failures[role].note(*kill(run, role, rng))
        assert run.end() == 0, tail(run.log)
        models.append((run.folder / "model" / "model.safetensors").read_bytes())
    found = findings(run.folder, steps)
    name = "equal weights" if url is None else "equal weights on PostgreSQL"
    return Result(name, [*failures.values()], {**found, "equal_weights": models[0] == models[1]})


def stop(run: PlacedRun) -> None:
    run.process.stop()
    code = run.end(120)
    assert code == 130, (code, tail(run.log))


def kill_process(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_actor(pid: int) -> None:
    """Kill the parent of a process, which is the actor that started it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(fields[1]), signal.SIGKILL)


def lose(run: PlacedRun, failure: Failure, name: str, strike: Callable[[int], None]) -> None:
    """Lose a process by `strike(pid)`, and wait until it is back under another id and the run goes on."""
    role = name.split("-")[0]
    pid, step, began = run.pids(role)[name], run.step(), time.monotonic()
    strike(pid)
    while run.pids(role).get(name, pid) == pid:
        assert time.monotonic() < began + PATIENCE, tail(run.log)
        assert run.process.poll() is None, tail(run.log)
        time.sleep(0.1)
    run.wait_for(run.step() + 2)
    failure.note(run.step() - step, time.monotonic() - began)


def ray_failures(folder: Path, kills: int, seed: int, url: str | None) -> Result:
    """Processes and actors, killed in random order; the last failure is that of a node."""
    from ray.cluster_utils import Cluster

    rng = random.Random(seed)
    strikes = {"": kill_process, "actor of the ": kill_actor}
    kinds = [(role, what) for role in ("trainer", "collector") for what in strikes]
    failures = {kind: Failure(f"{kind[1]}{kind[0]} killed", "Ray") for kind in kinds}
    lost = Failure("node of Ray lost", "Ray")
    store = () if url is None else (f"data.store={url}",)
    head = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        node = cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
        recipe = configuration(folder, ENDLESS, max_age=2, place={"collectors": 2})
        run = PlacedRun(folder, recipe, f"ray://{cluster.address}", store)
        run.wait_for(3)
        order = [kinds[i % len(kinds)] for i in range(kills - 1)]
        rng.shuffle(order)
        for role, what in order:
            time.sleep(rng.uniform(0, 1.0))
            lose(run, failures[role, what], rng.choice(sorted(run.pids(role))), strikes[what])
        cluster.remove_node(node, allow_graceful=False)
        step, began = run.step(), time.monotonic()
        run.wait_for(step + 20)
        lost.note(run.step() - step, time.monotonic() - began)
        stop(run)
    finally:
        cluster.shutdown()
    name = "Ray" if url is None else "Ray on PostgreSQL"
    return Result(name, [*failures.values(), lost], findings(run.folder, last_step(run.folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a database, where the store is to be in one")
    arguments = parser.parse_args()
    began = time.monotonic()
    result = ray_failures(arguments.folder, arguments.kills, arguments.seed, arguments.url)
    result.seconds = time.monotonic() - began
    arguments.result.write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
