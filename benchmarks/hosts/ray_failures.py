"""The same runs on a cluster of Ray of two nodes: processes, actors and a node are killed.

    RAYPYTHON benchmarks/hosts/ray_failures.py FOLDER RESULT.json [--served] [--kills 24] [--url URL]

It is a program of its own, for a Python that has Ray. The run's store is a file, or a schema of the database
that `--url` names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from failures import ENDLESS, Failure, Result, note  # noqa: E402
from placed import PATIENCE, PlacedRun, configuration, findings, last_step, tail  # noqa: E402
from ranks import (  # noqa: E402  # noqa: E402
    RANK_SECONDS,
    RANKS,
    SERVERS,
    kill_launcher,
    kill_process,
    kill_rank,
    kill_server,
    log_probs,
    served,
)
from ray.cluster_utils import Cluster  # noqa: E402

MEMORY = 100 << 20  # bytes of a node's object store, which is hardly used


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
    run.wait_for(run.step() + 2)
    note(failure, run.step() - step, time.monotonic() - began)


@contextmanager
def two_nodes(cpus: int) -> Iterator[tuple[Cluster, Any]]:
    """A cluster, and the node that isn't its head. `cpus`: of the head, as Ray counts them."""
    head = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster, cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
    finally:
        cluster.shutdown()


def ray_failures(folder: Path, kills: int, seed: int, url: str | None) -> Result:
    """Processes and actors, killed in random order; the last failure is that of a node."""
    rng = random.Random(seed)
    strikes = {"": kill_process, "actor of the ": _kill_actor}
    kinds = [(role, what) for role in ("trainer", "collector") for what in strikes]
    failures = {kind: Failure(f"{kind[1]}{kind[0]} killed", "Ray") for kind in kinds}
    store = () if url is None else (f"data.store={url}",)
    with two_nodes(3) as (cluster, node):
        recipe = configuration(folder, ENDLESS, max_age=2, place={"collectors": 2})
        run = PlacedRun(folder, recipe, f"ray://{cluster.address}", store)
        run.wait_for(3)
        order = [kinds[i % len(kinds)] for i in range(kills - 1)]
        rng.shuffle(order)
        for role, what in order:
            time.sleep(rng.uniform(0, 1.0))
            lose(run, failures[role, what], rng.choice(sorted(run.pids(role))), strikes[what])
        lost = Failure("node of Ray lost", "Ray")
        cluster.remove_node(node, allow_graceful=False)
        step, began = run.step(), time.monotonic()
        run.wait_for(step + 20)
        note(lost, run.step() - step, time.monotonic() - began)
        stop(run)
    name = "Ray" if url is None else "Ray on PostgreSQL"
    return Result(name, [*failures.values(), lost], findings(run.folder, last_step(run.folder)))


def served_on_ray(folder: Path, seed: int) -> Result:
    """Two ranks, two servers and their collector, on one of two nodes."""
    rng = random.Random(seed)
    strikes = {
        "rank killed": kill_rank,
        "server killed": kill_server,
        "launcher of ranks killed": kill_launcher,
        "actor of the server killed": partial(kill_server, strike=_kill_actor),
    }
    failures = {what: Failure(what, "Ray") for what in strikes}
    with two_nodes(RANKS + SERVERS + 1) as (cluster, _):
        where = f"ray://{cluster.address}"
        run = PlacedRun(folder, served(folder), where, (f"train.rank_seconds={RANK_SECONDS}",))
        run.wait_for(3)
        for what in rng.sample(sorted(strikes), len(strikes)):
            step, began = run.step(), time.monotonic()
            strikes[what](run, rng)
            note(failures[what], run.step() - step, time.monotonic() - began)
        run.wait_for(run.step() + 3)
        stop(run)
    found = findings(run.folder, last_step(run.folder)) | log_probs(run.folder)
    return Result("Ray with ranks and servers", [*failures.values()], found)


def stop(run: PlacedRun) -> None:
    run.process.stop()
    assert run.end(120) == 130, tail(run.log)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--served", action="store_true", help="two ranks, and servers that sample")
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a database, where the store is to be in one")
    arguments = parser.parse_args()
    began = time.monotonic()
    folder, seed = arguments.folder, arguments.seed
    if arguments.served:
        result = served_on_ray(folder, seed)
    else:
        result = ray_failures(folder, arguments.kills, seed, arguments.url)
    result.seconds = time.monotonic() - began
    arguments.result.write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
