"""Training sharded over ranks: `torchrun --nproc-per-node N -m agro train …`, with FSDP2.

Rank 0 runs the loop. Each call of its learner is broadcast and repeated on all ranks, whose weights are
shards of one model. A forward pass is a collective: the passes of a step are distributed over the ranks, and
a rank without a pass computes one without rows. Each rank computes the streams of its rows. They are added
up, so that all ranks evaluate the same objective over the complete step. FSDP averages gradients; multiplying
them by the number of ranks afterwards gives their sum. (Scaling before would round differently: transformers'
norms are float32 whatever the weights' type.)

An adapter and a value head are small: each rank holds all of them and adds up their gradients itself.

Rank 0 also has a complete copy of the model, for sampling and saving. It is updated when an engine is to
sample with the current weights, and when they are published.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.reference import duplicate
from agro.objectives import NotFinite
from agro.train.learner import Learner, Which, logp_as_sampled, nothing
from agro.train.process_group import group_of_calls
from agro.train.step import MicroBatch, Passes, Step
from agro.train.stored_tensors import write_shards
from agro.types import Batch, Sample


class DistributedPasses(Passes):
    """Passes that are distributed over the ranks."""

    def __init__(self, micro: MicroBatch, *, offload: bool) -> None:
        super().__init__(micro, offload=offload)
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()

    def tolerating(self) -> AbstractContextManager[None]:
        """All ranks must make the same passes, so none raises before the streams are added up."""
        return suppress(NotFinite)

    def share(self, parts: list[Tensor]) -> list[Tensor | None]:
        rounds = -(-len(parts) // self.ranks)
        padded = [*parts, *[None] * (rounds * self.ranks - len(parts))]
        return padded[self.rank :: self.ranks]

    def gather(self, streams: Mapping[str, Tensor]) -> None:
        for stream in streams.values():
            dist.all_reduce(stream)


class Shard(Learner):
    """The learner of one rank. All ranks receive the same calls."""

    def __init__(
        self, policy: Policy, reference: Policy | None, say: Callable[[str], None], mesh: DeviceMesh
    ) -> None:
        super().__init__(policy, reference, say)
        self.key = super().reference_key
        self.copy = duplicate(policy) if dist.get_rank() == 0 else None
        self.average_in_place = ExitStack()
        shard(policy, mesh, reshard=True)
        run_inside(policy.model, policy, "streams", "agro_policy")
        if reference is None:
            return
        if reference.model is policy.model:  # the reference is the model without or with another adapter
            run_inside(policy.model, reference, "streams", "agro_reference")
        else:
            # No reshard: for the exact KL, the policy's streams use its head after its hidden states.
            shard(reference, mesh, reshard=False)
            run_inside(reference.model, reference, "hidden", "agro_reference")

    @property
    def reference_key(self) -> str | None:
        return self.key

    def set_version(self, version: int) -> None:
        self.version = version

    def enter(self, config: RunConfig, *, began: Path | None, resumed: Path | None) -> None:
        super().enter(config, began=began, resumed=resumed)
        self.micro.adapts = False  # one rank can't change its passes alone

    def logp(self, batch: Batch, of: Which = "policy") -> Tensor:
        logp_BT = super().logp(batch, of)
        self._reshard_reference()
        return logp_BT

    def _reshard_reference(self) -> None:
        if self.reference is not None:
            self.reference.model.reshard()

    def begin_average(self) -> None:
        """Give the policy, and the copy that samples, the averaged weights."""
        self.average_in_place.enter_context(self.averaged())
        self.show()

    def end_average(self) -> None:
        self.average_in_place.close()
        self.show()

    def publish(self, folder: Path, policy: Policy | None = None) -> None:
        self.show()
        if self.copy is not None:
            super().publish(folder, self.copy)

    def save_model(self, folder: Path, *, merge: bool) -> None:
        self.show()
        if self.copy is not None:
            self.copy.save(folder, merge=merge)

    def save(self, folder: Path) -> None:
        self.tensors: dict[str, Tensor] = {}
        super().save(folder)
        write_shards(self.tensors, folder)
        del self.tensors

    @torch.no_grad()
    def show(self) -> None:
        """Gather the weights one at a time; all ranks take part, and rank 0 copies them."""
        copies = {} if self.copy is None else dict(self.copy.model.named_parameters())
        for name, weight in self.policy.weights().items():
            full = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if copies:
                copies[name].copy_(full)

    def _passes(self, check: Callable[[], None] = lambda: None) -> Passes:
        return DistributedPasses(self.micro, offload="activations" in self.config.train.offload)

    def _after_backward(self) -> None:
        """Turn FSDP's means over the ranks into sums, and add up the gradients of unsharded weights.

        Then shard the reference again, which the objective may have read.
        """
        for weight in [*self.policy.weights().values(), *self.policy.value_weights().values()]:
            if weight.grad is None:  # the same on all ranks: the objective doesn't read the value
                continue
            if isinstance(weight, DTensor):
                weight.grad *= dist.get_world_size()
            else:
                dist.all_reduce(weight.grad)
        self._reshard_reference()

    def _write(self, tensors: Mapping[str, Tensor], folder: Path, part: str) -> None:
        self.tensors |= {f"{part}/{name}": tensor for name, tensor in tensors.items()}

    def _write_text(self, text: str, file: Path) -> None:
        if dist.get_rank() == 0:
            super()._write_text(text, file)


# The learner's methods that all ranks repeat without changes.
REPEATED = {
    *("enter", "logp", "values", "move", "along_gradient", "try_move", "follow", "refer"),
    *("show", "publish", "save_model", "save", "load"),
}


class Ranks:
    """The `Learner` of the loop on rank 0: each call is repeated on all ranks."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.encoder = shard.encoder
        self.group = group_of_calls()

    @property
    def version(self) -> int:
        return self.shard.version

    @version.setter
    def version(self, version: int) -> None:
        self._all("set_version", version)

    @property
    def reference_key(self) -> str | None:
        return self.shard.reference_key

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in REPEATED:
            raise AttributeError(name)
        return partial(self._all, name)

    def logp_as_sampled(self, sample: Sample) -> NDArray[np.float64]:
        """Computed by the complete copy on this rank, which has the last published weights."""
        assert self.shard.copy is not None
        return logp_as_sampled(self.shard.copy, sample)

    def gradient(
        self, batch: Batch, objective: str, options: Mapping[str, Any], check: Callable[[], None]
    ) -> Step:
        check()  # only here: an exception during a pass would leave the other ranks waiting
        step: Step = self._all("gradient", batch, objective, dict(options), nothing)
        return step

    @contextmanager
    def averaged(self) -> Iterator[None]:
        if self.shard.average is None:
            yield
            return
        self._all("begin_average")
        try:
            yield
        finally:
            self._all("end_average")

    def close(self) -> None:
        dist.broadcast_object_list([None], group=self.group)
        del self.group  # nothing else may hold a reference to it

    def _all(self, method: str, *args: Any, **kwargs: Any) -> Any:
        dist.broadcast_object_list([(method, args, kwargs)], group=self.group)
        return getattr(self.shard, method)(*args, **kwargs)


