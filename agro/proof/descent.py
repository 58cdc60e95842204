"""Where exact gradient descent goes: expected gradients of an objective, followed until nothing moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agro.objectives import differentiate, get
from agro.objectives.core import masked, wanted_streams
from agro.proof.enumerable import Enumerable, kl
from agro.proof.expectation import AllGroups, Data
from agro.types import Batch


@dataclass(frozen=True)
class Path:
    """What a descent passed through. Independent prompts of a table are independent instances."""

    updates: Tensor  # [K] numbers of updates at which it was looked at
    distance: Tensor  # [K,X] KL(π ‖ π*), nats
    policy: Enumerable  # at the end


def descend(
    start: Enumerable,
    reference: Enumerable,
    data: Data,
    star: Tensor,
    name: str,
    options: Mapping[str, Any],
    *,
    n: int = 2,
    updates: int = 1000,
    lr: float = 0.1,
    looks: int = 50,
) -> Path:
    """Follow the expected gradient with Adam, whose rate falls from `lr` to a hundredth over the last two thirds.

    `start` is moved; where it is `data.behavior` too, samples come from it as it is then. `star` [X,Y]: log π*.
    """
    optimiser = torch.optim.Adam(start.parameters(), lr=lr)
    entry = get(name)
    resolved = entry.resolve(name, options)
    want = wanted_streams(entry.needs(resolved))
    groups = AllGroups(data, reference, n)
    batch = groups.batch
    at = sorted({round(updates * (i / looks) ** 2) for i in range(looks + 1)})
    seen = []
    for update in range(updates + 1):
        if update in at:
            seen.append(kl(start.logp().detach(), star))
        if update == updates:
            break
        if data.behavior is start and update:
            batch = groups.again()
        for group in optimiser.param_groups:
            group["lr"] = lr * 0.01 ** max(0.0, 1.5 * update / updates - 0.5)
        _gradient(start, reference, batch, name, resolved, want)
        optimiser.step()
    return Path(torch.tensor(at), torch.stack(seen), start)


def _gradient(
    policy: Enumerable, reference: Enumerable, batch: Batch, name: str, options: Mapping[str, Any], want: list[str]
) -> None:
    """Put the gradient into the weights: the objective's own g, as in the step, without its cutting into passes."""
    assert batch.tokens is not None
    assert batch.lengths is not None
    policy.zero_grad()
    live = policy.streams(batch.tokens, batch.lengths, batch.mask, want, reference)
    grads = differentiate(name, get(name), live, batch, options).grads
    torch.stack([(grads[s] * masked(batch, value)).sum() for s, value in live.items()]).sum().backward()
