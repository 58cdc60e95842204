"""A source that judges what another one samples: the experts' responses to a prompt are better
(`data.experts_win`).

So an objective on pairs trains on fresh samples, each of them the loser against a demonstration, without a
reward and without a judge. With a sampler of earlier weights (`agro.train.lagging`) the loser is what the
policy wrote some steps ago, as in self-play (arXiv 2401.01335) and SePPO (arXiv 2410.05255).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from agro.rollout import CollectResult
from agro.store import Pair, Store
from agro.train.abilities import SourceCapability
from agro.train.learner import Learner
from agro.train.source import FillRequest, InlineSource, Source


@dataclass(frozen=True)
class JudgingSource:
    """Adds a judgment to the store for each fresh response and each expert response to its prompt.

    A fresh response of the same text has a judgment too, in which neither becomes more probable.
    """

    can: ClassVar[frozenset[SourceCapability]] = InlineSource.can

    sampler: Source
    store: Store

    def fill(self, wanted: FillRequest) -> CollectResult:
        filled = self.sampler.fill(wanted)
        self.store.add_pairs(self._judgments(filled.ids))
        return filled

    def publish(self, learner: Learner) -> None:
        self.sampler.publish(learner)

    def _judgments(self, fresh: Sequence[int]) -> Iterator[Pair]:
        experts: dict[str, list[int]] = {}
        for sample in list(self.store.samples(ids=fresh, skip_damaged=True)):
            assert sample.id is not None
            if sample.prompt_id not in experts:
                experts[sample.prompt_id] = self._experts(sample.prompt_id)
            for expert in experts[sample.prompt_id]:
                yield Pair(expert, sample.id)

    def _experts(self, prompt_id: str) -> list[int]:
        """The ids of the experts' responses to a prompt."""
        samples = self.store.samples(prompt_id=prompt_id, roles=("expert",), skip_damaged=True)
        return [sample.id for sample in samples if sample.id is not None]
