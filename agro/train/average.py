"""An exponential moving average of the policy's weights, which is measured and saved in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Average:
    """avg ← a · avg + (1 − a) · θ after every optimizer step, starting at the first weights.

    After t steps a = min(decay, (1 + t) / (10 + t)), as in TensorFlow's `ExponentialMovingAverage` with
    `num_updates`: without this warm-up the first weights would keep the share decay^t. The average is at
    least float32, so that small shares of a difference aren't rounded away where the weights are bfloat16.
    Of an adapter its matrices are averaged, not their product.
    """

    def __init__(self, live: Mapping[str, Tensor], trained: Mapping[str, Tensor] | None = None) -> None:
        """`live`: the model's parameters by name. `trained`: what is averaged, where it isn't these."""
        self.live = live
        self.trained = live if trained is None else trained
        self.updates = 0
        self.weights: dict[str, Tensor] = {}
        for name, p in self.trained.items():
            self.weights[name] = p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Follow the parameters after an optimizer step."""
        warm = (1 + self.updates) / (10 + self.updates)
        share = 1 - min(decay, warm)
        for name, own in self.weights.items():
            own.lerp_(self.trained[name].to(own.dtype), share)
        self.updates += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts, the parameters have the average's values."""
        own = {name: p.data for name, p in self.live.items()}
        try:
            for name, p in self.live.items():
                p.data = self.weights[name].to(p.dtype)
            yield
        finally:
            for name, p in self.live.items():
                p.data = own[name]
