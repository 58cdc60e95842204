"""What measurements share: the row that one gives, the subject of one, the random problems that they are
made on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from agro.objectives import Objective, get
from agro.proof.claim import Claims
from agro.proof.enumerable import Enumerable, Space
from agro.proof.expectation import AllGroups, Data, Expert, gradient, in_two_rows
from agro.types import Batch

BETA = 0.3
EXACT = 1e-12  # float64, sums of some hundred terms of order 1
FAR = 1e-2  # nats: as far from the optimum as nobody would call it reached
SMALL, RAGGED = Space(3, 2, 2), Space(2, 3, 2, early_end=True)
INSTANCES = Space(3, 2, 8)  # prompts of a table are independent: 8 random problems at once
BEHAVIORS = ("policy", "reference", "uniform", "stale", "lacks support")  # that samples come from


@dataclass(frozen=True)
class Row:
    """One measurement. `bound`, `side` and `holds` are None where nothing is claimed."""

    objective: str
    property: str
    setting: str
    value: float
    bound: float | None
    side: Literal["at most", "at least"] | None
    holds: bool | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Subject:
    """An objective with the options of one of its claims."""

    name: str
    claims: Claims

    @cached_property
    def entry(self) -> Objective:
        return get(self.name)

    def options(self, beta: float = BETA) -> dict[str, Any]:
        takes_beta = "beta" in self.entry.options.model_fields and "beta" not in self.entry.preset
        return ({"beta": beta} if takes_beta else {}) | dict(self.claims.options)

    @property
    def behaviors(self) -> tuple[str, ...]:
        """Those that it may learn from."""
        return BEHAVIORS[:1] if "fresh" in self.claims.needs else BEHAVIORS

    def data(self, behavior: Enumerable, reward: Tensor, reference: Enumerable) -> Data:
        """Groups of that behavior, with the V* that samples of the reference would have given."""
        expert, added = self.expert(behavior.space), None
        if expert is not None:
            added = Expert(expert, reward, hinted=self.claims.expert == "hinted")
        return Data(
            behavior,
            reward,
            judged=self.claims.judged,
            stored_value=value_of(reference, reward),
            old=self.old(behavior.space),
            expert=added,
        )

    def expert(self, space: Space) -> Enumerable | None:
        """Who adds one response to each group."""
        return None if self.claims.expert == "none" else Enumerable.table(space, 6)

    def old(self, space: Space) -> Enumerable | None:
        """The policy when the batch was drawn, where that isn't the behavior."""
        return Enumerable.table(space, 5) if self.claims.drifted else None

    def batch(
        self, behavior: Enumerable, reward: Tensor, reference: Enumerable, *sizes: int, two_rows: bool = False
    ) -> Batch:
        """All groups of these sizes; `two_rows`: of episodes of two rows."""
        batch = AllGroups(self.data(behavior, reward, reference), reference, sizes).batch
        return in_two_rows(batch) if two_rows else batch

    def gradient(
        self,
        policy: Enumerable,
        reference: Enumerable,
        batch: Batch,
        beta: float = BETA,
        size: int | None = None,
    ) -> Tensor:
        """[W] the expected gradient over `batch`, by the step; `size`: of its micro-batches."""
        return gradient(policy, reference, batch, self.name, self.options(beta), size)

    def row(
        self,
        property_: str,
        setting: str,
        value: float,
        *,
        most: float | None = None,
        least: float | None = None,
    ) -> Row:
        """A measurement that may be `most` at most, or `least` at least, or is reported without a claim."""
        where = ", ".join(filter(None, (described(self.claims), setting)))
        if most is not None:
            return Row(self.name, property_, where, value, most, "at most", value <= most)
        if least is not None:
            return Row(self.name, property_, where, value, least, "at least", value >= least)
        return Row(self.name, property_, where, value, None, None, None)

    def changes(self, claimed: bool, kept: str, changed: str, setting: str, value: float) -> Row:
        """That something changes nothing, where that is claimed, or else matters."""
        if claimed:
            return self.row(kept, setting, value, most=EXACT)
        return self.row(changed, setting, value, least=1e-4)


def described(claims: Claims) -> str:
    return ", ".join(f"{key}={value}" for key, value in claims.options.items())


@cache
def problem(
    space: Space, kind: str = "table"
) -> tuple[Enumerable, Enumerable, dict[str, Enumerable], Tensor]:
    """A policy, its reference, behaviors, rewards [X,Y] in 0 … 1; all but the uniform one drawn at random.

    The same ones at each call: they aren't to be trained.
    """
    make = Enumerable.table if kind == "table" else Enumerable.network
    reference = make(space, 2)
    policy = make(space, 1)
    unsupported = Enumerable.table(space, 4)
    with torch.no_grad():  # the last token is never the first one
        unsupported.weights()["logits"][:, 0, -1] = -math.inf
    made = (policy, reference, Enumerable.table(space, 0, 0.0), make(space, 3), unsupported)
    generator = torch.Generator().manual_seed(7)
    shape = (space.prompts, len(space.responses))
    reward = torch.rand(shape, generator=generator, dtype=torch.float64)
    return policy, reference, dict(zip(BEHAVIORS, made)), reward


def derivative(value: Tensor, policy: Enumerable) -> Tensor:
    """[W] with respect to all parameters."""
    parameters = policy.parameters()
    grads = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


def value_of(reference: Enumerable, reward: Tensor, beta: float = BETA) -> Tensor:
    """[X] V*(x) = β log E_π_ref exp(r/β)."""
    return beta * (reference.logp().detach() + reward / beta).logsumexp(1)
