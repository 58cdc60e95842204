"""Run on any number of ranks, or as one process: writes checkpoints and continues from others; prints JSON.

`ranks_checkpoints.py SIZE BASE OUT READ…` makes two updates of a new learner, writes OUT/SETTING, and goes on
with a third from there and from each READ/SETTING. It says what was read, and what came of it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_settings import config_of, flat, gathered, make, quiet
from test_step import batch_for
from torch import Tensor
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor import distribute_tensor

from agro import objectives
from agro.config import RunConfig
from agro.errors import Refused
from agro.train.learner import Local
from agro.train.process_group import joined, rank, world_size
from agro.train.ranks import Shard
from agro.train.stored_tensors import StoredTensors, write_shards

SETTINGS = {
    "sample": ("all", "adapter and all"),
    "complete": ("all", "adapter and all", "mixed", "average"),
}
NAME, OPTIONS = "agro", {"beta": 0.3}


def updated(learner: Local, steps: range) -> None:
    """Updates on one batch, which is that of the first weights on all ranks."""
    resolved = objectives.get(NAME).resolve(NAME, OPTIONS)
    for step in steps:
        learner.gradient(learner.batch, NAME, resolved, quiet)  # type: ignore[attr-defined]
        learner.move(1e-3)
        learner.follow(step)


def new_learner(config: RunConfig, mesh: Any) -> Local:
    policy, reference = make(config)
    batch = batch_for(NAME, OPTIONS, policy, reference)
    learner = Local(policy, reference, quiet) if mesh is None else Shard(policy, reference, quiet, mesh)
    learner.batch = batch  # type: ignore[attr-defined]
    return learner


def state(learner: Local) -> Tensor:
    """Weights, average, moving reference, and the optimizer's moments."""
    optimizer = learner.optimizer.state()
    return torch.cat([gathered(learner), flat([optimizer[name] for name in sorted(optimizer)])])


def bits(values: Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def write(config: RunConfig, folder: Path, mesh: Any) -> str:
    learner = new_learner(config, mesh)
    learner.enter(config, began=None, resumed=None)
    updated(learner, range(1, 3))
    folder.mkdir(parents=True, exist_ok=True)
    learner.save(folder)
    return bits(state(learner))


def resume(config: RunConfig, folder: Path, mesh: Any) -> dict[str, Any]:
    learner = new_learner(config, mesh)
    learner.load(folder, 2)
    learner.enter(config, began=None, resumed=folder)
    read = bits(state(learner))
    updated(learner, range(3, 4))
    return {"read": read, "after": state(learner).tolist()}


def few_rows(folder: Path, mesh: Any) -> list[float]:
    """A tensor of fewer rows than ranks, of which the last rank has nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    tensor = distribute_tensor(torch.tensor([1.0, 2.0]), mesh, [Cut(0)])
    write_shards({"few/x": tensor}, folder)
    again = StoredTensors(folder, "few").read("x", tensor)
    return again.full_tensor().tolist()  # type: ignore[no-any-return,attr-defined]


def unwritable(folder: Path) -> str:
    """What is raised on each rank where rank 1 alone can't write."""
    if rank() == 1:
        folder.write_text("a file in its place")
    try:
        write_shards({"few/x": torch.zeros(2)}, folder / "inside")
    except OSError as error:
        return type(error).__name__
    return "nothing"


def not_shared(folder: Path, mesh: Any) -> str:
    """What rank 0 is told where each rank writes on a disk of its own."""
    own = folder / str(rank())
    own.mkdir(parents=True)
    try:
        write_shards({"few/x": distribute_tensor(torch.arange(6.0), mesh, [Cut(0)])}, own)
    except Refused as error:
        return str(error)
    return "nothing"


def main(size: str, base: Path, out: Path, others: list[Path]) -> None:
    found: dict[str, Any] = {}
    with joined(torch.device("cpu")) if world_size() > 1 else nullcontext() as mesh:
        barrier: Callable[[], Any] = dist.barrier if mesh is not None else lambda: None
        for setting in SETTINGS[size]:
            config = config_of(setting, base)
            written = write(config, out / setting, mesh)
            barrier()
            resumed = {str(o): resume(config, o / setting, mesh) for o in (out, *others)}
            found[setting] = {"written": written, "resumed": resumed}
        if mesh is not None:
            found["few"] = few_rows(out / "few", mesh)
            found["not shared"] = not_shared(out / "own", mesh)
            found["unwritable"] = unwritable(out / f"file{rank()}")
    if rank() == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    base, out, *others = (Path(name) for name in sys.argv[2:])
    main(sys.argv[1], base, out, others)
