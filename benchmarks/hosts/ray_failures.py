"""The same run on a cluster of Ray of two nodes: a process, an actor and a node are killed.

    RAYPYTHON benchmarks/hosts/ray_failures.py FOLDER RESULT.json [--seed 0]

It is a program of its own, for a Python that has Ray.
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
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from failures import ENDLESS, Failure, Result, note, report_of  # noqa: E402
from placed import PATIENCE, PlacedRun, configuration, findings, last_step, tail  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

MEMORY = 100 << 20  # bytes of a node's object store, which is hardly used


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _kill_actor(pid: int) -> None:
    """Kill the parent of a process, which is the actor that started it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(fields[1]), signal.SIGKILL)


def wait_for_process(run: PlacedRun, name: str, pid: int) -> None:
    """Until a process is back under another id."""
    deadline = time.monotonic() + PATIENCE
    role = name.split("-")[0]
    while run.pids(role).get(name, pid) == pid:
        assert time.monotonic() < deadline, tail(run.log)
        assert run.process.poll() is None, tail(run.log)
        time.sleep(0.1)


def lose(run: PlacedRun, failure: Failure, name: str, strike: Callable[[int], None]) -> None:
    """Lose a process by `strike(pid)`, and wait until it is back and the run goes on."""
    pid, step, began = run.pids(name.split("-")[0])[name], run.step(), time.monotonic()
    strike(pid)
    wait_for_process(run, name, pid)
    if name.startswith("collector"):
        while report_of(run.folder, name).get("pid") == pid or not report_of(run.folder, name).get(
            "responses"
        ):
            assert time.monotonic() - began < PATIENCE, tail(run.log)
            time.sleep(0.1)
    else:
        run.wait_for(step + 2)
    note(failure, run.step() - step, time.monotonic() - began)


def ray_failures(folder: Path, seed: int) -> Result:
    rng = random.Random(seed)
    head = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
    try:
        run = PlacedRun(
            folder,
            configuration(folder, ENDLESS, max_age=2, place={"collectors": 2}),
            f"ray://{cluster.address}",
        )
        run.wait_for(3)
        killed = {role: Failure(f"{role} killed", "Ray") for role in ("owner", "trainer", "collector")}
        actors = {role: Failure(f"actor of the {role} killed", "Ray") for role in killed}
        for failures, strike in ((killed, _kill), (actors, _kill_actor)):
            for role, failure in failures.items():
                lose(run, failure, rng.choice(sorted(run.pids(role))), strike)
        lost = Failure("node of Ray lost", "Ray")
        cluster.remove_node(node, allow_graceful=False)
        step, began = run.step(), time.monotonic()
        run.wait_for(step + 20)
        note(lost, run.step() - step, time.monotonic() - began)
        run.process.stop()
        assert run.end(120) == 130, tail(run.log)
    finally:
        cluster.shutdown()
    rows = [*killed.values(), *actors.values(), lost]
    return Result("Ray", rows, findings(run.folder, last_step(run.folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    result = ray_failures(arguments.folder, arguments.seed)
    result.seconds = time.monotonic() - began
    arguments.result.write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
