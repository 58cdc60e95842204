"""What an engine is: token ids in, token ids with their log-probs and the version of the weights out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agro.config import Sampler


@dataclass(frozen=True)
class Request:
    """One continuation that is asked for."""

    number: int  # of the response; with the seed it fixes the noise
    ids: list[int]  # of the context; the same list object for all responses to it
    room: int  # tokens that the response may have
    position: int = 0  # of its first token in the noise: tokens sampled in earlier turns of the episode


@dataclass(frozen=True)
class Decoded:
    """One continuation."""

    request: Request
    tokens: NDArray[np.int64]  # [T]
    logp: NDArray[
        np.float64
    ]  # [T] nats, under the distribution sampled from; NaN where the engine doesn't say
    version: int  # optimizer steps of the weights; -1: unknown


class Engine(Protocol):
    """Continues token ids. `version` is the number of optimizer steps of its weights; -1: not the trainer's.

    `failures` counts requests that failed and were asked again.
    """

    version: int
    failures: int

    def decode(self, waiting: deque[Request], sampler: Sampler, seed: int) -> Iterator[Decoded]:
        """Serve the requests from the left of `waiting`, each as soon as it finishes.

        The reader may append requests while it iterates. A response ends with an end token, one of `sampler.stop`
        (whose tokens it keeps), or where its room is used up.
        """
        ...

    def load(self, weights: Path, version: int) -> None:
        """Take the weights that a learner published in a folder (transformers format)."""
        ...

    def close(self) -> None:
        """Release memory, processes and connections."""
        ...
