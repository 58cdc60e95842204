"""½ Var(R) within stored groups that aren't trained on: AGRO's loss on held-out logs of any origin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agro.config import RunConfig
from agro.errors import Refused
from agro.objectives.needs import GROUPS, REWARD
from agro.store import Drawn, Store
from agro.train.collate import collate
from agro.train.diagnostics import distances, standard_error
from agro.train.feed import one_each, select_valid
from agro.train.learner import Learner
from agro.types import Batch, Sample


@dataclass(frozen=True)
class Consistency:
    """½ Var(R) of each of G groups, n − 1 in the variance, at π and at π_ref, where R = r."""

    now: NDArray[np.float64]  # [G]
    start: NDArray[np.float64]  # [G]

    def metrics(self) -> dict[str, float | int]:
        """Means over groups; the standard errors too, groups being the independent units."""
        fall = self.start - self.now
        return {
            "eval_consistency": float(self.now.mean()),
            "eval_consistency_se": standard_error(self.now),
            "eval_consistency_fall": float(fall.mean()),
            "eval_consistency_fall_se": standard_error(fall),
            "eval_groups": len(fall),
        }


class HeldOutGroups:
    """Encoded groups on which ½ Var(R) is measured, with their log-probs under π_ref."""

    def __init__(self, groups: Sequence[Sequence[Sample]], learner: Learner, *, dropped: int = 0) -> None:
        """`groups`: encoded and scored samples, at least two a group. `dropped`: how many were invalid."""
        self.dropped = dropped
        self.prompt_ids = [samples[0].prompt_id for samples in groups]
        self._batches: list[Batch] = []
        for samples in groups:
            batch = collate(samples, 0)
            ref_logp = learner.logp(batch, "reference")
            self._batches.append(batch.to(ref_logp.device).replace(ref_logp=ref_logp))

    @classmethod
    def load(cls, path: str | Path, config: RunConfig, learner: Learner) -> HeldOutGroups:
        """The groups of a store, without invalid samples; raises `Refused` where no group remains."""
        with Store.open(path, read_only=True, create=False) as store:
            samples = sorted(store.samples(), key=_first_seen())
        valid = select_valid(Drawn(samples), learner.encoder, config.train.max_length, {REWARD, GROUPS})
        by_prompt: dict[str, list[Sample]] = {}
        for sample in valid.samples:
            by_prompt.setdefault(sample.prompt_id, []).append(sample)
        groups = [group for group in by_prompt.values() if len(one_each(group)) > 1]
        if not groups:
            raise Refused(
                f"data.eval_store: {path}: expected groups of two or more scored responses, got none among "
                f"{len({s.prompt_id for s in samples})} groups; dropped: {dict(valid.dropped) or 'nothing'}"
            )
        return cls(groups, learner, dropped=len(samples) - sum(map(len, groups)))

    def measure(self, learner: Learner, beta: float, average: str = "sum") -> Consistency:
        """½ Var(R) of each group; `beta` in reward per nat, `average` as of the objective agro."""
        now, start = [], []
        for batch in self._batches:
            assert batch.ref_logp is not None
            now.append(distances(batch, learner.logp(batch), beta, average)[0])
            start.append(distances(batch, batch.ref_logp, beta, average)[0])
        return Consistency(np.concatenate(now), np.concatenate(start))


def _first_seen() -> Callable[[Sample], int]:
    """A sort key that brings the samples of a group together, groups in the order in which they began."""
    order: dict[str, int] = {}
    return lambda sample: order.setdefault(sample.prompt_id, len(order))
