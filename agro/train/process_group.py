"""The process group of torchrun's ranks, the group for rank 0's calls, and a watch over the ranks.

If a rank vanishes, the watch ends the run with that rank's name, so that the others don't wait forever.

A collective takes as long as its slowest rank, and rank 0 may sample for hours, so collectives have no useful
time limit. Instead, each process has a heartbeat: at intervals a thread sets a key to another number, in
the store that all ranks see. A rank whose key doesn't change for `train.rank_seconds` is gone, however long
others take: its process was killed or stopped, its host is down, or its network failed.

A rank whose launcher died ends too, before another launcher starts the run again.

Nothing can be saved then, since that rank's shards are missing. The process ends at once, as if killed. With
`--max-restarts` torchrun starts all ranks again, and they resume from the last checkpoint.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PATIENCE = timedelta(days=7)  # ranks wait for rank 0 while it samples; the watch ends the wait


def world_size() -> int:
    """Number of ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def take_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def connect(wait: timedelta = PATIENCE) -> Any:
    """The key-value store that all ranks see, limited to the keys of this start.

    torchrun's agent serves it, or else rank 0. `wait`: the time limit for the connection and each answer.
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


def group_of_calls() -> Any:
    """A separate process group for the calls that rank 0 sends to the other ranks.

    DTensor's caches keep the group of the mesh, and so its threads, until the process ends. A thread that
    still holds the last broadcast then would abort the process. This group ends with `destroy_process_group`.
    """
    return dist.new_group(backend="gloo", timeout=PATIENCE)


SHARE = 20  # number of heartbeats per `train.rank_seconds`
SLOWEST = 1.0  # largest interval between heartbeats, seconds
ERROR = 1  # exit code


def end_process(message: str) -> None:
    """End this process with all its threads, one of which may wait in a collective."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(ERROR)


class Watch:
    """Sends this rank's heartbeat, and calls `end` with a message if another rank is silent. A context."""

    def __init__(
        self,
        seconds: float,
        rank: int,
        ranks: int,
        connect: Callable[[timedelta], Any],
        end: Callable[[str], None] = end_process,
    ) -> None:
        """`connect`: opens a store of torch.distributed with the given time limit for its answers."""
        self.seconds, self.rank, self.ranks, self.connect, self.end = seconds, rank, ranks, connect, end
        self.every = min(SLOWEST, seconds / SHARE)
        self.limit = seconds - 2 * self.every  # a last heartbeat is seen one interval late
        self.launcher = os.getppid()
        self.left = threading.Event()
        self.beats: dict[int, tuple[str, float]] = {}  # by rank: the last heartbeat, and when it was new
        self.answered = time.monotonic()  # time of the store's last answer

    def __enter__(self) -> Self:
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._listen)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.left.set()
        for thread in self.threads:
            thread.join(self.every)  # not longer: the store may be unreachable

    @contextmanager
    def naming(self) -> Iterator[None]:
        """If a collective fails because a rank closed its connections, wait a few intervals for its name."""
        try:
            yield
        except RuntimeError:
            few = 3 * self.every
            deadline = time.monotonic() + 2 * few
            while time.monotonic() < deadline and not self._ends(few):
                time.sleep(self.every)
            raise

    def _beat(self) -> None:
        """Set this rank's key and read all ranks' keys. It may hang if the store is unreachable."""
        number, host, store = 0, socket.gethostname(), None
        keys = [f"beat/{rank}" for rank in range(self.ranks)]
        while not self.left.wait(self.every if number else 0):
            number += 1
            try:
                store = store or self.connect(timedelta(seconds=self.seconds))
                store.set(keys[self.rank], f"{number} {host}")
                if not store.check(keys):
                    continue  # not all have started
                values = store.multi_get(keys)
            except RuntimeError:
                store = None  # `_listen` ends the process if this persists
                continue
            self.answered = now = time.monotonic()
            for rank, value in enumerate(map(bytes.decode, values)):
                if rank not in self.beats or self.beats[rank][0] != value:
                    self.beats[rank] = value, now

    def _listen(self) -> None:
        previous = time.monotonic()
        while not self.left.wait(self.every):
            now = time.monotonic()
            if now - previous > self.limit:  # this process itself was stopped and heard nothing
                self.answered = now
                self.beats = {rank: (value, now) for rank, (value, _) in dict(self.beats).items()}
            previous = now
            self._ends(self.limit)

    def _ends(self, limit: float) -> bool:
        """End the process if the launcher has died, or the store or a rank was silent for longer."""
        beats, now, silent = dict(self.beats), time.monotonic(), ""
        if os.getppid() != self.launcher:
            silent = f"the launcher of rank {self.rank} (pid {self.launcher}) has died"
        elif beats and now - self.answered > limit:  # all have started
            silent = f"the store of the ranks, on the host of rank 0, hasn't answered for {limit:.3g} s"
        else:
            late = [rank for rank, (_, seen) in beats.items() if rank != self.rank and now - seen > limit]
            names = [f"rank {rank} on {beats[rank][0].partition(' ')[2]}" for rank in late]
            silent = f"{', '.join(names)}: no heartbeat for {limit:.3g} s" if names else ""
        if silent:
            ends = f"the run ends (train.rank_seconds = {self.seconds:g})"
            self.end(f"{silent}; {ends}. What to do: continue it with --resume")
        return bool(silent)
