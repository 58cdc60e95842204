"""What measurements share: rows, subjects and random problems; and the variance of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from agro.objectives import Objective, differentiate, get
from agro.objectives.core import wanted_streams
from agro.proof.claim import Claims
from agro.proof.enumerable import Enumerable, Space, optimal_value
from agro.proof.expectation import AllGroups, DataDistribution, Expert, gradient, in_two_rows
from agro.types import Batch

BETA = 0.3
EXACT = 1e-12  # float64, sums of some hundred terms of order 1
FAR = 1e-2  # nats: a distance at which the optimum clearly isn't reached
SMALL, RAGGED = Space(3, 2, 2), Space(2, 3, 2, early_end=True)
INSTANCES = Space(3, 2, 8)  # prompts of a table are independent: 8 random problems at once
BEHAVIORS = ("policy", "reference", "uniform", "stale", "lacks support")  # policies that generate samples


@dataclass(frozen=True)
class ProofRow:
    """One measurement. `bound`, `side` and `holds` are None if nothing is claimed."""

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
        """The behaviors whose samples it may learn from."""
        if "of_reference" in self.claims.needs:
            return ("reference",)
        return BEHAVIORS[:1] if "fresh" in self.claims.needs else BEHAVIORS

    @property
    def usual(self) -> str:
        """The behavior of single measurements."""
        return "stale" if "stale" in self.behaviors else self.behaviors[0]

    def data(self, behavior: Enumerable, reward: Tensor, reference: Enumerable) -> DataDistribution:
        """Groups of that behavior, with the V* that samples of the reference would give."""
        policy, expert = self.expert(behavior.space), None
        if policy is not None:
            expert = Expert(policy, reward, hinted=self.claims.expert == "hinted")
        return DataDistribution(
            behavior,
            reward,
            judged=self.claims.judged,
            stored_value=optimal_value(reference, reward, BETA),
            old=self.old(behavior.space),
            expert=expert,
        )

    def expert(self, space: Space) -> Enumerable | None:
        """The policy that adds one response to each group."""
        return None if self.claims.expert == "none" else Enumerable.table(space, 6)

    def old(self, space: Space) -> Enumerable | None:
        """The policy when the batch was drawn, if it isn't the behavior."""
        return Enumerable.table(space, 5) if self.claims.drifted else None

    def batch(
        self, behavior: Enumerable, reward: Tensor, reference: Enumerable, *sizes: int, two_rows: bool = False
    ) -> Batch:
        """All groups of these sizes; `two_rows`: as episodes of two rows."""
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
        """[W] the step's expected gradient over `batch`; `size`: of its micro-batches."""
        return gradient(policy, reference, batch, self.name, self.options(beta), size)

    def row(
        self,
        property_: str,
        setting: str,
        value: float,
        *,
        upper: float | None = None,
        lower: float | None = None,
    ) -> ProofRow:
        """A measurement that must be at most `upper`, or at least `lower`, or has no claim."""
        full_setting = ", ".join(filter(None, (described(self.claims), setting)))
        if upper is not None:
            return ProofRow(self.name, property_, full_setting, value, upper, "at most", value <= upper)
        if lower is not None:
            return ProofRow(self.name, property_, full_setting, value, lower, "at least", value >= lower)
        return ProofRow(self.name, property_, full_setting, value, None, None, None)

    def changes(self, claimed: bool, invariant: str, changed: str, setting: str, value: float) -> ProofRow:
        """The row of a change: that it changes nothing, if that is claimed, else that it matters."""
        if claimed:
            return self.row(invariant, setting, value, upper=EXACT)
        return self.row(changed, setting, value, lower=1e-4)


def described(claims: Claims) -> str:
    return ", ".join(f"{key}={value}" for key, value in claims.options.items())


@cache
def problem(
    space: Space, kind: str = "table"
) -> tuple[Enumerable, Enumerable, dict[str, Enumerable], Tensor]:
    """A policy, its reference, behaviors, rewards [X,Y] in 0 … 1; all random, except for the uniform one.

    Each call returns the same objects: don't train them.
    """
    make = Enumerable.table if kind == "table" else Enumerable.network
    reference = make(space, 2)
    policy = make(space, 1)
    unsupported = Enumerable.table(space, 4)
    with torch.no_grad():  # the last token of the vocabulary never comes first
        unsupported.weights()["logits"][:, 0, -1] = -math.inf
    policies = (policy, reference, Enumerable.table(space, 0, 0.0), make(space, 3), unsupported)
    generator = torch.Generator().manual_seed(7)
    shape = (space.prompts, len(space.responses))
    reward = torch.rand(shape, generator=generator, dtype=torch.float64)
    return policy, reference, dict(zip(BEHAVIORS, policies)), reward


