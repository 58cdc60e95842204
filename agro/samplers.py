"""The public sampler interface: `sample(prompts, n, options)` yields samples. See `agro.rollout`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from agro.config import SamplerConfig
from agro.rollout import Rollout
from agro.rollout.rollout import embedded, load_rollout
from agro.types import Prompt, Sample

__all__ = ["Rollout", "Sampler", "SamplerConfig", "embedded", "load_rollout"]


class Sampler(Protocol):
    """Turns prompts into responses; `agro.rollout.Rollout` is one."""

    def sample(
        self, prompts: Sequence[Prompt], n: int, options: SamplerConfig, *, seed: int = 0
    ) -> Iterator[Sample]:
        """Yield `n` unscored responses per prompt, each as soon as it finishes; see `Rollout.sample`."""
        ...
