"""The optimizer of a phase: AdamW over the policy's weights and, in a group of its own, over its value's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agro.accelerated import adamw_8bit
from agro.config import Train
from agro.objectives import NotFinite
from agro.policy import Policy
from agro.train.offload import state_on_device


class Optimizer:
    """Clips gradients and moves weights. The value learns at `train.value_lr`, on the policy's schedule."""

    def __init__(self, policy: Policy, config: Train) -> None:
        self.policy, self.config = policy, config
        groups = [
            {"params": list(policy.trained().values()), "of_lr": 1.0},
            {
                "params": list(policy.value_weights().values()),
                "of_lr": config.value_lr / config.lr,
                "weight_decay": 0.0,
            },
        ]
        self.adam = _adamw([g for g in groups if g["params"]], policy, config)

    def clip(self) -> float:
        """Clip the gradients to norm `train.clip`; returns the policy's norm before that.

        Raises `NotFinite` for a norm that isn't finite.
        The value's gradient is clipped separately, so that it doesn't reduce the policy's.
        """
        norms = []
        for weights in (self.policy.trained(), self.policy.value_weights()):
            norm = torch.nn.utils.clip_grad_norm_(weights.values(), self.config.clip)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            _check(weights, norms[-1])
        return norms[0]

    def move(self, lr: float) -> None:
        """One step of the policy's weights at learning rate `lr`, and of the value's in proportion."""
        for group in self.adam.param_groups:
            group["lr"] = lr * group["of_lr"]
        with state_on_device(self.adam, "optimizer" in self.config.offload):
            self.adam.step()
        if self.policy.masters is not None:
            self.policy.masters.round()


def _adamw(groups: list[dict[str, Any]], policy: Policy, config: Train) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.adam_betas,
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == "adamw_8bit":
        return adamw_8bit(groups, policy.device, **settings)
    return torch.optim.AdamW(groups, **settings, fused=_fuses(policy))


def _fuses(policy: Policy) -> bool:
    """Whether one kernel updates a weight: on the CPU and CUDA, but not where weights are sharded."""
    weights = policy.trained().values()
    return not any(isinstance(w, DTensor) for w in weights)


def _check(weights: Mapping[str, Tensor], norm: float) -> None:
    """Raise `NotFinite` naming the parameters where the gradient's norm isn't finite."""
    if not math.isfinite(norm):
        bad = [n for n, p in weights.items() if p.grad is not None and not p.grad.isfinite().all()]
        raise NotFinite(
            f"the gradient isn't finite in {len(bad)} parameters, among them {', '.join(bad[:3])}"
        )
