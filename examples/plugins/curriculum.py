"""A source around the run's own: groups of recently solved prompts aren't trained on.

agro train fresh policy.model=MODEL data.prompts=prompts.jsonl \
  source.around=examples/plugins/curriculum.py:CURRICULUM source.options.rest=20
"""

from dataclasses import replace

from agro.config import Count, Section
from agro.rollout import CollectResult
from agro.train.around import Context, SourceWrapper
from agro.train.learner import Learner
from agro.train.monitors import Monitor
from agro.train.source import FillRequest, Source


class Options(Section):
    rest: Count = 10
    """steps for which a prompt is left out after all of its responses were right"""
    right: float = 1.0
    """least reward of a right response"""


class Curriculum(Monitor):
    """A monitor, so that checkpoints contain its state. Left-out groups stay in the store."""

    name = "curriculum"

    def __init__(self, source: Source, context: Context, options: Options) -> None:
        self.source, self.store, self.options = source, context.store, options
        self.solved: dict[str, int] = {}  # the step at which each prompt was solved, by id

    def publish(self, learner: Learner) -> None:
        self.source.publish(learner)

    def fill(self, wanted: FillRequest) -> CollectResult:
        made = self.source.fill(wanted)
        samples = {sample.id: sample for sample in self.store.samples(ids=made.ids)}
        kept = [i for i in made.ids if not self.rests(samples[i].prompt_id, wanted.step)]
        right, failed = set(), set()
        for sample in samples.values():
            is_right = sample.reward is not None and sample.reward >= self.options.right
            (right if is_right else failed).add(sample.prompt_id)
        self.solved |= dict.fromkeys(right - failed, wanted.step)
        return replace(made, ids=tuple(kept))

    def rests(self, prompt_id: str, step: int) -> bool:
        return step - self.solved.get(prompt_id, -self.options.rest) < self.options.rest

    def state(self) -> dict[str, int]:
        return self.solved

    def restore(self, state: dict[str, int]) -> None:
        self.solved = state


CURRICULUM = SourceWrapper(Curriculum, Options, can=lambda inner, options: inner - {"whole_groups"})
