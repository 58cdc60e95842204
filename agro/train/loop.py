"""The loop. Read this first: everything that happens between a configuration and a better model.

A run has phases, and a phase has steps. One step fills the store with fresh groups, draws them and stored
ones, computes the objective's gradient over them, moves the weights, publishes them and measures. Now and
then it commits a checkpoint. The loop depends on three parts: a `Learner` owns the weights, a `Feed` gives
the samples of a step, with the help of a `Source`, and `Monitor`s observe steps. All randomness comes from
counters (seed, step, response, position), so a run that is stopped and resumed equals one that never stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from agro.errors import Interrupted, Refused, Unwritable
from agro.io.numbers import short
from agro.objectives import NotFinite
from agro.rollout import Activity
from agro.runs.folder import Run, resuming
from agro.runs.metrics import empty_metrics
from agro.store import Store
from agro.train.feed import Feed, StepBatch
from agro.train.learner import Learner
from agro.train.measure import change, describe_batch, describe_step, kept, logp_differences
from agro.train.monitors import GO, Monitor, View
from agro.train.phases import TRIED, Phase, Position, is_tuned, loss_of, lowered, recalled, speed_of, tune
from agro.train.recovery import Checkpoints, damage, go_back, start_of
from agro.train.step import Step

# Of finding a rate: trials, how near the bound one has to come, how far the next one goes, the largest rate.
TRIALS, NEAR, FARTHEST, HIGHEST = 4, 0.1, 1000.0, 1e-2
ROUNDING = 1e-4  # norm of a gradient that may be rounding


class Loop:
    """Takes a learner through the phases of a run."""

    feed: Feed  # of the current phase
    monitors: Sequence[Monitor]

    def __init__(
        self,
        phases: Sequence[Phase],
        learner: Learner,
        store: Store,
        folder: Run,
        activity: Activity,
        build: Callable[[Phase, Position], tuple[Feed, Sequence[Monitor]]],
    ) -> None:
        """`build` makes what the steps of a phase use."""
        self.phases, self.learner, self.store, self.folder = phases, learner, store, folder
        self.activity, self.build = activity, build
        self.checkpoints = Checkpoints(learner, store, folder, activity)
        self.stop = ""  # why the run ends after its first step, where the measurement before it requests that

    def run(self, published: int = 0) -> Position:
        """All steps that remain. It writes a checkpoint before it raises `Interrupted` or `Refused`.

        `published`: the newest version that other processes may have sampled with.
        """
        position = go_back(self.store, self.folder, self.phases, self.activity.say)
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
                again = resuming(self.folder.folder)
                self.activity.say(f"interrupted after step {position.step}; continue with: {again}")
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
        self.feed, self.monitors = self.build(phase, position)
        for monitor in self.monitors:
            if monitor.name in position.monitors:
                monitor.restore(position.monitors[monitor.name])
        return position

    def _step(self, phase: Phase, position: Position) -> Position:
        """One step. It can be stopped before the weights move, or after the step is done."""
        train = phase.config.train
        began = time.perf_counter()
        # Not at the end of a step: where it fails, the step before is done and can be committed.
        self.feed.source.publish(self.learner)
        data = self.feed.take(position)
        sampled = time.perf_counter()
        metrics = empty_metrics() | describe_batch(data, self.learner.version, phase.config.reward)
        view = View(phase, position.step + 1, phase.options(position), metrics, self.stop)
        self.activity.stage("updating", 1, train.updates)
        batch = self.feed.batch(data, view.step, view.options)
        for monitor in self.monitors:
            monitor.receive(data.samples)
        position = self.update(view, position, batch)
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

    def update(self, view: View, position: Position, data: StepBatch | None) -> Position:
        """All optimizer steps on one batch; the metrics are of the first, before the weights move."""
        if data is None:
            return self._skip(view, position, "no sample that was drawn is valid")
        phase, train, name = view.phase, view.phase.config.train, view.phase.config.objective.name
        options = phase.resolved(view.options)
        for update in range(train.updates):
            self.activity.stage("updating", update + 1, train.updates)
            check = self.activity.check if update == 0 else lambda: None
            try:
                step = self.learner.gradient(data.batch, name, options, check)
            except NotFinite as error:
                position = self._skip(view, position, str(error))
                continue
            if view.metrics["loss"] is None:
                view.metrics |= describe_step(step, data.recent, phase, view.options)
                view.metrics |= logp_differences(step, data.comparable)
                actions = (monitor.judge(view) for monitor in self.monitors)
                action = next((action for action in actions if action.kind != "go"), GO)
                if action.kind == "stop":
                    raise Refused(f"step {view.step}: {action.why}")
                if action.kind == "skip":
                    return self._skip(view, position, action.why)
                if action.kind == "roll back":
                    view.metrics["rolled_back"] = 1
                    return self._roll_back(phase, position, action.why)
            if train.lr == "auto" and position.rate is None:
                position = replace(position, rate=self._find_rate(step, phase.bound))
            position = self._move(view, position, step, phase.lr(position, update))
        return position

    def _skip(self, view: View, position: Position, reason: str) -> Position:
        view.metrics["skipped"] += 1
        self.activity.say(f"update skipped: {reason}")
        return replace(position, skipped=position.skipped + 1)

    def _roll_back(self, phase: Phase, position: Position, reason: str) -> Position:
        """Load the last checkpoint's weights, with a new version and half the learning rate."""
        commit, step = self.store.ledger.committed(self.folder.id), position.step + 1
        if commit is None:
            raise Refused(
                f"step {step}: {reason}, and there is no checkpoint to roll back to. What to do: "
                'guard.action = "rollback", which commits one at the start, or a lower train.checkpoint_every'
            )
        folder = self.folder.checkpoint(commit.step)
        if problem := damage(folder, commit):
            raise Refused(
                f"{problem}, and step {step} has to roll back to it ({reason}). What to do: --resume"
            )
        self.learner.load(folder, position.version + 1)
        in_phase = commit.step > phase.begins or phase.begins == 0
        resumed = folder if in_phase else None
        self.learner.enter(phase.config, began=start_of(self.folder, phase), resumed=resumed)
        self.activity.say(f"{reason}: back to the weights of step {commit.step}, at half the learning rate")
        return replace(position, version=self.learner.version, rollbacks=position.rollbacks + 1)

    def _find_rate(self, step: Step, bound: float) -> float | None:
        """The rate at which the update changes the policy by the bound; None where none is found.

        The KL grows as the square of a small rate, so that each trial tells the next one. A gradient that is
        rounding alone, such as of a batch of equal rewards, tells nothing.
        """
        if step.norm <= ROUNDING:
            return None
        self.activity.stage("finding train.lr")
        rate, factor = TRIED, math.inf
        for _ in range(TRIALS):
            kl = change(self.learner.try_move(rate, step.batch), step)
            factor = math.sqrt(bound / kl) if kl > 0 else FARTHEST * float(kl == 0)
            rate = min(HIGHEST, rate * min(max(factor, 1 / FARTHEST), FARTHEST))
            if abs(factor - 1) < NEAR:
                break
        if kl == 0:
            return None
        found = float(short(rate))
        self.activity.say(
            f"train.lr = {found:g}, at which the first update changes the policy by {bound:.2g} nats a token"
        )
        return found

    def _move(self, view: View, position: Position, step: Step, lr: float) -> Position:
        """One optimizer step at a rate of at most `lr`, and what it did."""
        train, before = view.phase.config.train, None
        if train.gain_ratio or train.step_kl:  # rules that a forward pass after the step measures
            lr = lowered(lr, train, view.phase.bound, position)
            before = self.learner.along_gradient()
        self.learner.move(lr, position.rate if train.lr == "auto" else train.lr)
        view.metrics["lr"] = view.metrics["lr"] or lr
        position = replace(position, version=self.learner.version, skipped=0)
        if before is None:
            return position
        promise = max(1.0, step.norm / train.clip) * float(before - self.learner.along_gradient())
        logp_BT = self.learner.logp(step.batch)
        kl, gain = change(logp_BT, step), kept(logp_BT, step)
        if view.metrics["step_kl"] is None:
            view.metrics |= {"step_kl": kl, "promised": promise, "kept": gain}
        lost = loss_of(promise, gain, lr, train.gain_ratio) if step.norm > ROUNDING else None
        speed = recalled(speed_of(kl, lr), position.speed)
        return replace(position, speed=speed, lost=recalled(lost, position.lost))

    def _show(self, view: View, position: Position) -> Position:
        """Let the monitors look at a step that is done, and tune β by the KL that is known then."""
        if view.is_due:
            self.feed.source.publish(self.learner)
        states: dict[str, Any] = dict(position.monitors)
        with self.learner.averaged():
            for monitor in self.monitors:
                monitor.after(view)
                state = monitor.state()
                if state is not None:
                    states[monitor.name] = state
        setting, kl = view.phase.config.objective.options.get("beta", 0.0), view.metrics["kl_ref"]
        if is_tuned(setting) and kl is not None:
            position = replace(position, beta=tune(setting, view.options["beta"], kl))
        return replace(position, stopped=view.stop, monitors=states)
