"""The process group of the ranks that torchrun started, and the calls that rank 0 sends to the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PATIENCE = timedelta(days=7)  # ranks wait for rank 0 while it samples; `agro.train.watch` ends it


def world_size() -> int:
    """Ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def take_device() -> None:
    """Let this process use the GPU of its rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def connect(wait: timedelta = PATIENCE) -> Any:
    """The store of keys that all ranks see, with the keys of this start alone.

    torchrun's agent has it; without one, rank 0. `wait`: for it, and for each of its answers.
    """
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank() == 0 and not has_agent
    store = TCPStore(address, port, None, serves, wait, wait_for_workers=False, multi_tenant=serves)
    return PrefixStore(f"agro/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@contextmanager
def joined(device: torch.device) -> Iterator[DeviceMesh]:
    """Join the process group of all ranks, and leave it at the end."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=connect(), rank=rank(), world_size=world_size(), timeout=PATIENCE)
    try:
        yield init_device_mesh(device.type, (world_size(),))
    finally:
        dist.destroy_process_group()


class Calls:
    """What rank 0 tells the other ranks, over a process group of its own.

    DTensor's caches keep the group of the mesh, and so its threads, until the process ends. A thread that
    still held the last broadcast then would abort the process. This group ends with `destroy_process_group`.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def send(self, call: Any) -> None:
        dist.broadcast_object_list([call], group=self.group)

    def receive(self) -> Any:
        call = [None]
        dist.broadcast_object_list(call, group=self.group)
        return call[0]
