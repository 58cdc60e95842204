"""What happens to a run on Ray when one of its processes, an actor or a node dies.

    RAYPYTHON benchmarks/hosts/failures.py FOLDER RESULT.json [--kills 24] [--seed 0] [--url URL]

by a Python that has Ray, on a cluster of two nodes. The run's store is a file, or a schema of the database
that `--url` names.
"""

from __future__ import annotations

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

from benchmarks import recording  # noqa: E402

ENDLESS = 100_000  # steps of a run that is stopped when enough was killed
MEMORY = 100 << 20  # bytes of the object store of a node of Ray, which is hardly used


@dataclass
class Failure:
    """A row of the table: one kind of failure, as often as it happened."""

    what: str
    way: str = "Ray"  # as in recorded rows
    count: int = 0
    steps_meanwhile: list[int] = field(default_factory=list)  # of the run, until all was back
    back_after: list[float] = field(default_factory=list)  # seconds

    def note(self, steps: int, seconds: float) -> None:
        self.count += 1
        self.steps_meanwhile.append(steps)
        self.back_after.append(round(seconds, 2))


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


def ray_failures(folder: Path, kills: int, seed: int, url: str | None) -> dict[str, Any]:
    """Processes and actors, killed in random order; the last failure is that of a node."""
    from ray.cluster_utils import Cluster

    rng, start = random.Random(seed), time.monotonic()
    strikes = {"": lambda pid: os.kill(pid, signal.SIGKILL), "actor of the ": kill_actor}
    kinds = [(role, what) for role in ("trainer", "collector") for what in strikes]
    failures = {kind: Failure(f"{kind[1]}{kind[0]} killed") for kind in kinds}
    lost = Failure("node of Ray lost")
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
        run.process.stop()
        code = run.end(120)
        assert code == 130, (code, tail(run.log))
    finally:
        cluster.shutdown()
    return {
        "name": "Ray" if url is None else "Ray on PostgreSQL",
        "failures": [asdict(failure) for failure in (*failures.values(), lost)],
        "found": findings(run.folder, last_step(run.folder)),
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    parser = recording.parser(__doc__, kills=24, seed=0, url=str)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    result = ray_failures(arguments.folder, arguments.kills, arguments.seed, arguments.url)
    arguments.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
