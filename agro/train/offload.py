"""Offloading to the CPU's memory, of activations until the backward pass and of the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

SMALL = 1 << 16  # elements below which a copy costs more than it frees


@contextmanager
def activations(model: nn.Module, active: bool) -> Iterator[None]:
    """Keep what autograd saves for the backward pass on the CPU, except for the model's own weights."""
    if not active:
        yield
        return
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x: Tensor) -> tuple[torch.device, Tensor]:
        if x.numel() < SMALL or x.untyped_storage().data_ptr() in weights:
            return x.device, x
        kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        return x.device, kept.copy_(x, non_blocking=x.is_cuda)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        return packed[1].to(packed[0], non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@contextmanager
def state_on_device(optimizer: torch.optim.Optimizer, active: bool) -> Iterator[None]:
    """Move the optimizer's state to the device of its parameters, and back to the CPU afterwards."""
    if active:
        _move(optimizer, None)
    yield
    if active:
        _move(optimizer, torch.device("cpu"))


def _move(optimizer: torch.optim.Optimizer, device: torch.device | None) -> None:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step":  # which lies on the CPU anyway
                state[name] = value.to(device or parameter.device)
