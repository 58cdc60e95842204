"""Expected gradients over all groups of n responses, through the objectives and the step that train."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from agro.objectives import get
from agro.proof.enumerable import Enumerable, multisets
from agro.train.micro import MicroBatch
from agro.train.step import backward
from agro.types import Batch


@dataclass(frozen=True, eq=False)
class Data:
    """Where groups come from: outcomes with their rewards and probabilities; an outcome is a response, or one with a noise.

    O outcomes; without noise they are the Y responses. `judged`: groups are of two, and the better one of them is the
    first with probability σ(r_1 − r_2) (Bradley–Terry).
    """

    behavior: Enumerable
    reward: Tensor  # [X,O]
    response: Tensor | None = None  # [O]; None: the responses themselves
    noise: Tensor | None = None  # [X,O] probability of the outcome given its response; None: 1
    age: float = 0.0  # optimiser steps; NaN: unknown
    judged: bool = False
    known: frozenset[str] = field(default=frozenset({"behavior_logp", "ref_logp", "reward"}))
    stored_value: Tensor | None = None  # [X] V* of the prompts, where it was found out before

    @property
    def outcomes(self) -> Tensor:
        """[O] their responses."""
        return torch.arange(len(self.behavior.space.responses)) if self.response is None else self.response

    def probability(self) -> Tensor:
        """[X,O] of now: the behaviour may be the policy that moves."""
        p = self.behavior.logp().detach().exp()[:, self.outcomes]
        return p if self.noise is None else p * self.noise


@dataclass(frozen=True, eq=False)
class AllGroups:
    """Every group of n outcomes of every prompt, each once whatever its order; judged ones in both, the winner first."""

    data: Data
    reference: Enumerable
    n: int

    @cached_property
    def outcomes(self) -> tuple[Tensor, Tensor]:
        """[G,n] groups of outcomes, [G] in how many orders each comes."""
        outcomes = self.data.reward.shape[1]
        if not self.data.judged:
            return multisets(outcomes, self.n)
        assert self.n == 2
        ordered = torch.cartesian_prod(torch.arange(outcomes), torch.arange(outcomes))
        return ordered, torch.ones(len(ordered), dtype=torch.float64)

    @cached_property
    def batch(self) -> Batch:
        """Group g of prompt x weighs as much as it is probable; so means over groups are expectations."""
        data, space = self.data, self.data.behavior.space
        X, G = space.prompts, len(self.outcomes[0])
        asked = torch.arange(X).repeat_interleave(G * self.n)
        outcome = self.outcomes[0].flatten().repeat(X)
        response = data.outcomes[outcome]

        def shifted(values: Tensor) -> Tensor:
            """[X,Y,T] -> [B,T+1]: index 0 is the prompt's."""
            rows = torch.where(space.mask[response], values[asked, response], math.nan)
            return torch.cat([torch.full((len(rows), 1), math.nan, dtype=rows.dtype), rows], 1)

        batch = Batch.of(
            mask=torch.cat([torch.zeros(len(response), 1, dtype=torch.bool), space.mask[response]], 1),
            reward=data.reward[asked, outcome] if "reward" in data.known else torch.full((len(asked),), math.nan),
            group=torch.arange(X * G).repeat_interleave(self.n).tolist(),
            ref_logp=shifted(self.reference.logp_tokens().detach()) if "ref_logp" in data.known else None,
            age=torch.full((len(response),), data.age, dtype=torch.float64),
            extra=None if data.stored_value is None else {"stored_value": data.stored_value[asked]},
            tokens=torch.cat([asked[:, None], space.tokens[response]], 1),
            lengths=space.lengths[response] + 1,
            pairs=torch.arange(len(response)).view(-1, 2) if data.judged else None,
        )
        return self._of_now(batch, shifted(data.behavior.logp_tokens().detach()))

    def again(self) -> Batch:
        """The batch at the probabilities of now, where the behaviour has moved."""
        space = self.data.behavior.space
        asked, tokens = self.batch.tokens[:, 0], self.response  # type: ignore[index]
        rows = torch.where(space.mask[tokens], self.data.behavior.logp_tokens().detach()[asked, tokens], math.nan)
        first = torch.full((len(rows), 1), math.nan, dtype=rows.dtype)
        return self._of_now(self.batch, torch.cat([first, rows], 1))

    @cached_property
    def response(self) -> Tensor:
        """[B] the response of each row."""
        return self.data.outcomes[self.outcomes[0].flatten().repeat(self.data.behavior.space.prompts)]

    def _of_now(self, batch: Batch, behavior_logp: Tensor) -> Batch:
        groups, orders = self.outcomes
        weight = orders * self.data.probability()[:, groups].prod(-1)  # [X,G]
        if self.data.judged:
            weight = weight * (self.data.reward[:, groups[:, 0]] - self.data.reward[:, groups[:, 1]]).sigmoid()
        possible = (weight > 0).flatten().repeat_interleave(self.n)
        batch = batch.replace(
            weight=weight.flatten().repeat_interleave(self.n),
            behavior_logp=behavior_logp if "behavior_logp" in self.data.known else None,
        )
        return batch if possible.all() else batch.rows(possible.nonzero()[:, 0])


def all_groups(data: Data, reference: Enumerable, n: int) -> Batch:
    """The batch of `AllGroups`."""
    return AllGroups(data, reference, n).batch


def gradient(
    policy: Enumerable,
    reference: Enumerable,
    batch: Batch,
    name: str,
    options: Mapping[str, Any],
    size: int | None = None,
) -> Tensor:
    """[W] the gradient of `name` over `batch` with respect to all parameters, by the step; `size`: its micro-batches."""
    backward(
        policy,  # type: ignore[arg-type]
        batch,
        name,
        get(name).resolve(name, options),
        micro=MicroBatch(size),
        reference=reference,  # type: ignore[arg-type]
    )
    return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in policy.parameters()])
