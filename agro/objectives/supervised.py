"""Imitation of the given responses, whatever their rewards."""

from __future__ import annotations

from agro.objectives.core import Streams, Terms
from agro.objectives.reduce import token_mean
from agro.types import Batch


def sft(streams: Streams, batch: Batch) -> Terms:
    """−log π(y_t), mean over all tokens of the step."""
    return Terms(token_mean(batch, -streams["logp"]))
