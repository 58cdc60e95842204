"""What a step trains on: stored groups that rules pick, and fresh ones that a source adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agro.objectives.needs import PAIRS
from agro.rollout import Activity, CollectResult
from agro.store import At, Selection, Store
from agro.store.drawing import wait_for_groups
from agro.train.feed import Feed, Valid
from agro.train.learner import Learner
from agro.train.phases import Phase
from agro.train.source import FillRequest, Source, complete, fill
from agro.train.state import Position


@dataclass(frozen=True)
class StepData:
    """What a step trains on."""

    valid: Valid
    collected: CollectResult  # what was generated for the step
    prompts: int  # sampled from
    missing: int  # groups of data.replay that the store didn't have


@dataclass(frozen=True)
class Sampling:
    """Fills the store for the steps of one phase, and draws from it."""

    source: Source
    feed: Feed
    learner: Learner
    store: Store
    run: str  # its id
    activity: Activity
    say: Callable[[str], None]

    def take(self, phase: Phase, position: Position) -> StepData:
        """The samples of the step after `position`: picked in the store, or generated in place of others."""
        data, step_of_phase = phase.config.data, phase.at(position)
        at = At(self.run, position.step + 1, phase.config.train.seed, self.learner.version)
        picks: list[Selection] = []
        picked: set[str] = set()
        for rule in phase.rules(step_of_phase):
            self.activity.stage("waiting for the store")
            groups = wait_for_groups(self.store.draws, rule, at, picked, self.activity.check)
            picks.append(self.feed.choose(self.store, Selection(rule, groups), at))
            picked |= set(picks[-1].groups)
        if PAIRS in phase.needs:  # what a source judges is drawn with the samples that it makes
            picks.append(Selection(phase.rule(1), []))
        request = FillRequest(at.step, phase.config.train.groups - len(picked), position.prompts)
        filled = fill(self.source, self.store, request, spread=data.spread)
        if data.complete_groups:
            filled, picks = complete(self.source, self.store, filled, picks, request, self.learner.encoder)
        drawn = self.store.draws.draw_picked(picks, at, filled.made.ids, phase.joining())
        for sample in drawn.damaged:
            self.say(f"damaged: sample {sample.id} of {self.store.path}; dropped from step {at.step}")
        valid = self.feed.valid(drawn, filled.made.ids)
        for reason, dropped in (
            ("too stale", filled.made.too_stale),
            ("equal rewards in its group", filled.equal),
        ):
            if dropped:
                valid.dropped[reason] += dropped
        missing = phase.stored_groups(step_of_phase) - len(picked)
        return StepData(valid, filled.made, filled.prompts, missing)
