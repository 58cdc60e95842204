"""The loop. Read this first: everything that happens between a configuration and a better model.

A run has phases, and a phase has steps. One step fills the store with fresh groups, draws them and stored
ones, computes the objective's gradient over them, moves the weights, publishes them and measures. Now and
then it commits a checkpoint. The loop depends on three parts: a `Learner` owns the weights, a
`Source` fills the store (with the help of an engine), and `Monitor`s observe steps. All randomness comes from
counters (seed, step, response, position), so a run that is stopped and resumed equals one that never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agro.errors import Interrupted, Refused, Unwritable
from agro.rollout import Activity
from agro.runs.folder import Run, resuming
from agro.runs.rundata import empty_metrics
from agro.store import Store
from agro.train.feed import Feed
from agro.train.learner import Learner
from agro.train.measure import describe_batch
from agro.train.monitors import Monitor, View
from agro.train.phases import Phase, Position, is_tuned, tune
from agro.train.recovery import Checkpoints, go_back, start_of
from agro.train.source import Sampling, Source
from agro.train.update import Updates


@dataclass(frozen=True)
class Parts:
    """What the steps of one phase use."""

    source: Source
    feed: Feed
    monitors: Sequence[Monitor]


class Loop:
    """Takes a learner through the phases of a run."""

    def __init__(
        self,
        phases: Sequence[Phase],
        learner: Learner,
        store: Store,
        folder: Run,
        activity: Activity,
        say: Callable[[str], None],
        build: Callable[[Phase, Position], Parts],
    ) -> None:
        self.phases, self.learner, self.store, self.folder = phases, learner, store, folder
        self.activity, self.say, self.build = activity, say, build
        self.checkpoints = Checkpoints(learner, store, folder, activity)
        self.stop = ""  # why the run ends after its first step, where the measurement before it requests that

    def run(self, published: int = 0) -> Position:
        """All steps that remain. It writes a checkpoint before it raises `Interrupted` or `Refused`.

        `published`: the newest version that other processes may have sampled with.
        """
        position = go_back(self.store, self.folder, self.phases, self.say)
        if published > position.version:  # by steps that are lost: no later weights may have their version
            position = replace(position, version=published + 1)
        if position.digest:
            self.learner.load(self.folder.checkpoint(position.step), position.version)
            self.checkpoints.saved = position.step
        self.learner.version = position.version
        if self.folder.changed:
            position = replace(position, stopped="")
        for phase in self.phases:
            if position.step < phase.ends and not position.stopped:
                position = self._phase(phase, position)
            if position.stopped and position.step <= phase.ends:
                break
        self.checkpoints.prune(phase)
        return position

    def _phase(self, phase: Phase, position: Position) -> Position:
        position = self._enter(phase, position)
        try:
            if position.step == 0:
                view = View(phase, 0, phase.options(position), empty_metrics() | position.columns())
                position = self._show(view, position)
                self.stop = position.stopped
                position = replace(position, stopped="")
            if phase.config.guard.action == "rollback" and self.checkpoints.saved < 0:
                position = self.checkpoints.commit(phase, position)  # to which the first steps may roll back
            while position.step < phase.ends and not position.stopped:
                self.activity.check()
                position = self._step(phase, position)
                if position.skipped >= phase.config.train.max_skipped:
                    raise Refused(
                        f"step {position.step}: {position.skipped} updates in a row were skipped, for the "
                        "reasons above. What to do: fix the data, or start a new run with a lower train.lr "
                        "or in float32"
                    )
        except Unwritable as error:  # no checkpoint can be written now, and a step may be half logged
            saved = max(self.checkpoints.saved, 0)
            again = resuming(self.folder.folder)
            raise Unwritable(f"{error}. The run resumes from step {saved} with: {again}") from error
        except (Interrupted, Refused) as error:
            self.checkpoints.commit_done(phase, position)
            if isinstance(error, Interrupted):
                self.say(
                    f"interrupted after step {position.step}; continue with: {resuming(self.folder.folder)}"
                )
            raise
        return position

    def _enter(self, phase: Phase, position: Position) -> Position:
        """Build what the steps of the phase use, and let learner and monitors continue where they were."""
        if position.phase != phase.name:
            position = replace(position, phase=phase.name, anchor=position.digest, prompts=0)
            position = replace(position, beta=None, speed=None, lost=None, rate=None)
        if phase.config.policy.cache_reference and position.cached < 0:
            position = replace(position, cached=self.store.ledger.last_reference_logp())
        resumed = self.folder.checkpoint(position.step) if position.step > phase.begins else None
        self.learner.enter(phase.config, began=start_of(self.folder, phase), resumed=resumed)
        position = replace(position, version=self.learner.version)  # another one where it begins anew
        self.parts = parts = self.build(phase, position)
        self.sampling = Sampling(
            parts.source, parts.feed, self.learner, self.store, self.folder.id, self.activity, self.say
        )
        self.updates = Updates(self.learner, self.store, self.folder, self.activity, self.say, parts.monitors)
        for monitor in parts.monitors:
            if monitor.name in position.monitors:
                monitor.restore(position.monitors[monitor.name])
        return position

    def _step(self, phase: Phase, position: Position) -> Position:
        """One step. It can be stopped before the weights move, or after the step is done."""
        train = phase.config.train
        began = time.perf_counter()
        # Not at the end of a step: where it fails, the step before is done and can be committed.
        self.parts.source.publish(self.learner)
        data = self.sampling.take(phase, position)
        sampled = time.perf_counter()
        metrics = empty_metrics()
        metrics |= describe_batch(data.valid, data.collected, self.learner.version, phase.config.reward)
        metrics["replay_missing"] = data.missing
        view = View(phase, position.step + 1, phase.options(position), metrics, self.stop)
        self.activity.stage("updating", 1, train.updates)
        batch = self.parts.feed.batch(data.valid, view.step, view.options)
        for monitor in self.parts.monitors:
            monitor.receive(data.valid.samples)
        position = self.updates.make(view, position, batch)
        self.learner.follow(view.at)
        position = replace(position, step=view.step, prompts=position.prompts + data.prompts)
        trained = time.perf_counter()
        view.metrics |= position.columns() | {
            "seconds_sample": sampled - began,
            "seconds_train": trained - sampled,
            "seconds": trained - began,
            "tokens_per_second": (data.collected.tokens + metrics["tokens"]) / (trained - began),
        }
        position = self._show(view, position)
        if view.last or metrics["rolled_back"] or phase.at(position) % train.checkpoint_every == 0:
            position = self.checkpoints.commit(phase, position)
        return position

    def _show(self, view: View, position: Position) -> Position:
        """Let the monitors look at a step that is done, and tune β by the KL that is known then."""
        if view.is_due:
            self.parts.source.publish(self.learner)
        states: dict[str, Any] = dict(position.monitors)
        with self.learner.averaged():
            for monitor in self.parts.monitors:
                monitor.after(view)
                state = monitor.state()
                if state is not None:
                    states[monitor.name] = state
        setting, kl = view.phase.config.objective.options.get("beta", 0.0), view.metrics["kl_ref"]
        if is_tuned(setting) and kl is not None:
            position = replace(position, beta=tune(setting, view.options["beta"], kl))
        return replace(position, stopped=view.stop, monitors=states)
