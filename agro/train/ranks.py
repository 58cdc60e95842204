"""Training sharded over ranks: `torchrun --nproc-per-node N -m agro train …`, with FSDP2.

Rank 0 runs the loop. Each call of its learner is broadcast and repeated on all ranks, whose weights are
shards of one model. A forward pass is a collective: the passes of a step are distributed over the ranks, and
a rank without a pass of its own computes one over nothing. Each rank computes the streams of its rows. They
are added up, so that all ranks evaluate the same objective over the complete step. FSDP averages gradients,
so what is back-propagated is multiplied by the number of ranks to obtain their sum.

Rank 0 also has a complete copy of the model, for sampling and saving. It is updated when weights are
published.

The process group of the ranks that torchrun started, and the calls that rank 0 sends to the others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from agro.config import RunConfig
from agro.errors import Refused
from agro.io.files import complete_folder
from agro.models.policy import Policy
from agro.models.published import form_of, publish
from agro.models.reference import frozen
from agro.objectives import NotFinite
from agro.train.abilities import LearnerCapability
from agro.train.as_sampled import logp_as_sampled
from agro.train.learner import Local, Which, read_weights
from agro.train.micro import MicroBatch
from agro.train.step import Passes, Step
from agro.types import Batch, Sample

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


class DistributedPasses(Passes):
    """Passes that are distributed over the ranks."""

    def __init__(self, micro: MicroBatch) -> None:
        super().__init__(micro)
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.scale = float(self.ranks)

    def tolerating(self) -> AbstractContextManager[None]:
        """All ranks must make the same passes: none of them raises before the streams were added up."""
        return suppress(NotFinite)

    def share(self, parts: list[Tensor]) -> list[Tensor | None]:
        rounds = -(-len(parts) // self.ranks)
        padded = [*parts, *[None] * (rounds * self.ranks - len(parts))]
        return padded[self.rank :: self.ranks]

    def gather(self, streams: Mapping[str, Tensor]) -> None:
        for stream in streams.values():
            dist.all_reduce(stream)


class Shard(Local):
    """The learner of one rank. All ranks receive the same calls."""

    can: ClassVar[frozenset[LearnerCapability]] = frozenset()

    def __init__(
        self, policy: Policy, reference: Policy | None, say: Callable[[str], None], mesh: DeviceMesh
    ) -> None:
        super().__init__(policy, reference, say)
        self.key = super().reference_key
        self.copy = frozen(policy) if dist.get_rank() == 0 else None
        shard(policy, mesh, method="streams", reshard=True)
        if reference is not None:
            # No reshard: for the exact KL the policy's streams use its head after its hidden states.
            shard(reference, mesh, method="hidden", reshard=False)

    @property
    def reference_key(self) -> str | None:
        return self.key

    def enter(self, config: RunConfig, *, began: Path | None, resumed: Path | None) -> None:
        super().enter(config, began=began, resumed=resumed)
        self.micro.adapts = False  # one rank can't change its passes alone

    def logp(self, batch: Batch, of: Which = "policy") -> Tensor:
        logp_BT = super().logp(batch, of)
        self._reshard_reference()
        return logp_BT

    def gradient(
        self, batch: Batch, objective: str, options: Mapping[str, Any], check: Callable[[], None]
    ) -> Step:
        step = super().gradient(batch, objective, options, check)
        self._reshard_reference()
        return step

    def _reshard_reference(self) -> None:
        if self.reference is not None:
            self.reference.model.reshard()

    def publish(self, folder: Path) -> None:
        self._update_copy()
        if self.copy is not None:
            with complete_folder(folder) as temporary:
                publish(self.copy, temporary, form_of(self.config))

    def save_model(self, folder: Path, *, merge: bool) -> None:
        self._update_copy()
        if self.copy is not None:
            self.copy.save(folder)

    def save(self, folder: Path) -> None:
        self.writes: list[Callable[[], Any]] = []
        super().save(folder)
        for write in self.writes:  # after the last collective: rank 0 may fail to write
            write()

    @torch.no_grad()
    def _update_copy(self) -> None:
        """Gather the weights; all ranks take part, rank 0 stores them."""
        copies = {} if self.copy is None else dict(self.copy.model.named_parameters())
        for name, weight in self.policy.weights().items():
            full = _full(weight)
            if copies:
                copies[name].copy_(full)

    def _passes(self, check: Callable[[], None] = lambda: None) -> Passes:
        return DistributedPasses(self.micro)

    def _after_backward(self) -> None:
        """Sum the gradients of the value head, which isn't sharded, and average them as FSDP does."""
        for weight in self.policy.value_weights().values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()

    def _write(self, tensors: Mapping[str, Tensor], file: Path) -> None:
        full = {name: _full(t.detach()).cpu().contiguous() for name, t in tensors.items()}
        if dist.get_rank() == 0:
            self.writes.append(partial(save_file, full, file))

    def _write_text(self, text: str, file: Path) -> None:
        if dist.get_rank() == 0:
            self.writes.append(partial(super()._write_text, text, file))

    @torch.no_grad()
    def _assign(self, file: Path, weights: Mapping[str, Tensor]) -> None:
        for name, value in read_weights(file, weights).items():
            weights[name].copy_(_like(value, weights[name]))

    def _as_state(self, value: Tensor, weight: Tensor) -> Tensor:
        return _like(value, weight) if value.shape == weight.shape else value


