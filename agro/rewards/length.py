"""A reward for the length of a response: `overlong`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agro.errors import Refused
from agro.rewards.protocol import Score
from agro.types import Sample

NAMES = ("max_tokens", "buffer")


class OverlongReward:
    """0 for up to `max_tokens` − `buffer` tokens, then falling linearly to −1 at `max_tokens`, and −1 beyond
    (DAPO, arXiv 2503.14476, eq. 13).

    The tokens are those that the policy chose. The reward of a sample without tokens is unknown.
    """

    name = "overlong"
    maximum: float | None = 0.0

    def __init__(self, max_tokens: int, buffer: int) -> None:
        self.max_tokens, self.buffer = max_tokens, buffer

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        if sample.action is None:
            return Score(None, "the sample has no tokens")
        excess = int(np.count_nonzero(sample.action)) - (self.max_tokens - self.buffer)
        return Score(-min(max(excess / self.buffer, 0.0), 1.0) + 0.0)

    def problem(self, columns: Mapping[str, Any]) -> str | None:
        return None

    def close(self) -> None:
        pass


def overlong(options: Mapping[str, Any], **_: Any) -> OverlongReward:
    """Options: `max_tokens`, as sampler.max_new; `buffer`: the last tokens of these, over which it falls."""
    for key in (*options, *NAMES):
        if key not in NAMES:
            raise Refused(f"reward.options.{key}: overlong has no such option; it has {', '.join(NAMES)}")
        value = options.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refused(f"reward.options.{key}: expected a number of tokens, 1 or more, got {value!r:.80}")
    if options["buffer"] > options["max_tokens"]:
        raise Refused(
            f"reward.options.buffer: expected at most max_tokens ({options['max_tokens']}), got "
            f"{options['buffer']}"
        )
    return OverlongReward(options["max_tokens"], options["buffer"])
