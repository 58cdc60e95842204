"""Processes on a cluster of Ray. What needs Ray itself is skipped without it."""

from __future__ import annotations

import os
import signal
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import is_running, until

from agro.errors import Refused
from agro.place import on_ray
from agro.place.placement import LOST, PlacedProcess, Placement, Role


def test_without_ray_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Refused, match=r"Ray isn't installed; pip install 'ray>=2\.50,<3'"):
        on_ray.connect(Placement.parse("ray://head:6379"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this host."""
    utils = pytest.importorskip("ray.cluster_utils")
    options = {"num_cpus": 2, "object_store_memory": 80 << 20}
    made = utils.Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    made.add_node(**options)
    yield made
    made.shutdown()


@pytest.fixture
def ray(cluster: Any) -> Iterator[Any]:
    connected = on_ray.connect(Placement.parse(f"ray://{cluster.address}"))
    yield connected
    connected.shutdown()


def process(role: Role, name: str, code: str) -> PlacedProcess:
    """By the Python of the node."""
    return PlacedProcess(name, role, None, (on_ray.PYTHON, "-c", code))


class Cluster:
    """What a launcher uses of Ray, for a cluster with so many GPUs."""

    def __init__(self, gpus: int) -> None:
        strategy = namedtuple("strategy", ["group", "placement_group_bundle_index"])
        self.util = SimpleNamespace(
            placement_group=self.made,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=strategy),
        )
        self.cluster_resources = lambda: {"GPU": gpus}
        self.remote = lambda max_restarts: lambda kind: kind

    def made(self, bundles: list[dict[str, float]], strategy: str) -> SimpleNamespace:
        assert strategy == "STRICT_PACK"  # one node
        return SimpleNamespace(wait=lambda seconds: True)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(0, [(1, 0), (2, 0), (1, 0)]), (2, [(1, 0), (2, 0), (1, 0)]), (3, [(1, 1), (2, 2), (1, 0)])],
)
def test_servers_and_their_collectors_are_beside_the_trainer(
    tmp_path: Path, gpus: int, expected: list[Any]
) -> None:
    """CPUs and GPUs of server, trainer (two ranks) and collector."""
    roles: list[Role] = ["server", "trainer", "collector"]
    others = [process(role, role, "") for role in roles]
    launcher = on_ray.RayLauncher(Cluster(gpus), others, 2, tmp_path, {})
    options = [launcher._options(other) for other in others]
    assert [(o["num_cpus"], o["num_gpus"]) for o in options] == expected
    assert [o["scheduling_strategy"].placement_group_bundle_index for o in options] == [0, 1, 2]
    without = on_ray.RayLauncher(Cluster(gpus), others[1:], 2, tmp_path, {})
    assert without._options(others[2]) == {"num_cpus": 1, "scheduling_strategy": "SPREAD"}


@pytest.mark.nightly
def test_processes_die_by_themselves_and_with_their_actors(ray: Any, tmp_path: Path) -> None:
    sleep = "import os, time; print(os.environ['VARIABLE'], flush=True); time.sleep(600)"
    roles: list[Role] = ["server", "trainer", "collector"]
    processes = [process(role, role, sleep) for role in roles]
    launcher = on_ray.RayLauncher(ray, processes, 1, tmp_path / "logs", {"VARIABLE": "secret"})
    server, trainer, collector = started = [launcher(p, restarted=False) for p in processes]
    until(lambda: [p.poll() for p in started] == [None] * 3 and all(p.pid for p in started))
    assert len({p.host for p in started}) == 1  # two nodes of one machine
    until(lambda: (tmp_path / "logs" / "trainer.log").read_text() == "secret\n")

    trainer.stop()
    until(lambda: trainer.poll() is not None)
    assert trainer.poll() == -signal.SIGTERM
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: server.poll() is not None)
    assert server.poll() == -signal.SIGKILL
    actor = int(Path(f"/proc/{collector.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    until(lambda: collector.poll() is not None)
    assert collector.poll() == LOST
    until(lambda: not is_running(collector.pid))  # nothing goes on without its actor

    ended = launcher(process("collector", "collector", "raise SystemExit(3)"), restarted=True)
    until(lambda: ended.poll() is not None)
    assert ended.poll() == 3


@pytest.mark.nightly
def test_a_head_that_isnt_there_is_refused() -> None:
    pytest.importorskip("ray")
    with pytest.raises(Refused, match="no Ray head answers"):
        on_ray.connect(Placement.parse("ray://127.0.0.1:1"))
