"""Sampling with some layers of the policy skipped: the nested behavior of Nested-ReFT (arXiv 2508.10123)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.pretrained import decoder_layers


def chosen_layers(policy: Policy, share: float, seed: int, number: int) -> tuple[int, ...]:
    """Numbers of the layers to skip: a random `share` of those between the first and the last.

    `seed` and `number`, that of the batch's first response, decide which. Raises `Refused` where the share is
    less than half a layer.
    """
    if share == 0:
        return ()
    middle = len(decoder_layers(policy.model)) - 2
    count = round(share * middle)
    if count < 1:
        raise Refused(
            f"sampler.skip_layers: {share:g} of the {max(middle, 0)} layers of {policy.name} between the "
            "first and the last is none; raise it, or leave it out"
        )
    random = np.random.default_rng([seed % 2**64, number])
    return tuple(sorted(int(i) + 1 for i in random.choice(middle, count, replace=False)))


@contextmanager
def skipping(policy: Policy, layers: Sequence[int]) -> Iterator[None]:
    """Let these layers return their input. They then cache no keys and values."""
    blocks = decoder_layers(policy.model) if layers else ()
    skipped = [vars(blocks[i]) for i in layers]
    previous = [block.get("forward") for block in skipped]
    try:
        for block in skipped:
            block["forward"] = _unchanged
        yield
    finally:
        for block, method in zip(skipped, previous):
            block.pop("forward", None)
            if method is not None:
                block["forward"] = method


def _unchanged(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states
