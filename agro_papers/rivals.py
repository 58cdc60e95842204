"""A source that makes its samples rivals of demonstrations, without a reward or a judge.

Each fresh response loses against the demonstrations to its prompt: self-play with `source.sync_every` and
`policy.reference = "sampler"` (SPIN, arXiv 2401.01335), and with `source.sync_from` SePPO (arXiv 2410.05255),
whose rival is a random earlier version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agro.config import NoOptions
from agro.objectives.needs import PAIRS
from agro.rollout import CollectResult
from agro.store import Pair
from agro.train.around import Context, SourceWrapper
from agro.train.learner import Learner
from agro.train.phases import Phase
from agro.train.source import FillRequest, Source


@dataclass(frozen=True)
class JudgingSource:
    """Adds a judgment to the store for each fresh response and each expert response to its prompt.

    A fresh response with the expert's text gets a judgment too, which makes neither more probable.
    """

    source: Source
    context: Context
    options: NoOptions

    def fill(self, wanted: FillRequest) -> CollectResult:
        filled = self.source.fill(wanted)
        store = self.context.store
        experts: dict[str, list[int]] = {}  # ids by prompt_id
        pairs: list[Pair] = []
        for sample in list(store.samples(ids=filled.ids, skip_damaged=True)):
            name = sample.prompt_id
            if name not in experts:
                stored = store.samples(prompt_id=name, roles=("expert",), skip_damaged=True)
                experts[name] = [expert.stored_id for expert in stored]
            pairs += [Pair(expert, sample.stored_id) for expert in experts[name]]
        store.add_pairs(pairs)
        return filled

    def publish(self, learner: Learner) -> None:
        self.source.publish(learner)


def _problems(phase: Phase, options: NoOptions) -> Mapping[str, object]:
    config = phase.config
    return {
        f"makes pairs of expert and fresh responses: expected data.experts of 1 or more and an objective on "
        f"pairs, got data.experts = {config.data.experts} and objective {config.objective.name}": (
            not config.data.experts or PAIRS not in phase.needs
        )
    }


RIVALS = SourceWrapper(JudgingSource, can=lambda inner, options: inner | {"judges_pairs"}, problems=_problems)
