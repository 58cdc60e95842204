"""½ Var(R) within stored groups that aren't trained on: AGRO's loss on held-out logs, whoever wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agro.config import RunConfig
from agro.errors import Refused
from agro.objectives.needs import GROUPS, REWARD
from agro.policy import Policy
from agro.store import Store
from agro.train.data import Drawn, one_each, usable
from agro.train.diagnostics import distances, standard_error
from agro.train.micro import MicroBatch
from agro.train.step import collate, streams_of
from agro.types import Sample


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
    """Stored groups on which ½ Var(R) is measured, encoded once, and the log-probs that π_ref gives them."""

    def __init__(
        self, groups: Sequence[Sequence[Sample]], reference: Policy, micro: MicroBatch, *, left_out: int = 0
    ) -> None:
        """`groups`: encoded and scored samples, two a group at least. `left_out`: how many couldn't be used."""
        self.micro, self.left_out = micro, left_out
        self.prompt_ids = [samples[0].prompt_id for samples in groups]
        self._batches = []
        for samples in groups:
            batch = collate(samples, 0).to(reference.device)
            logp = streams_of(reference, batch, ["logp"], micro)["logp"]
            self._batches.append(batch.replace(ref_logp=logp))

    @classmethod
    def load(cls, path: str | Path, config: RunConfig, reference: Policy, micro: MicroBatch) -> HeldOutGroups:
        """The groups of a store, but for the samples that can't be used; raises `Refused` where no group is left."""
        by_prompt: dict[str, list[Sample]] = {}
        with Store.open(path, read_only=True, create=False) as store:
            for sample in store.samples():
                by_prompt.setdefault(sample.prompt_id, []).append(sample)
        drawn = Drawn([])
        for samples in by_prompt.values():
            usable(samples, reference, config.train.max_length, {REWARD, GROUPS}, drawn)
        kept: dict[str, list[Sample]] = {}
        for sample in drawn.samples:
            kept.setdefault(sample.prompt_id, []).append(sample)
        groups = [g for g in kept.values() if len(one_each(g)) > 1]
        if not groups:
            raise Refused(
                f"data.eval_store: {path}: expected groups of two or more scored responses, got none among "
                f"{len(by_prompt)} groups; left out: {dict(drawn.left_out) or 'nothing'}"
            )
        left_out = sum(map(len, by_prompt.values())) - sum(map(len, groups))
        return cls(groups, reference, micro, left_out=left_out)

    def measure(self, policy: Policy, beta: float, average: str = "sum") -> Consistency:
        """½ Var(R) of each group; `beta` in reward per nat, `average` over tokens as of the objective agro."""
        now, start = [], []
        for batch in self._batches:
            assert batch.ref_logp is not None
            logp = streams_of(policy, batch, ["logp"], self.micro)["logp"]
            now.append(distances(batch, logp, beta, average)[0])
            start.append(distances(batch, batch.ref_logp, beta, average)[0])
        return Consistency(np.concatenate(now), np.concatenate(start))