class Ranks:
    """The learner of the loop on rank 0: each call is repeated on all ranks."""

    can: ClassVar[frozenset[LearnerCapability]] = Shard.can

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.encoder = shard.encoder
        self.calls = Calls()

    @property
    def version(self) -> int:
        return self.shard.version

    @version.setter
    def version(self, version: int) -> None:
        self._all("set_version", version)

    @property
    def reference_key(self) -> str | None:
        return self.shard.reference_key

    def enter(self, config: RunConfig, *, began: Path | None, resumed: Path | None) -> None:
        self._all("enter", config, began=began, resumed=resumed)

    def logp(self, batch: Batch, of: Which = "policy") -> Tensor:
        logp: Tensor = self._all("logp", batch, of)
        return logp

    def logp_as_sampled(self, sample: Sample) -> NDArray[np.float64]:
        """By the complete copy on this rank, which has the weights that were published last."""
        assert self.shard.copy is not None
        return logp_as_sampled(self.shard.copy, sample)

    def gradient(
        self, batch: Batch, objective: str, options: Mapping[str, Any], check: Callable[[], None]
    ) -> Step:
        check()  # only here: an exception during a pass would leave the other ranks waiting in it
        step: Step = self._all("gradient", batch, objective, dict(options), _nothing)
        return step

    def move(self, lr: float) -> None:
        self._all("move", lr)

    def follow(self, step: int) -> None:
        self._all("follow", step)

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext()  # `check_sharded` refuses train.weights_average

    def publish(self, folder: Path) -> None:
        self._all("publish", folder)

    def save_model(self, folder: Path, *, merge: bool) -> None:
        self._all("save_model", folder, merge=merge)

    def save(self, folder: Path) -> None:
        self._all("save", folder)

    def load(self, folder: Path, version: int) -> None:
        self._all("load", folder, version)

    def close(self) -> None:
        """Let the other ranks end."""
        self.calls.send(None)
        del self.calls  # nothing else may keep its process group

    def _all(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.send((method, args, kwargs))
        return getattr(self.shard, method)(*args, **kwargs)


def serve(shard: Shard) -> None:
    """On a rank other than 0: repeat the calls of rank 0 until it ends. Signals are left to rank 0."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    calls = Calls()
    while (call := calls.receive()) is not None:
        method, args, kwargs = call
        try:
            getattr(shard, method)(*args, **kwargs)
        except (NotFinite, Refused):  # raised on rank 0 too, which handles it
            continue


def shard(policy: Policy, mesh: DeviceMesh, *, method: str, reshard: bool) -> None:
    """Shard a policy's model over the ranks of `mesh`, and run the policy's `method` inside the module.

    `reshard`: whether the weights outside of the layers are sharded again after each forward pass.
    """
    model = policy.model
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    name = f"agro_{method}"
    setattr(model, name, getattr(policy, method))
    register_fsdp_forward_method(model, name)
    setattr(policy, method, getattr(model, name))


def _layers(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks: the items of the longest list of modules."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(value: Tensor, weight: Tensor) -> Tensor:
    """`value`, which all ranks have, sharded as `weight` is."""
    if not isinstance(weight, DTensor):
        return value
    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)


def _nothing() -> None:
    pass
