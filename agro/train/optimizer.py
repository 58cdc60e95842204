"""The optimizer of a phase: AdamW over the policy's weights and, in a group of its own, over its value's;
what is kept in the CPU's memory meanwhile, and an average of the weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from agro.config import TrainConfig
from agro.models.policy import Policy
from agro.models.pretrained import adamw_8bit
from agro.models.reference import is_shard, replaced
from agro.objectives import NotFinite

SMALL = 1 << 16  # elements below which a copy costs more than it frees


@contextmanager
def activations(active: bool) -> Iterator[None]:
    """Keep what autograd saves for the backward pass on the CPU, except for weights."""
    if not active:
        yield
        return

    def pack(x: Tensor) -> tuple[torch.device, Tensor]:
        if x.numel() < SMALL or isinstance(x if x._base is None else x._base, nn.Parameter):
            return x.device, x
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        return x.device, copy.copy_(x, non_blocking=x.is_cuda)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        return packed[1].to(packed[0], non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


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
        for name, average in self.weights.items():
            average.lerp_(self.trained[name].to(average.dtype), share)
        self.updates += 1

    def in_place(self) -> AbstractContextManager[None]:
        """While it lasts, the parameters have the average's values."""
        return replaced(self.live, self.weights)


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Flush denormal numbers, below 1e-38 in float32, in this thread, on a CPU that can; a decorator too.

    Weights π/π_ref of improbable responses leave such numbers, with which a processor works several times
    slower. Not longer: rewards and records keep all of their bits.
    """
    previous = float("1e-310") * 0.5 == 0  # torch has no function for it
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(previous)


class Optimizer:
    """Clips gradients and moves weights. The value learns at `train.value_lr`, on the policy's schedule."""

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self.policy, self.config = policy, config
        groups: list[dict[str, Any]] = [{"params": list(policy.trained().values()), "is_value": False}]
        value = list(policy.value_weights().values())
        groups.append({"params": value, "is_value": True, "weight_decay": 0.0})
        groups = [g for g in groups if g["params"]]
        settings: dict[str, Any] = {"lr": 0.0, "betas": config.adam_betas, "eps": config.adam_eps}
        settings["weight_decay"] = config.weight_decay
        self.adam: torch.optim.Optimizer
        if config.optimizer == "adamw_8bit":
            self.adam = adamw_8bit(groups, policy.device, **settings)
        else:
            is_sharded = any(map(is_shard, policy.trained().values()))  # then no fused kernel
            self.adam = torch.optim.AdamW(groups, **settings, fused=not is_sharded)

    def clip(self) -> float:
        """Clip the gradients to norm `train.clip`; returns the policy's norm before that.

        Raises `NotFinite` for a norm that isn't finite.
        The value's gradient is clipped separately, so that it doesn't reduce the policy's.
        """
        norms = []
        for weights in (self.policy.trained(), self.policy.value_weights()):
            norm = torch.nn.utils.clip_grad_norm_(weights.values(), self.config.clip)
            norms.append(float(norm.full_tensor() if is_shard(norm) else norm))
            if not math.isfinite(norms[-1]):
                bad = [n for n, p in weights.items() if p.grad is not None and not p.grad.isfinite().all()]
                named = f"{len(bad)} parameters, among them {', '.join(bad[:3])}"
                raise NotFinite(f"the gradient isn't finite in {named}")
        return norms[0]

    def move(self, lr: float, largest: float | None = None) -> None:
        """One step of the policy's weights at learning rate `lr`, and of the value's in proportion.

        `largest`: the phase's largest rate of the policy, at which the value's is `train.value_lr`; this one
        where it isn't given.
        """
        for group in self.adam.param_groups:
            group["lr"] = lr * (self.config.value_lr / (largest or lr)) if group["is_value"] else lr
        offloads = "optimizer" in self.config.offload
        if offloads:
            self._move_state(None)
        self.adam.step()
        if offloads:
            self._move_state(torch.device("cpu"))
        if self.policy.masters is not None:
            self.policy.masters.round()

    @torch.no_grad()
    def along_gradient(self) -> Tensor:
        """[] ⟨g, θ⟩ of the policy's clipped gradient and what is trained, summed over ranks.

        What it falls by in a move is −⟨g, Δθ⟩, of whatever the optimizer did and without a copy of the
        weights. That is the small difference of two: the tensors' sums are added in float64.
        """
        sums = [torch.zeros((), device=self.policy.device)]
        weights = [w for group in self.adam.param_groups if not group["is_value"] for w in group["params"]]
        for weight in weights:
            if weight.grad is not None:
                w, g = (x.to_local() if is_shard(x) else x for x in (weight, weight.grad))
                dtype = torch.promote_types(w.dtype, torch.float32)
                sums.append(torch.dot(w.flatten().to(dtype), g.flatten().to(dtype)))  # no tensor of products
        total = torch.stack(sums).sum(dtype=torch.float64)
        if any(map(is_shard, weights)):
            torch.distributed.all_reduce(total)
        return total

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """After it weights and moments are as before. Their copies are on the CPU meanwhile."""
        grouped = [w.detach() for group in self.adam.param_groups for w in group["params"]]
        weights = [w.to_local() if is_shard(w) else w for w in grouped]
        saved = [w.to("cpu", copy=True) for w in weights]
        # Not the state_dict of bitsandbytes, which nests its tensors.
        state = copy.deepcopy(torch.optim.Optimizer.state_dict(self.adam))
        try:
            yield
        finally:
            for weight, before in zip(weights, saved, strict=True):
                weight.copy_(before)
            torch.optim.Optimizer.load_state_dict(self.adam, state)
            if self.policy.masters is not None:
                self.policy.masters.round()

    def _move_state(self, device: torch.device | None) -> None:
        """To a device; None: to that of the parameters."""
        for parameter, state in self.adam.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and name != "step":  # which lies on the CPU anyway
                    state[name] = value.to(device or parameter.device)
