"""What measurements share: the row that one gives, the random problems that they are made on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from agro.objectives import get
from agro.proof.claims import Claims
from agro.proof.enumerable import Enumerable, Space
from agro.proof.expectation import Data

BETA = 0.3
EXACT = 1e-12  # float64, sums of some hundred terms of order 1
FAR = 1e-2  # nats: as far from the optimum as nobody would call it reached
SMALL, RAGGED = Space(3, 2, 2), Space(2, 3, 2, early_end=True)
INSTANCES = Space(3, 2, 8)  # prompts of a table are independent: 8 random problems at once


@dataclass(frozen=True)
class Row:
    """One measurement. `bound` is None where nothing is claimed and the value alone is told; `holds` is None then too."""

    objective: str
    property: str
    setting: str
    value: float
    bound: float | None
    holds: bool | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def options_of(name: str, claims: Claims, beta: float = BETA) -> dict[str, Any]:
    return ({"beta": beta} if "beta" in get(name).options else {}) | dict(claims.options)


def said(claims: Claims) -> str:
    return ", ".join(f"{k}={v}" for k, v in claims.options.items())


def row(
    name: str,
    prop: str,
    setting: str,
    claims: Claims,
    value: float,
    *,
    most: float | None = None,
    least: float | None = None,
) -> Row:
    """A measurement that may be `most` at most, or `least` at least, or is told without a claim."""
    holds = (
        None
        if most is None and least is None
        else value <= most
        if most is not None
        else value >= (least or 0.0)
    )
    where = ", ".join(x for x in (said(claims), setting) if x)
    return Row(name, prop, where, value, most if most is not None else least, holds)


def problem(
    space: Space, kind: str = "table"
) -> tuple[Enumerable, Enumerable, dict[str, Enumerable], Tensor]:
    """A policy, its reference, behaviours, rewards [X,Y] in 0 … 1; all but the uniform one drawn at random."""
    make = Enumerable.table if kind == "table" else Enumerable.network
    reference = make(space, 2)
    policy = make(space, 1)
    lacking = Enumerable.table(space, 4)
    with torch.no_grad():  # the last token is never the first one
        lacking.weights()["logits"][:, 0, -1] = -math.inf
    behaviors = {
        "reference": reference,
        "uniform": Enumerable.table(space, 0, 0.0),
        "stale": make(space, 3),
        "lacks support": lacking,
    }
    reward = torch.rand(
        space.prompts, len(space.responses), generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    return policy, reference, behaviors, reward


def derivative(value: Tensor, policy: Enumerable) -> Tensor:
    """[W] with respect to all parameters."""
    found = torch.autograd.grad(value, policy.parameters(), allow_unused=True, retain_graph=True)
    return torch.cat(
        [(torch.zeros_like(w) if g is None else g).flatten() for g, w in zip(found, policy.parameters())]
    )


def data_of(behavior: Enumerable, reward: Tensor, reference: Enumerable, *, judged: bool = False) -> Data:
    """Groups from that behaviour, with the V* that samples of the reference would have told."""
    return Data(behavior, reward, judged=judged, stored_value=value_of(reference, reward))


def value_of(reference: Enumerable, reward: Tensor, beta: float = BETA) -> Tensor:
    """[X] V*(x) = β log E_π_ref exp(r/β)."""
    return beta * (reference.logp().detach() + reward / beta).logsumexp(1)