def serve(shard: Shard) -> None:
    """Repeat the calls of rank 0 on another rank until rank 0 closes. Signals are left to rank 0."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    group = group_of_calls()
    call: list[Any] = [None]
    while True:
        dist.broadcast_object_list(call, group=group)
        if call[0] is None:
            return
        method, args, kwargs = call[0]
        try:
            getattr(shard, method)(*args, **kwargs)
        except (NotFinite, Refused, OSError):  # rank 0 raises and handles it too
            continue


def shard(policy: Policy, mesh: DeviceMesh, *, reshard: bool) -> None:
    """Shard a policy's model over the ranks of `mesh`, except its adapter.

    `reshard`: whether the weights outside the layers are sharded again after each forward pass.
    """
    precision = MixedPrecisionPolicy()
    if policy.masters is not None:
        policy.masters.give_back()
        policy.masters = None
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    adapter = set() if policy.adapter is None else {p for p in policy.model.parameters() if p.requires_grad}
    lists = [list(module) for module in policy.model.modules() if isinstance(module, nn.ModuleList)]
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "ignored_params": adapter}
    for layer in max(lists, key=len):  # the transformer blocks
        fully_shard(layer, **settings)
    fully_shard(policy.model, reshard_after_forward=reshard, **settings)


def run_inside(model: nn.Module, policy: Policy, method: str, name: str) -> None:
    """Run a policy's `method` as the method `name` of the sharded model, which first gathers its weights."""
    setattr(model, name, getattr(policy, method))
    register_fsdp_forward_method(model, name)
    setattr(policy, method, getattr(model, name))
