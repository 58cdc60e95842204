"""The process group of the ranks that torchrun started, the calls that rank 0 sends, and a watch.

Ranks that vanish end the run, with their name, instead of holding the others forever.

A collective takes as long as its slowest rank, and rank 0 may sample for hours, so collectives have no useful
time limit. Beside them, each process of torchrun beats: a thread sets a key, with a new number each time, in
the store that all ranks see. A rank whose key doesn't change for `train.rank_seconds` is gone, however long
others take: its process was killed or stopped, its host is down, or the cable is out.

A rank whose launcher died is gone too, before another launcher starts the run again beside it.

Nothing can be saved then, since the shards of that rank are missing. The process ends at once, as if it
were killed, and torchrun starts all ranks again where it has `--max-restarts`: they go on with the last
checkpoint.
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

PATIENCE = timedelta(days=7)  # ranks wait for rank 0 while it samples; `agro.train.process_group` ends it


def world_size() -> int:
    """Ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def take_device() -> None:
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


def group_of_calls() -> Any:
    """A process group of its own for what rank 0 tells the other ranks.

    DTensor's caches keep the group of the mesh, and so its threads, until the process ends. A thread that
    still held the last broadcast then would abort the process. This group ends with `destroy_process_group`.
    """
    return dist.new_group(backend="gloo", timeout=PATIENCE)


SHARE = 20  # beats in `train.rank_seconds`
SLOWEST = 1.0  # seconds between beats, at most
ERROR = 1  # exit code


def end_process(message: str) -> None:
    """End this process with all its threads, one of which may wait in a collective."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(ERROR)


class Watch:
    """Beats for this rank, and calls `end` with a message when another is silent. Use it as a context."""

    def __init__(
        self,
        seconds: float,
        rank: int,
        ranks: int,
        connect: Callable[[timedelta], Any],
        end: Callable[[str], None] = end_process,
    ) -> None:
        """`connect`: makes a store of torch.distributed. It is given the seconds of its answers."""
        self.seconds, self.rank, self.ranks, self.connect, self.end = seconds, rank, ranks, connect, end
        self.every = min(SLOWEST, seconds / SHARE)
        self.limit = seconds - 2 * self.every  # a last beat is seen a beat late
        self.launcher = os.getppid()
        self.left = threading.Event()
        self.beats: dict[int, tuple[str, float]] = {}  # by rank: the last one, and when it was new
        self.answered = time.monotonic()  # by the store, the last time

    def __enter__(self) -> Self:
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._listen)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.left.set()
        for thread in self.threads:
            thread.join(self.every)  # not longer: the store may be out of reach

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Where a collective fails, since a rank closed its connections, wait for its name: a few beats."""
        try:
            yield
        except RuntimeError:
            few = 3 * self.every
            deadline = time.monotonic() + 2 * few
            while time.monotonic() < deadline and not self._ends(few):
                time.sleep(self.every)
            raise

    def _beat(self) -> None:
        """Set the key of this rank, and read those of all. It may hang in a store that is out of reach."""
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
                store = None  # `_listen` ends the process if it stays so
                continue
            self.answered = now = time.monotonic()
            for rank, value in enumerate(map(bytes.decode, values)):
                if rank not in self.beats or self.beats[rank][0] != value:
                    self.beats[rank] = value, now

    def _listen(self) -> None:
        before = time.monotonic()
        while not self.left.wait(self.every):
            now = time.monotonic()
            if now - before > self.limit:  # this process stood still itself, and has heard nobody
                self.answered = now
                self.beats = {rank: (value, now) for rank, (value, _) in dict(self.beats).items()}
            before = now
            self._ends(self.limit)

    def _ends(self, limit: float) -> bool:
        """End the process where the launcher has died, or the store or a rank was silent for longer."""
        beats, now, silent = dict(self.beats), time.monotonic(), ""
        if os.getppid() != self.launcher:
            silent = f"the launcher of rank {self.rank} (pid {self.launcher}) has died"
        elif beats and now - self.answered > limit:  # all have started
            silent = f"the store of the ranks, on the host of rank 0, hasn't answered for {limit:.3g} s"
        else:
            late = [rank for rank, (_, at) in beats.items() if rank != self.rank and now - at > limit]
            names = [f"rank {rank} on {beats[rank][0].partition(' ')[2]}" for rank in late]
            silent = f"{', '.join(names)}: not heard of for {limit:.3g} s" if names else ""
        if silent:
            ends = f"the run ends (train.rank_seconds = {self.seconds:g})"
            self.end(f"{silent}; {ends}. What to do: continue it with --resume")
        return bool(silent)
