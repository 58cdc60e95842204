"""Groups of n responses, all of them or drawn, and expected gradients, through the objectives and the step
that train."""

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
from agro.train.step import Passes, backward, streams_of
from agro.types import Batch


@dataclass(frozen=True, eq=False)
class Data:
    """Where groups come from: outcomes with their rewards and probabilities; an outcome is a response, or one
    with a noise.

    O outcomes; without noise they are the Y responses. `judged`: groups are of two, and the better one of
    them is the first with probability σ(r_1 − r_2) (Bradley–Terry).
    """

    behavior: Enumerable
    reward: Tensor  # [X,O]
    response: Tensor | None = None  # [O]; None: the responses themselves
    noise: Tensor | None = None  # [X,O] probability of the outcome given its response; None: 1
    age: float = 0.0  # optimizer steps; NaN: unknown
    judged: bool = False
    known: frozenset[str] = field(default=frozenset({"behavior_logp", "ref_logp", "reward"}))
    stored_value: Tensor | None = None  # [X] V* of the prompts, where it was estimated before

    @property
    def outcomes(self) -> Tensor:
        """[O] their responses."""
        return torch.arange(len(self.behavior.space.responses)) if self.response is None else self.response

    def probability(self) -> Tensor:
        """[X,O] current probabilities: the behavior may be the policy that is trained."""
        p = self.behavior.logp().detach().exp()[:, self.outcomes]
        return p if self.noise is None else p * self.noise


@dataclass(frozen=True, eq=False)
class AllGroups:
    """Every group of n outcomes of every prompt, each once whatever its order; judged ones in both, the
    winner first."""

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
        X, G = self.data.behavior.space.prompts, len(self.outcomes[0])
        asked = torch.arange(X).repeat_interleave(G * self.n)
        rows = _rows(self.data, self.reference, asked, self.outcomes[0].flatten().repeat(X))
        batch = Batch.of(
            group=torch.arange(X * G).repeat_interleave(self.n).tolist(),
            age=torch.full((len(asked),), self.data.age, dtype=torch.float64),
            pairs=torch.arange(len(asked)).view(-1, 2) if self.data.judged else None,
            **rows,
        )
        return self._of_now(batch, rows["behavior_logp"])

    def again(self) -> Batch:
        """The batch with current probabilities, where the behavior has changed."""
        asked, response = self.batch.tokens[:, 0], self.response  # type: ignore[index]
        return self._of_now(self.batch, _shifted(self.data.behavior, asked, response))

    @cached_property
    def response(self) -> Tensor:
        """[B] the response of each row."""
        return self.data.outcomes[self.outcomes[0].flatten().repeat(self.data.behavior.space.prompts)]

    def _of_now(self, batch: Batch, behavior_logp: Tensor | None) -> Batch:
        groups, orders = self.outcomes
        weight = orders * self.data.probability()[:, groups].prod(-1)  # [X,G]
        if self.data.judged:
            weight = (
                weight * (self.data.reward[:, groups[:, 0]] - self.data.reward[:, groups[:, 1]]).sigmoid()
            )
        possible = (weight > 0).flatten().repeat_interleave(self.n)
        batch = batch.replace(
            weight=weight.flatten().repeat_interleave(self.n),
            behavior_logp=behavior_logp if "behavior_logp" in self.data.known else None,
        )
        return batch if possible.all() else batch.rows(possible.nonzero()[:, 0])


@dataclass(frozen=True, eq=False)
class SampledGroups:
    """One group of n outcomes of every prompt, drawn at random: an estimate of what `AllGroups` is the
    expectation of."""

    data: Data
    reference: Enumerable
    n: int
    generator: torch.Generator

    @cached_property
    def batch(self) -> Batch:
        asked = self._asked
        age = torch.full((len(asked),), self.data.age, dtype=torch.float64)
        return Batch.of(group=asked.tolist(), age=age, **self._drawn())

    def again(self) -> Batch:
        """Other groups, of the current behavior."""
        return self.batch.replace(**self._drawn())

    @property
    def _asked(self) -> Tensor:
        return torch.arange(self.data.behavior.space.prompts).repeat_interleave(self.n)

    def _drawn(self) -> dict[str, Any]:
        assert not self.data.judged
        outcome = torch.multinomial(
            self.data.probability(), self.n, replacement=True, generator=self.generator
        )
        return _rows(self.data, self.reference, self._asked, outcome.flatten())


def _rows(data: Data, reference: Enumerable, asked: Tensor, outcome: Tensor) -> dict[str, Any]:
    """The columns of a batch for these outcomes of these prompts, [B] each."""
    space, response = data.behavior.space, data.outcomes[outcome]
    first = torch.zeros(len(asked), 1, dtype=torch.bool)
    return {
        "mask": torch.cat([first, space.mask[response]], 1),
        "reward": data.reward[asked, outcome]
        if "reward" in data.known
        else torch.full((len(asked),), math.nan),
        "ref_logp": _shifted(reference, asked, response) if "ref_logp" in data.known else None,
        "behavior_logp": _shifted(data.behavior, asked, response) if "behavior_logp" in data.known else None,
        "tokens": torch.cat([asked[:, None], space.tokens[response]], 1),
        "lengths": space.lengths[response] + 1,
        "extra": {} if data.stored_value is None else {"stored_value": data.stored_value[asked]},
    }


def _shifted(policy: Enumerable, asked: Tensor, response: Tensor) -> Tensor:
    """[B,T+1] log-probs of the tokens; index 0 is the prompt's."""
    logp = policy.logp_tokens().detach()[asked, response]
    rows = torch.where(policy.space.mask[response], logp, math.nan)
    return torch.cat([torch.full((len(rows), 1), math.nan, dtype=rows.dtype), rows], 1)


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
    """[W] the step's gradient of `name` over `batch`, for all parameters; `size`: of its micro-batches."""
    resolved = get(name).resolve(name, options)
    passes = Passes(MicroBatch(size))
    if "ref_logp" in get(name).needs(resolved) and batch.ref_logp is None:
        ref_logp_BT = streams_of(reference, batch, ["logp"], passes)["logp"]  # type: ignore[arg-type]
        batch = batch.replace(ref_logp=ref_logp_BT)
    backward(policy, batch, name, resolved, passes, reference)  # type: ignore[arg-type]
    return torch.cat(
        [(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in policy.parameters()]
    )
