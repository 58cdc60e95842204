"""Where gradient descent goes: expected gradients of an objective, or sampled ones, followed until nothing
moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agro.objectives import differentiate, get
from agro.objectives.core import masked, wanted_streams
from agro.proof.enumerable import Enumerable, kl
from agro.proof.expectation import AllGroups, DataDistribution, drawn_groups, gradient
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
    rate, second beta and the share of the rate that is left at the end.

    Exact gradients have no noise to average over: a `beta2` of 0.95 and a rate that falls further end nearer.
    """

    n: int = 2
    seed: int | None = None  # None: the expectation over all groups
    updates: int = 1000
    lr: float = 0.1
    beta2: float = 0.999
    final_share: float = 0.01
    looks: int = 50  # numbers of updates at which the distance is measured


def descend(
    start: Enumerable,
    reference: Enumerable,
    data: DataDistribution,
    star: Tensor,
    name: str,
    options: Mapping[str, Any],
    settings: DescentSettings,
) -> Path:
    """Follow the expected gradient, or with a seed that of drawn groups.

    `start` is moved; where it is `data.behavior` too, samples come from it as it is then. `star` [X,Y]: log
    π*.
    """
    entry = get(name)
    resolved = entry.resolve(name, options)
    want = wanted_streams(entry.needs(resolved))
    moves = data.behavior is start or data.behavior.follows
    n, seed = settings.n, settings.seed
    every = AllGroups(data, reference, (n,)) if seed is None else None
    generator = torch.Generator().manual_seed(seed or 0)
    if every is None:  # published curves begin with the second draw
        drawn_groups(data, reference, n, generator)

    def backward(update: int) -> None:
        if every is None:
            gradient(start, reference, drawn_groups(data, reference, n, generator), name, options)
        else:
            batch = every.next_batch() if update and moves else every.batch
            _gradient(start, reference, batch, name, resolved, want)

    return follow(start, star, backward, settings)


def follow(
    policy: Enumerable, star: Tensor, backward: Callable[[int], None], settings: DescentSettings
) -> Path:
    """Adam on the gradients that `backward(update)` gives; its rate falls over the last two thirds."""
    updates = settings.updates
    optimizer = torch.optim.Adam(policy.parameters(), lr=settings.lr, betas=(0.9, settings.beta2), fused=True)
    measured = sorted({round(updates * (i / settings.looks) ** 2) for i in range(settings.looks + 1)})
    seen = []
    for update in range(updates + 1):
        if update in measured:
            seen.append(kl(policy.logp().detach(), star))
        if update == updates:
            break
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * settings.final_share ** max(0.0, 1.5 * update / updates - 0.5)
        backward(update)
        optimizer.step()
    return Path(torch.tensor(measured), torch.stack(seen), policy)


def _gradient(
    policy: Enumerable,
    reference: Enumerable,
    batch: Batch,
    name: str,
    options: Mapping[str, Any],
    want: list[str],
) -> None:
    """Put the gradient into the weights: the objective's own g, as in the step, in a single pass."""
    assert batch.tokens is not None
    assert batch.lengths is not None
    policy.zero_grad()
    live = policy.streams(batch.tokens, batch.lengths, batch.mask, want, reference)
    grads = differentiate(name, get(name), live, batch, options).grads
    torch.stack([(grads[s] * masked(batch, value)).sum() for s, value in live.items()]).sum().backward()
