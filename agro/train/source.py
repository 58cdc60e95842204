"""A source adds the fresh groups of a step to the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agro.config import RunConfig
from agro.rewards import Reward
from agro.rollout import Activity, Collected, Rollout, Task, collect
from agro.store import Store
from agro.train.learner import Learner
from agro.train.phases import derive
from agro.types import Prompt


@dataclass(frozen=True)
class Wanted:
    """The fresh groups of a step."""

    step: int  # of the run, from 1
    groups: int
    first: int  # number of the first prompt, in the order of the phase
    before: int = 0  # groups that were sampled for this step already
    joining: Sequence[Prompt] = ()  # prompts of stored groups, which get data.complete_groups responses


class Source(Protocol):
    """Where fresh samples come from."""

    def fill(self, wanted: Wanted) -> Collected:
        """Return once the store has the requested groups, with the ids of their samples.

        With `joining` prompts it samples to these, and to no others.
        """
        ...

    def publish(self, learner: Learner) -> None:
        """Generate later samples with the learner's current weights."""
        ...


class PromptOrder:
    """An endless sequence of epochs over the prompts, each in an order that depends on seed and epoch."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts, self.seed = prompts, seed
        self._epoch, self._order = -1, list(prompts)

    def take(self, start: int, count: int) -> list[Prompt]:
        """Number `start` and the following ones."""
        out: list[Prompt] = []
        while len(out) < count:
            epoch, at = divmod(start + len(out), len(self.prompts))
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = sorted(self.prompts, key=lambda p: (derive(self.seed, epoch, p.id), p.id))
            out += self._order[at : at + count - len(out)]
        return out


@dataclass
class Inline:
    """Samples in this process, step by step."""

    config: RunConfig
    rollout: Rollout
    prompts: PromptOrder
    reward: Reward | None
    store: Store
    run: str  # its id
    activity: Activity
    weights: Path | None = None  # folder of published weights; None where the engine shares the learner's

    def fill(self, wanted: Wanted) -> Collected:
        if wanted.joining:
            return self._complete(wanted)
        if not wanted.groups:
            return Collected()
        config = self.config
        seed = derive(config.train.seed, "sample", wanted.step)
        numbers = tuple(range(wanted.before, wanted.before + wanted.groups))
        task = Task(self.run, wanted.step, seed, numbers, max_failed=config.reward.max_failed)
        prompts = self.prompts.take(wanted.first, wanted.groups)
        return collect(self.rollout, prompts, config.sampler, self.store, task, self.reward, self.activity)

    def _complete(self, wanted: Wanted) -> Collected:
        """`data.complete_groups` responses to each of the prompts of stored groups."""
        config = self.config
        seed = derive(config.train.seed, "complete", wanted.step)
        task = Task(self.run, wanted.step, seed, max_failed=config.reward.max_failed)
        sampler = config.sampler.model_copy(update={"n": config.data.complete_groups})
        return collect(self.rollout, wanted.joining, sampler, self.store, task, self.reward, self.activity)

    def publish(self, learner: Learner) -> None:
        if self.weights is None:
            self.rollout.engine.version = learner.version
        elif self.rollout.engine.version != learner.version:
            learner.publish(self.weights)
            self.rollout.engine.load(self.weights, learner.version)
