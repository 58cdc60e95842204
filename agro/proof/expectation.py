"""Expected gradients over all groups of n responses, through the objectives and the step that train."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agro.objectives import get
from agro.proof.enumerable import Enumerable, multisets
from agro.train.micro import MicroBatch
from agro.train.step import backward
from agro.types import Batch


@dataclass(frozen=True)
class Data:
    """Where groups come from: outcomes with their probability and reward; an outcome is a response, or a response and a noise.

    O outcomes; without noise they are the Y responses.
    """

    behavior: Enumerable
    reward: Tensor  # [X,O]
    response: Tensor | None = None  # [O]; None: the responses themselves
    noise: Tensor | None = None  # [X,O] probability of the outcome given its response; None: 1
    age: float = 0.0  # optimiser steps; NaN: unknown
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outcomes(self) -> Tensor:
        """[O] their responses."""
        return torch.arange(len(self.behavior.space.responses)) if self.response is None else self.response

    def probability(self) -> Tensor:
        """[X,O]"""
        p = self.behavior.logp().detach().exp()[:, self.outcomes]
        return p if self.noise is None else p * self.noise


def all_groups(data: Data, reference: Enumerable, n: int) -> Batch:
    """Every group of n outcomes of every prompt, each once whatever its order, weighing as much as it is probable."""
    space = data.behavior.space
    groups, orders = multisets(data.reward.shape[1], n)
    p = data.probability()
    weight = orders * p[:, groups].prod(-1)  # [X,G]
    prompt, group = (weight > 0).nonzero().T
    outcome = groups[group]  # [K,n]
    response = data.outcomes[outcome].flatten()
    asked = prompt[:, None].expand(-1, n).flatten()

    def shifted(values: Tensor, first: float) -> Tensor:
        """[X,Y,T] -> [B,T+1]: index 0 is the prompt's."""
        rows = torch.where(space.mask[response], values[asked, response], math.nan)
        return torch.cat([torch.full((len(rows), 1), first, dtype=rows.dtype), rows], 1)

    mask = torch.cat([torch.zeros(len(response), 1, dtype=torch.bool), space.mask[response]], 1)
    return Batch.of(
        mask=mask,
        reward=data.reward[asked[:, None], outcome.flatten()[:, None]][:, 0],
        group=torch.arange(len(prompt)).repeat_interleave(n).tolist(),
        weight=weight[prompt, group].repeat_interleave(n),
        behavior_logp=shifted(data.behavior.logp_tokens().detach(), math.nan),
        ref_logp=shifted(reference.logp_tokens().detach(), math.nan),
        age=torch.full((len(response),), data.age, dtype=torch.float64),
        tokens=torch.cat([asked[:, None], space.tokens[response]], 1),
        lengths=space.lengths[response] + 1,
        extra=dict(data.extra),
    )


def gradient(
    policy: Enumerable,
    reference: Enumerable,
    batch: Batch,
    name: str,
    options: Mapping[str, Any],
    size: int | None = None,
) -> Tensor:
    """[W] the gradient of `name` over `batch` with respect to all weights, by the step; `size`: its micro-batches."""
    backward(
        policy,  # type: ignore[arg-type]
        batch,
        name,
        get(name).resolve(name, options),
        micro=MicroBatch(size),
        reference=reference,  # type: ignore[arg-type]
    )
    return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in policy.weights().values()])
