"""The process group of the ranks that torchrun started, and the calls that rank 0 sends to the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PATIENCE = timedelta(days=1)  # ranks wait for rank 0 while it samples


def world_size() -> int:
    """Ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def joined(device: torch.device) -> Iterator[DeviceMesh]:
    """Join the process group of all ranks, and leave it at the end."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    try:
        yield init_device_mesh(device.type, (dist.get_world_size(),))
    finally:
        dist.destroy_process_group()


def take_device() -> None:
    """Let this process use the GPU of its rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


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
