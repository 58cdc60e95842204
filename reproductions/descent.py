"""Descents that reproductions follow and look at: along expected gradients, or those of drawn groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agro.objectives import get
from agro.objectives.core import wanted_streams
from agro.proof.ends import put_gradient
from agro.proof.enumerable import Enumerable, Space, kl
from agro.proof.expectation import AllGroups, DataDistribution, columns, gradient
from agro.types import Batch


@dataclass(frozen=True)
class Path:
    """What a descent passed through. Independent prompts of a table are independent instances."""

    updates: Tensor  # [K] numbers of updates at which it was looked at
    distance: Tensor  # [K,X] KL(π ‖ π*), nats
    policy: Enumerable  # at the end


@dataclass(frozen=True)
class DescentSettings:
    """How to descend: responses in a group, a seed to draw one group of each prompt at each update, Adam's
    rate."""

    n: int = 2
    seed: int | None = None  # None: the expectation over all groups
    updates: int = 1000
    lr: float = 0.1
    looks: int = 50  # numbers of updates at which the distance is measured


def follow(
    start: Enumerable,
    reference: Enumerable,
    data: DataDistribution,
    star: Tensor,
    name: str,
    options: Mapping[str, Any],
    settings: DescentSettings,
) -> Path:
    """Adam on the expected gradient, or with a seed on that of drawn groups; its rate falls over the last two
    thirds.

    `start` is moved; where it is `data.behavior` too, samples come from it as it is then. `star` [X,Y]: log
    π*.
    """
    entry = get(name)
    resolved = entry.resolve(name, options)
    want = wanted_streams(entry.needs(resolved))
    moves = data.behavior is start
    n, seed = settings.n, settings.seed
    every = AllGroups(data, reference, (n,)) if seed is None else None
    generator = torch.Generator().manual_seed(seed or 0)
    if every is None:  # published curves begin with the second draw
        drawn_groups(data, reference, n, generator)

    updates = settings.updates
    optimizer = torch.optim.Adam(start.parameters(), lr=settings.lr, fused=True)
    measured = sorted({round(updates * (i / settings.looks) ** 2) for i in range(settings.looks + 1)})
    seen = []
    for update in range(updates + 1):
        if update in measured:
            seen.append(kl(start.logp().detach(), star))
        if update == updates:
            break
        optimizer.param_groups[0]["lr"] = settings.lr * 0.01 ** max(0.0, 1.5 * update / updates - 0.5)
        if every is None:
            gradient(start, reference, drawn_groups(data, reference, n, generator), name, options)
        else:
            batch = every.next_batch() if update and moves else every.batch
            put_gradient(start, reference, batch, name, resolved, want)
        optimizer.step()
    return Path(torch.tensor(measured), torch.stack(seen), start)


def drawn_groups(data: DataDistribution, reference: Enumerable, n: int, generator: torch.Generator) -> Batch:
    """One group of n outcomes of every prompt, drawn at random: an estimate of what `AllGroups` is the
    expectation of."""
    assert not data.judged
    assert data.expert is None
    prompt = torch.arange(data.behavior.space.prompts).repeat_interleave(n)
    outcome = torch.multinomial(data.probability(), n, replacement=True, generator=generator)
    staleness = torch.full((len(prompt),), data.staleness, dtype=torch.float64)
    return Batch.of(
        group=prompt.tolist(), staleness=staleness, **columns(data, reference, prompt, outcome.flatten())
    )


def table_of(space: Space, logp: Tensor) -> Enumerable:
    """The table that gives responses these log-probs [X,Y]."""
    policy = Enumerable.table(space, scale=0.0)
    with torch.no_grad():
        logits = policy.weights()["logits"]
        for c, prefix in enumerate(space.contexts):
            for v in range(space.vocabulary):
                begins = [y[: len(prefix) + 1] == (*prefix, v) for y in space.responses]
                logits[:, c, v] = logp[:, begins].logsumexp(1)
    return policy
