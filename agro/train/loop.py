"""The loop. Read this first: everything that happens between a configuration and a better model.

A run has phases, and a phase has steps. One step publishes the weights, fills the store with fresh groups,
draws them and stored ones, computes the objective's gradient over them, moves the weights and measures. At
regular intervals it commits a checkpoint. The loop depends on three parts: a `Learner` owns the weights, a
`Feed` provides each step's samples from a `Source` and the store, and `Monitor`s observe and judge steps. All
randomness comes from counters (seed, step, response, position), so a run that is stopped and resumed equals
one that never stopped.

A checkpoint is a folder of safetensors and JSON, never pickles. It is written to a temporary folder, synced
and renamed, and its parent is synced. Only then does one transaction of the store write (run, step, digest),
the row that makes the checkpoint valid. The last few stay on disk, in case one is damaged.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agro.errors import Interrupted, Refused, Unwritable
from agro.io.files import complete_folder, digest, writing
from agro.io.numbers import short
from agro.objectives import NotFinite
from agro.rollout import Activity
from agro.runs.folder import Run, resuming
from agro.runs.rundata import empty_metrics
from agro.store import Commit, Store
from agro.train.feed import Feed, StepBatch
from agro.train.learner import OF_PHASE, Learner
from agro.train.measure import change, describe_batch, describe_step, gain_of, logp_differences
from agro.train.monitors import GO, Monitor, View
from agro.train.phases import (
    FIRST_RATE,
    POSITION,
    Phase,
    Position,
    is_tuned,
    loss_of,
    lowered,
    read_position,
    recalled,
    speed_of,
    tune,
)
from agro.train.step import Step

# Learning-rate search: trials, relative error at which it ends, largest factor per trial, largest rate.
TRIALS, TOLERANCE, MAX_FACTOR, MAX_RATE = 4, 0.1, 1000.0, 1e-2
ROUNDING = 1e-4  # a gradient of at most this norm may be rounding error alone


@dataclass(eq=False)
class Loop:
    """Takes a learner through the phases of a run."""

    phases: Sequence[Phase]
    learner: Learner
    store: Store
    folder: Run
    activity: Activity
    build: Callable[[Phase, Position], tuple[Feed, Sequence[Monitor]]]  # a phase's feed and monitors
    saved: int = -1  # the last step with a checkpoint; -1: none
    stop: str = ""  # why the measurement at step 0 ends the run (after step 1); empty if it doesn't
    feed: Feed = field(init=False)  # the current phase's
    monitors: Sequence[Monitor] = field(init=False)

    def run(self, published: int = 0) -> Position:
        """Run the remaining steps. Writes a checkpoint before it raises `Interrupted` or `Refused`.

        `published`: the newest version that other processes may have sampled with.
        """
        position = self.go_back()
        if published > position.version:  # these versions belong to lost weights
            position = replace(position, version=published + 1)
        if position.digest:
            self.learner.load(self.folder.checkpoint(position.step), position.version)
            self.saved = position.step
        self.learner.version = position.version
        if self.folder.changed:
            position = replace(position, stopped="")
        for phase in self.phases:
            if position.step < phase.ends and not position.stopped:
                position = self._phase(phase, position)
            if position.stopped and position.step <= phase.ends:
                break
        self._prune(phase)
        return position

    def _phase(self, phase: Phase, position: Position) -> Position:
        position = self._enter(phase, position)
        try:
            if position.step == 0:
                view = View(phase, 0, phase.options(position), empty_metrics() | position.columns())
                position = self._show(view, position)
                self.stop = position.stopped
                position = replace(position, stopped="")
            if phase.config.guard.action == "rollback" and self.saved < 0:
                position = self.commit(phase, position)  # the first steps can roll back to it
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
            saved = max(self.saved, 0)
            command = resuming(self.folder.folder)
            raise Unwritable(f"{error}. The run resumes from step {saved} with: {command}") from error
        except (Interrupted, Refused) as error:
            if position.step != self.saved and self.learner.version == position.version:  # step complete
                self.store.ledger.rewind(self.folder.id, position.step)
                self.commit(phase, position)
            if isinstance(error, Interrupted):
                command = resuming(self.folder.folder)
                self.activity.say(f"interrupted after step {position.step}; continue with: {command}")
            raise
        return position

    def _enter(self, phase: Phase, position: Position) -> Position:
        """Build the phase's feed and monitors, and restore the state of learner and monitors."""
        if position.phase != phase.name:
            position = replace(position, phase=phase.name, anchor=position.digest, prompts=0)
            position = replace(position, beta=None, speed=None, lost=None, rate=None)
        if phase.config.policy.cache_reference and position.cached < 0:
            position = replace(position, cached=self.store.ledger.last_reference_logp())
        resumed = self.folder.checkpoint(position.step) if position.step > phase.begins else None
        self._enter_learner(phase, resumed)
        position = replace(position, version=self.learner.version)  # new if the phase restarts the weights
        self.feed, self.monitors = self.build(phase, position)
        for monitor in self.monitors:
            if monitor.name in position.monitors:
                monitor.restore(position.monitors[monitor.name])
        return position

    def _step(self, phase: Phase, position: Position) -> Position:
        """Run one step. It can be stopped before the weights move, or once the step is complete."""
        train = phase.config.train
        began = time.perf_counter()
        # Publish at the start of a step: if that fails, the previous step can still be committed.
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
            position = self.commit(phase, position)
        return position

    def update(self, view: View, position: Position, data: StepBatch | None) -> Position:
        """Make all optimizer steps on one batch. The metrics describe the first, before the weights move."""
        if data is None:
            return self._skip(view, position, "none of the drawn samples is valid")
        phase, train, name = view.phase, view.phase.config.train, view.phase.config.objective.name
        options = phase.resolved(view.options)
        for update in range(train.updates):
            self.activity.stage("updating", update + 1, train.updates)
            check = self.activity.check if update == 0 else lambda: None  # weights moved: finish the step
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
        self._enter_learner(phase, folder if in_phase else None)
        self.activity.say(f"{reason}: back to the weights of step {commit.step}, at half the learning rate")
        return replace(position, version=self.learner.version, rollbacks=position.rollbacks + 1)

    def _find_rate(self, step: Step, bound: float) -> float | None:
        """Find the rate at which the update changes the policy by `bound`; None if there is none.

        The KL is quadratic in a small rate, so each trial predicts the next rate. A gradient that is rounding
        error alone, as for a batch of equal rewards, predicts none.
        """
        if step.norm <= ROUNDING:
            return None
        self.activity.stage("finding train.lr")
        rate, factor = FIRST_RATE, math.inf
        for _ in range(TRIALS):
            kl = change(self.learner.try_move(rate, step.batch), step)
            factor = math.sqrt(bound / kl) if kl > 0 else MAX_FACTOR * float(kl == 0)
            rate = min(MAX_RATE, rate * min(max(factor, 1 / MAX_FACTOR), MAX_FACTOR))
            if abs(factor - 1) < TOLERANCE:
                break
        if kl == 0:
            return None
        rounded = float(short(rate))
        self.activity.say(
            f"train.lr = {rounded:g}: the first update then changes the policy by {bound:.2g} nats per token"
        )
        return rounded

    def _move(self, view: View, position: Position, step: Step, lr: float) -> Position:
        """Make one optimizer step at a rate of at most `lr`, and measure its effect."""
        train, before = view.phase.config.train, None
        if train.gain_ratio or train.step_kl:  # these rules need a forward pass after the step
            lr = lowered(lr, train, view.phase.bound, position)
            before = self.learner.along_gradient()
        self.learner.move(lr, position.rate if train.lr == "auto" else train.lr)
        view.metrics["lr"] = view.metrics["lr"] or lr
        position = replace(position, version=self.learner.version, skipped=0)
        if before is None:
            return position
        predicted = max(1.0, step.norm / train.clip) * float(before - self.learner.along_gradient())
        logp_BT = self.learner.logp(step.batch)
        kl, gain = change(logp_BT, step), gain_of(logp_BT, step)
        if view.metrics["step_kl"] is None:
            view.metrics |= {"step_kl": kl, "promised": predicted, "kept": gain}
        lost = loss_of(predicted, gain, lr, train.gain_ratio) if step.norm > ROUNDING else None
        speed = recalled(speed_of(kl, lr), position.speed)
        return replace(position, speed=speed, lost=recalled(lost, position.lost))

    def _show(self, view: View, position: Position) -> Position:
        """Show a completed step to the monitors, then tune β by its KL."""
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

    def commit(self, phase: Phase, position: Position) -> Position:
        """Write a checkpoint, then the row of the store that makes it valid."""
        self.activity.stage("saving")
        with complete_folder(self.folder.checkpoint(position.step)) as temporary:
            self.learner.save(temporary)
            content = asdict(replace(position, digest=""))
            (temporary / POSITION).write_text(json.dumps(content, indent=1), encoding="utf-8")
            files = _digests(temporary)
        names = "".join(f"{name} {files[name]}\n" for name in sorted(files))
        position = replace(position, digest=hashlib.sha256(names.encode()).hexdigest())
        self.folder.sync()
        self.store.ledger.commit(self.folder.id, position.step, position.digest, files=files)
        self.saved = position.step
        self._prune(phase)
        return position

    def _prune(self, phase: Phase) -> None:
        """Delete all checkpoints except the one that the phase began with and the last `train.keep`."""
        commits = self.store.ledger.commits(self.folder.id)[-phase.config.train.keep :]
        remaining = {phase.begins, *(commit.step for commit in commits)}
        folders = {self.folder.checkpoint(step) for step in remaining}
        for old in set((self.folder.folder / "checkpoints").glob("step-*")) - folders:
            with writing(old):
                shutil.rmtree(old)

    def _enter_learner(self, phase: Phase, resumed: Path | None) -> None:
        """`resumed`: this phase's checkpoint to continue from."""
        began = self.folder.checkpoint(phase.begins) if phase.begins else None  # None: the run's start
        self.learner.enter(phase.config, began=began, resumed=resumed)

    def go_back(self) -> Position:
        """Find the position to resume from, and rewind the store and the metrics to it.

        Raises `Refused` if the run committed checkpoints but none of them is complete.
        """
        store, folder, say = self.store, self.folder, self.activity.say
        store.tables.check()
        if folder.has_steps() and not store.ledger.knows(folder.id):
            raise Refused(
                f"{store.path}: expected the store that the run in {folder.folder} began with, got one "
                "without records of this run. What to do: put the run's store back, or start a new run with "
                "another --out"
            )
        commits = {c.step: c for c in store.ledger.commits(folder.id)}
        problems = [f"row {row} of the commits in {store.path}" for row in store.tables.damaged("commits")]
        chosen: Commit | None = None
        for commit in reversed(commits.values()):
            if problem := self._damage(commit, commits):
                problems.append(problem)
                continue
            chosen = commit
            break
        if commits and chosen is None:
            raise Refused(
                f"{folder.folder}: expected a complete checkpoint, but every committed one is damaged: "
                f"{'; '.join(problems[:5])}. What to do: restore one of them from a copy, or start a new run "
                "with another --out"
            )
        step = chosen.step if chosen else 0
        if problems:
            say(f"damaged: {'; '.join(problems)}; resuming from step {step}")
        # Metrics first: if the process is killed in between, the store still knows the run.
        for line in folder.forget_after(step or -1):  # step 0 is measured again
            say(f"damaged: {folder.metrics_file}:{line}; dropped")
        store.ledger.rewind(folder.id, to=chosen)
        return read_position(folder.checkpoint(step), chosen.digest) if chosen else Position()

    def _damage(self, commit: Commit, commits: Mapping[int, Commit]) -> str:
        """Describe damage to a commit's checkpoint or its phase's reference; empty if there is none."""
        problem = damage(self.folder.checkpoint(commit.step), commit)
        if problem:
            return problem
        position = read_position(self.folder.checkpoint(commit.step), commit.digest)
        for phase in self.phases:
            is_anchored = phase.begins > 0 and phase.config.policy.reference in OF_PHASE
            if is_anchored and phase.name == position.phase and position.step < phase.ends:
                anchor = commits.get(phase.begins)
                if anchor is None or anchor.digest != position.anchor:
                    return f"step {commit.step}: the commit of step {phase.begins}, its reference, is missing"
                return damage(self.folder.checkpoint(phase.begins), anchor)
        return ""


def damage(folder: Path, commit: Commit) -> str:
    """Describe the files of a committed checkpoint that are missing or changed; empty if it is complete."""
    if not folder.is_dir():
        return f"{folder} is missing"
    present = _digests(folder)
    problems = []
    for name, expected in commit.files.items():
        if name not in present:
            problems.append(f"{folder / name} is missing")
        elif present[name] != expected:
            problems.append(f"{folder / name} was changed after it was written")
    return ", ".join(problems)


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by name."""
    return {path.name: digest(path) for path in folder.iterdir()}
