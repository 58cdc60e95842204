"""Processes on a Ray cluster: Ray finds a node for each, and reports when it dies.

Each process is a child of an actor. The trainer has a bundle of a placement group, and collectors are spread
over the nodes; those without room wait until a node joins. Servers and their collectors run on the trainer's
node. A process that dies with its actor or node restarts in a new actor, wherever Ray finds room. Processes
share a database; only their start and end go through Ray.

Only Ray Core is used. RUN and the files that the configuration names must lie in a folder that all nodes
share.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.processes import LocalProcess
from agro.place.placement import LOST, PlacedProcess, Placement, log_file

CONNECT_SECONDS = 10.0
START_SECONDS = 120.0  # to place the trainer's actor
PYTHON = "{python}"  # stands for the node's Python in a command
# Environment variables passed to the nodes.
PASSED = ("PGPASSWORD", "PYTHONPATH", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "TMPDIR")


class Runner:
    """An actor that owns one process, which ends with it."""

    def __init__(self) -> None:
        import ray

        self.host = ray.util.get_node_ip_address()
        self.process: LocalProcess | None = None

    def start(self, argv: list[str], variables: dict[str, str], log: str, folder: str) -> tuple[str, int]:
        """Start the process, and return its host and pid."""
        os.chdir(folder)
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable if word == PYTHON else word for word in argv]
        environment = {**os.environ, **variables}
        self.process = LocalProcess(argv, environment, Path(log), self.host, death_signal=signal.SIGKILL)
        return self.host, self.process.pid

    def poll(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    def stop(self) -> None:
        assert self.process is not None
        self.process.stop()


class RayProcess:
    """A process in an actor. All calls of the actor are asynchronous, since its node may be lost."""

    def __init__(self, ray: Any, actor: Any, started: Any) -> None:
        """`started`: the reference that `Runner.start` returned."""
        self._ray, self._actor, self._started = ray, actor, started
        self._answer = started
        self._code: int | None = None
        self.host = "waiting for a node"
        self.pid: int | None = None

    def poll(self) -> int | None:
        if self._code is not None or not self._ray.wait([self._answer], timeout=0)[0]:
            return self._code
        try:
            answer = self._ray.get(self._answer)
        except self._ray.exceptions.RayActorError:
            self._code = LOST
            return LOST
        except self._ray.exceptions.RayTaskError as error:
            raise Refused(f"--place ray: a process can't be started: {error.cause!r:.300}") from None
        if self._answer is self._started:
            self.host, self.pid = answer
        else:
            self._code = answer
        if self._code is None:
            self._answer = self._actor.poll.remote()
        return self._code

    def stop(self) -> None:
        self._actor.stop.remote()

    def kill(self) -> None:
        self._ray.kill(self._actor)
        self._code = LOST


class RayLauncher:
    """Starts processes in actors."""

    def __init__(
        self,
        ray: Any,
        processes: Sequence[PlacedProcess],
        ranks: int,
        logs: Path,
        variables: Mapping[str, str],
    ) -> None:
        """`variables`: environment variables for all processes. Raises `Refused` if no node has room.

        One node hosts the trainer, and servers, if any, with the collectors, which address them on their own
        host and pass them weights as files. Each process has a bundle of a placement group: a CPU per rank or
        process, and a GPU per rank or server if the cluster has enough.
        """
        self._ray, self._logs = ray, logs
        passed = {name: os.environ[name] for name in PASSED if name in os.environ}
        self._variables = {**passed, **variables}
        self._runner = ray.remote(max_restarts=0)(Runner)
        has_servers = any(process.role == "server" for process in processes)
        roles = ("trainer", "server", "collector") if has_servers else ("trainer",)
        together = [process for process in processes if process.role in roles]
        cpus = {process.name: ranks if process.role == "trainer" else 1 for process in together}
        gpus = {process.name: cpus[process.name] for process in together if process.role != "collector"}
        if ray.cluster_resources().get("GPU", 0) < sum(gpus.values()):
            gpus = {}
        self._bundles = [
            {"CPU": count} | ({"GPU": gpus[name]} if name in gpus else {}) for name, count in cpus.items()
        ]
        self._names = list(cpus)
        self._group = ray.util.placement_group(self._bundles, strategy="STRICT_PACK")
        if not self._group.wait(START_SECONDS):
            raise Refused(
                f"--place ray: expected a node with {self._bundles} free for {', '.join(self._names)}, but "
                f"none was within {START_SECONDS:g} s; the cluster has {ray.available_resources()}"
            )

    def __call__(self, process: PlacedProcess, restarted: bool) -> RayProcess:
        actor = self._runner.options(**self._options(process)).remote()
        log = str(log_file(self._logs, process))
        argv = process.argv(PYTHON, restarted)
        return RayProcess(self._ray, actor, actor.start.remote(argv, self._variables, log, os.getcwd()))

    def _options(self, process: PlacedProcess) -> dict[str, Any]:
        """Return an actor's scheduling strategy and its resources."""
        if process.name not in self._names:
            return {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        i = self._names.index(process.name)
        strategies = self._ray.util.scheduling_strategies
        strategy = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i)
        cpus, gpus = self._bundles[i]["CPU"], self._bundles[i].get("GPU", 0)
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}


def connect(placement: Placement) -> Any:
    """Import Ray and connect it. Raises `Refused` if it isn't installed, or no head answers."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise Refused(f"--place {placement}: Ray isn't installed; pip install 'ray>=2.50,<3'") from None
    try:
        host, colon, port = placement.target.rpartition(":")
        if colon:  # Ray would retry a closed port for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=placement.target, namespace="agro", logging_level="ERROR", log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise Refused(
            f"--place {placement}: no Ray head answers there: {error!s:.200}. What to do: start one (ray "
            "start --head prints its address, with port 6379), and run this on a node of the cluster; Ray "
            "Client and its port, 10001, aren't used"
        ) from None
    return ray
