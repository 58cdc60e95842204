"""The protocol of an engine, which continues token ids and returns log-probs and the weights' version."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agro.config import SamplerConfig
from agro.errors import Refused
from agro.types.kept_sets import Ids

Capability = Literal["shares_weights", "reports_kept_sets", "skips_layers", "serves_collectors"]


class NoServer(Refused):
    """No server is left, but none for a reason that a person must mend: the next push may find one."""


@dataclass(frozen=True)
class Request:
    """A request for one continuation."""

    number: int  # of the response; number and seed determine the noise
    ids: list[int]  # of the context; the same list object for all responses to it
    room: int  # tokens that the response may have
    position: int = 0  # of its first token in the noise: tokens sampled in earlier turns of the episode


@dataclass(frozen=True)
class Continuation:
    """One continuation."""

    request: Request
    tokens: NDArray[np.int64]  # [T]
    logp: NDArray[np.float64]  # [T] nats, under the distribution sampled from; NaN where unknown
    version: int | NDArray[np.int32]  # optimizer steps of the weights, or [T] of each token's; -1: unknown
    sampling: Mapping[str, Any] = field(default_factory=dict)  # what the engine adds to `Sample.sampling`
    kept: Sequence[Ids] | None = (
        None  # [T] the ids each token was chosen from, as in `agro.types.kept_sets.flat`
    )


class Engine(Protocol):
    """Continues token ids. `version` is the number of optimizer steps of its weights; -1: not the trainer's.

    `failures` counts requests that failed and were sent again. `proposed` counts the tokens that a draft
    model proposed, `accepted` those of them that are in a response; both are 0 without a draft. `can` is what
    the engine can do beyond decoding, see `agro.rollout.engines.capabilities`: a setting that needs anything
    else is refused. `measured` has metrics of `agro.runs.rundata` that it knows. `check` is called again and
    again while the engine decodes, and may raise `Interrupted`.

    A run makes an engine of a user as `Class(encoder, say, **engine.options)`, or as `Class(policy, version,
    **engine.options)` where it `can` share weights.
    """

    can: ClassVar[frozenset[Capability]]
    version: int
    proposed: int
    accepted: int
    check: Callable[[], None]

    @property
    def failures(self) -> int: ...

    @property
    def measured(self) -> Mapping[str, Any]: ...

    def decode(self, waiting: deque[Request], sampler: SamplerConfig, seed: int) -> Iterator[Continuation]:
        """Serve the requests from the left of `waiting`, each as soon as it finishes.

        The caller may add requests while it iterates. A response ends with an end token, a text of
        `sampler.stop` (whose tokens it keeps), or when its room is used up. `sampler` has no setting that
        needs more than the engine can.
        """
        ...

    def load(self, weights: Path, version: int) -> None:
        """Load the weights that a learner published in a folder (transformers format)."""
        ...

    def close(self) -> None:
        """Release memory, processes and connections."""
        ...
