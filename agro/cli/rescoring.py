"""Log-probs, entropy and KL of given responses under a model, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agro.models.policy import Policy
    from agro.types import Sample

TOGETHER = 64  # samples in one batch


def streams_along(
    policy: Policy, samples: Sequence[Sample], want: Sequence[str], reference: Policy | None = None
) -> dict[str, list[NDArray[np.float64]]]:
    """By stream and sample the values at the tokens that its author chose, [A] each.

    `samples` are encoded. `want`: as of `Policy.streams`; "kl" is exact, from `reference`.
    """
    from agro.train.collate import collate
    from agro.train.micro import TOKENS, MicroBatch
    from agro.train.step import Passes, streams_of

    passes = Passes(MicroBatch(tokens=TOKENS))
    found: dict[str, list[NDArray[np.float64]]] = {name: [] for name in want}
    for start in range(0, len(samples), TOGETHER):
        batch = collate(samples[start : start + TOGETHER], 0).to(policy.device)
        streams = streams_of(policy, batch, want, passes, reference)
        for name in want:
            rows = zip(streams[name], batch.mask, strict=True)
            found[name] += [row[chosen].double().cpu().numpy() for row, chosen in rows]
    return found
