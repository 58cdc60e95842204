"""Processes on a cluster of Ray: Ray finds a node for each, and says when it dies.

Each process is a child of an actor. The owner is pinned to the head, the trainer has a bundle of a placement
group, and collectors are spread over the nodes as far as there is room: those for which there is none wait
until a node joins. Servers and their collectors are on the trainer's node. What dies with its actor or node
is started again in a new actor, wherever Ray finds room. The processes speak HTTP, so that nothing but their
start and end goes through Ray.

Ray Core is used, no other part of it. RUN and the files that the configuration names lie in a folder that all
nodes share.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from agro.errors import Refused
from agro.io.processes import LocalProcess, free_port
from agro.place.local import log_file
from agro.place.placement import PlacedProcess, Placement
from agro.place.remote import PASSED
from agro.place.supervisor import LOST

HEAD = {"node:__internal_head__": 0.001}  # a resource that the head alone has
CONNECT_SECONDS = 10.0
START_SECONDS = 120.0  # for the actors of owner and trainer to be placed
PYTHON = "{python}"  # in a command: the Python of the node


class Runner:
    """An actor: it has one process, which ends with it."""

    def __init__(self) -> None:
        import ray

        self.host = ray.util.get_node_ip_address()
        self.process: LocalProcess | None = None

    def free_port(self) -> tuple[str, int]:
        """The address of this node, and a port that is free on it."""
        return self.host, free_port(self.host)

    def start(self, argv: list[str], variables: dict[str, str], log: str, folder: str) -> tuple[str, int]:
        """Where the process is, and its id."""
        os.chdir(folder)
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable if word == PYTHON else word for word in argv]
        environment = {**os.environ, **variables}
        self.process = LocalProcess(argv, environment, Path(log), self.host, death_signal=signal.SIGKILL)
        assert self.process.pid is not None
        return self.host, self.process.pid

    def poll(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    def stop(self) -> None:
        assert self.process is not None
        self.process.stop()


class RayProcess:
    """A process in an actor. All requests to the actor are asynchronous: its node may be lost."""

    def __init__(self, ray: Any, actor: Any, started: Any) -> None:
        """`started`: the answer of `Runner.start`."""
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


@dataclass(frozen=True)
class Group:
    """Processes that are on one node: a bundle of a placement group each."""

    placement_group: Any
    names: Sequence[str]  # of the processes, in the order of their bundles

    @classmethod
    def of(cls, ray: Any, processes: Sequence[PlacedProcess], ranks: int) -> Self:
        """The trainer; and servers, where there are some, with the collectors, which name them as those of
        their own host and hand them weights as its files.

        A CPU for each rank and other process, and a GPU for each rank and server where the cluster has them.
        Raises `Refused` where no node has room.
        """
        has_servers = any(process.role == "server" for process in processes)
        roles = ("trainer", "server", "collector") if has_servers else ("trainer",)
        members = [process for process in processes if process.role in roles]
        counts = [ranks if process.role == "trainer" else 1 for process in members]
        bundles: list[dict[str, float]] = [{"CPU": count} for count in counts]
        of_gpus = [i for i, process in enumerate(members) if process.role != "collector"]
        if ray.cluster_resources().get("GPU", 0) >= sum(counts[i] for i in of_gpus):
            for i in of_gpus:
                bundles[i]["GPU"] = counts[i]
        group = ray.util.placement_group(bundles, strategy="STRICT_PACK")
        if not group.wait(START_SECONDS):
            raise Refused(
                f"--place ray: expected a node with {bundles} free for {', '.join(p.name for p in members)}, "
                f"but none was within {START_SECONDS:g} s; the cluster has {ray.available_resources()}"
            )
        return cls(group, [process.name for process in members])

    def options(self, ray: Any, name: str) -> dict[str, Any]:
        """Of the actor of a process, which has all of its bundle."""
        i = self.names.index(name)
        reserved = self.placement_group.bundle_specs[i]
        strategies = ray.util.scheduling_strategies
        strategy = strategies.PlacementGroupSchedulingStrategy(
            self.placement_group, placement_group_bundle_index=i
        )
        cpus, gpus = reserved.get("CPU", 0), reserved.get("GPU", 0)
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}


class RayLauncher:
    """Starts processes in actors."""

    def __init__(self, ray: Any, group: Group, logs: Path, variables: Mapping[str, str]) -> None:
        """`variables`: of the environment of all processes."""
        self._ray, self._group, self._logs = ray, group, logs
        passed = {name: os.environ[name] for name in PASSED if name in os.environ}
        self._variables = {**passed, **variables}
        self._runner = ray.remote(max_restarts=0)(Runner)

    def start(self, process: PlacedProcess, *, again: bool) -> RayProcess:
        actor = self._runner.options(**self._options(process)).remote()
        log = str(log_file(self._logs, process))
        argv = process.argv(PYTHON, again)
        return RayProcess(self._ray, actor, actor.start.remote(argv, self._variables, log, os.getcwd()))

    def _options(self, process: PlacedProcess) -> dict[str, Any]:
        """Where an actor goes, and what it reserves there."""
        if process.role == "owner":
            return {"num_cpus": 0, "resources": HEAD}
        if process.name in self._group.names:
            return self._group.options(self._ray, process.name)
        return {"num_cpus": 1, "scheduling_strategy": "SPREAD"}


def connect(placement: Placement) -> Any:
    """The module `ray`, connected. Raises `Refused` where it isn't installed, or no head answers."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise Refused(f"--place {placement}: Ray isn't installed; pip install 'ray>=2.50,<3'") from None
    try:
        _check_head(placement.target)
        ray.init(address=placement.target, namespace="agro", logging_level="ERROR", log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise Refused(
            f"--place {placement}: no head of Ray answers there: {error!s:.200}. What to do: start one (ray "
            "start --head prints its address, with port 6379), and run this on a node of the cluster; Ray "
            "Client and its port, 10001, aren't used"
        ) from None
    return ray


def _check_head(address: str) -> None:
    """Raises `OSError` where nobody listens there: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


def owner_address(ray: Any) -> tuple[str, int]:
    """The address of the head, and a port that is free on it."""
    actor = ray.remote(max_restarts=0)(Runner).options(num_cpus=0, resources=HEAD).remote()
    address: tuple[str, int] = ray.get(actor.free_port.remote(), timeout=START_SECONDS)
    ray.kill(actor)
    return address
