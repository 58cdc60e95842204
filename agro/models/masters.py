"""Float32 copies of bfloat16 weights, which the optimizer updates (`policy.dtype = "mixed"`).

An update smaller than a 256th of a weight rounds away in bfloat16, and so does a small gradient in a sum over
passes. So weights and sums of gradients are float32, and products are computed from their bfloat16 rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor


class Masters:
    """The float32 weights, and their gradients."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        """`live`: float32 parameters by name. They become bfloat16."""
        self.live = live
        self.weights: dict[str, Tensor] = {}
        self.hooks = []
        for name, p in live.items():
            self.weights[name] = p.detach().clone().requires_grad_()
            p.data = p.data.bfloat16()
            self.hooks.append(p.register_post_accumulate_grad_hook(partial(self._take_gradient, name)))

    def _take_gradient(self, name: str, p: Tensor) -> None:
        """Add the gradient of one backward pass to that of the float32 weight, and free it."""
        assert p.grad is not None
        master = self.weights[name]
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad += p.grad
        p.grad = None

    def zero_grad(self) -> None:
        for master in self.weights.values():
            master.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Set the model's weights to the rounded float32 weights."""
        for name, p in self.live.items():
            p.copy_(self.weights[name])

    def give_back(self) -> None:
        """Make the model's weights float32 again, for FSDP, which rounds what it gathers."""
        for hook in self.hooks:
            hook.remove()
        for name, p in self.live.items():
            p.data = self.weights[name].detach()
