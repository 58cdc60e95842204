"""Imitation of the given responses, whatever their rewards."""

from __future__ import annotations

from agro.objectives.core import Objective, Streams, Terms
from agro.objectives.declaring import always, by
from agro.objectives.reduce import token_mean
from agro.types import Batch


def sft(streams: Streams, batch: Batch) -> Terms:
    """−log π(y_t), mean over all tokens of the step."""
    return Terms(token_mean(batch, -streams["logp"]))


ENTRIES: dict[str, Objective] = {
    "sft": Objective(
        sft,
        "maximum likelihood (SFT); iw-SFT with a weight, arXiv 2507.12856",
        always(),
        by("row"),
        drops_groups=False,
        weighted=True,
        certainty="code",
        called="TRL SFTTrainer",
    ),
}