def derivative(value: Tensor, policy: Enumerable) -> Tensor:
    """[W] the derivative with respect to all parameters."""
    parameters = policy.parameters()
    grads = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


def variances(subject: Subject) -> Iterator[ProofRow]:
    """The trace of the covariance of a group's gradient in a table's logits, divided by its squared mean, for
    each n."""
    if not {"groups", "triples"} & set(subject.claims.needs) or "policy" not in subject.behaviors:
        return
    policy, reference, _, reward = problem(Space(3, 2, 1))
    spread_by_n = {}
    for n in range(subject.claims.n[0], 5):
        total, mean = _variance(subject, policy, reference, reward, n)
        spread_by_n[n] = total / mean
        title = "variance of a group's gradient over its squared mean"
        yield subject.row(title, f"on-policy, n={n}", spread_by_n[n])
    smallest = min(spread_by_n)
    yield subject.row(
        f"its fall from n = {smallest} to 4", "on-policy", spread_by_n[4] / spread_by_n[smallest], upper=1.0
    )


def estimates(subject: Subject) -> Iterator[ProofRow]:
    """The variance of three estimates: of the regularizer's gradient alone (r = 0, β = 1), or of on-policy
    AGRO with its squared part."""
    if subject.claims.estimates is None:
        return
    option, length = subject.claims.estimates
    policy, reference, _, reward = problem(Space(3, length, 1))
    logits = f"logits of π [{_listed(policy)}], of π_ref [{_listed(reference)}]"
    previous = math.inf
    for kind in ("sequence", "triangular", "local"):
        estimate = Subject(subject.name, replace(subject.claims, options={"beta": 1.0, option: kind}))
        value, _ = _variance(estimate, policy, reference, torch.zeros_like(reward), 2)
        setting = f"{option}={kind}, on-policy, n=2, {logits}"
        title = "variance of the regularizer's estimate, below the one before"
        if previous == math.inf:
            yield ProofRow(subject.name, title, setting, value, None, None, None)
        else:
            yield ProofRow(subject.name, title, setting, value, previous, "at most", value < previous)
        previous = value


def _listed(table: Enumerable) -> str:
    rows = table.weights()["logits"][0].tolist()
    return "; ".join(" ".join(f"{x:.3f}" for x in row) for row in rows)


def _variance(
    subject: Subject, policy: Enumerable, reference: Enumerable, reward: Tensor, n: int
) -> tuple[float, float]:
    """The trace of the covariance of a group's gradient, and its squared mean."""
    groups = AllGroups(subject.data(policy, reward, reference), reference, (n,))
    batch, space = groups.batch, policy.space
    alone = batch.replace(weight=torch.ones_like(batch.weight))  # scales each group's gradient by 1/G
    resolved = subject.entry.resolve(subject.name, subject.options())
    want = wanted_streams(subject.entry.needs(resolved))
    live = policy.streams_of(batch, want, reference)
    grads = differentiate(subject.name, subject.entry, live, alone, resolved).grads
    rows_BW = torch.zeros(len(batch.mask), 1, dtype=torch.float64)
    for stream, g_BT in grads.items():
        values = policy.logp_tokens() if stream == "logp" else policy.kl_tokens(reference)
        jacobian = torch.stack([derivative(x, policy) for x in values[0].flatten()])
        jacobian_YTW = jacobian.view(len(space.responses), space.length, -1)
        rows_BW = rows_BW + torch.einsum(
            "bt,btw->bw", g_BT[:, 1:] * batch.n_groups, jacobian_YTW[groups.response]
        )
    each_GW = torch.zeros(batch.n_groups, rows_BW.shape[1], dtype=torch.float64)
    each_GW = each_GW.index_add(0, batch.group, rows_BW)
    p_G1 = batch.weight[groups.groups[1].diff(prepend=torch.tensor([-1])) > 0][:, None]
    mean_W = (p_G1 * each_GW).sum(0)
    total = (p_G1 * (each_GW - mean_W).square()).sum()
    return float(total), float(mean_W.square().sum())
