"""Run on ranks: the memory that saving and loading a checkpoint takes beside a rank's shards; prints JSON.

`ranks_memory.py FOLDER`. A peak is what the process has resident at most, less what it has without weights
and the optimizer's state; both are in bytes of the shards that the checkpoint has of this rank.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from agro.config import RunConfig
from agro.models.policy import Policy
from agro.train.process_group import joined, rank
from agro.train.ranks import Shard

SPEC = {"alphabet": "abcdef", "hidden": 512, "layers": 6, "heads": 8, "context": 64}
CONFIG = RunConfig.of({"policy": {"new": SPEC}})


def status(key: str) -> int:
    """A size of this process in bytes: VmRSS, or VmHWM, the largest VmRSS since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) << 10


def forget_peak() -> int:
    """Begin to measure; returns what is resident."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed is taken again, and not seen
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def size(tensors: dict[str, Tensor]) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
    return sum(t.numel() * t.element_size() for t in local)


def main(folder: Path) -> None:
    policy = Policy.load(CONFIG.policy)  # in a process group, transformers saves a new model on rank 0 alone
    with joined(torch.device("cpu")) as mesh:
        learner = Shard(policy, None, lambda text: None, mesh)
        learner.copy = None  # rank 0's copy is for sampling
        learner.enter(CONFIG, began=None, resumed=None)
        for weight in learner.policy.weights().values():
            weight.grad = torch.ones_like(weight)
        learner.move(1e-3)
        learner.policy.zero_grad()
        folder.mkdir(parents=True, exist_ok=True)
        weights = size(learner.policy.weights())
        shard = weights + size(learner.optimizer.state())
        dist.barrier()
        before = forget_peak()
        learner.save(folder)
        saving = status("VmHWM") - before + shard
        del learner.optimizer
        dist.barrier()
        before = forget_peak()
        learner.load(folder, 1)
        learner.enter(CONFIG, began=None, resumed=folder)
        loading = status("VmHWM") - before + weights
        own = {"rank": rank(), "shard": shard, "saving": saving / shard, "loading": loading / shard}
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    if rank() == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
