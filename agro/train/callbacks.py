"""What a program of one's own may do at the places of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agro.types import Prompt, Sample

if TYPE_CHECKING:
    from agro.train.loop import Trainer


class Callback:
    """Each method does nothing unless a subclass says otherwise.

    `trainer` is the run: its `policy`, `store`, `config`. `trainer.stop(why)` ends it after the step. Samples and metrics
    are there to be looked at; what a callback raises ends the run, and `--resume` goes on from the last checkpoint.
    """

    def before_sample(self, trainer: Trainer, prompts: Sequence[Prompt]) -> None:
        """The prompts of a step's fresh groups."""

    def after_sample(self, trainer: Trainer, samples: Sequence[Sample]) -> None:
        """Their responses, stored and without rewards."""

    def before_score(self, trainer: Trainer, samples: Sequence[Sample]) -> None:
        """The same."""

    def after_score(self, trainer: Trainer, samples: Sequence[Sample]) -> None:
        """The same with rewards, None where scoring failed."""

    def before_step(self, trainer: Trainer, samples: Sequence[Sample]) -> None:
        """All that the step trains on, stored samples too."""

    def after_step(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """The step's line of metrics.jsonl; the measurement before the first step is step 0."""

    def before_evaluate(self, trainer: Trainer) -> None:
        """Held-out prompts and groups are next."""

    def after_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """What was measured on them: the keys eval_…."""
