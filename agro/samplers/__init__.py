"""Where responses come from: the protocol, its options, and the embedded sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from agro.samplers.hf import HFSampler
from agro.samplers.options import Sampling
from agro.samplers.rows import Finished, Request
from agro.types import Prompt, Sample

__all__ = ["Finished", "HFSampler", "Request", "Sampler", "Sampling"]


class Sampler(Protocol):
    """Turns prompts into responses. `version` (optimiser steps of its weights; -1: not ours) is stamped into each."""

    version: int

    def sample(self, prompts: Sequence[Prompt], n: int, options: Sampling) -> Iterator[Sample]:
        """`n` responses a prompt, unscored, each as soon as it is finished.

        `meta` of a sample holds the prompt's columns, "finish" ("stop": an end token or a stop text; "length"; "error": see `agro.envs`), and
        "index": the response's number, n · (index of the prompt) + (0 … n-1), which with the seed decides its noise.
        """
        ...
