"""The checkpoints of a run: those that it commits, and the last complete one, from which it resumes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agro import config as configuration
from agro.config import RunConfig
from agro.errors import Refused
from agro.io.files import writing
from agro.models.policy import Policy
from agro.rollout import Activity
from agro.runs.folder import Run
from agro.store import Commit, Store
from agro.train import state
from agro.train.learner import AVERAGE, Learner
from agro.train.phases import Phase, derive
from agro.train.stored_tensors import assign, exists


@dataclass
class Checkpoints:
    """Commits the position of a run, with all that its learner needs to continue there."""

    learner: Learner
    store: Store
    folder: Run
    activity: Activity
    saved: int = -1  # the last step with a checkpoint; -1: none has one

    def commit(self, phase: Phase, position: state.Position) -> state.Position:
        """Write a checkpoint, then the row of the store that makes it valid."""
        self.activity.stage("saving")
        files = state.write_checkpoint(self.folder.checkpoint(position.step), position, self.learner.save)
        position = replace(position, digest=state.digest_of(files))
        self.folder.sync()
        self.store.ledger.commit(self.folder.id, position.step, position.digest, files=files)
        self.saved = position.step
        self.prune(phase)
        return position

    def commit_done(self, phase: Phase, position: state.Position) -> None:
        """Commit the last step that was done, unless the weights moved since then."""
        if position.step != self.saved and self.learner.version == position.version:
            self.store.ledger.rewind(self.folder.id, position.step)
            self.commit(phase, position)

    def prune(self, phase: Phase) -> None:
        """Delete all but the one that the phase began with and the last `train.keep` commits."""
        commits = self.store.ledger.commits(self.folder.id)[-phase.config.train.keep :]
        remaining = {phase.begins, *(commit.step for commit in commits)}
        folders = {self.folder.checkpoint(step) for step in remaining}
        for old in set((self.folder.folder / "checkpoints").glob("step-*")) - folders:
            with writing(old):
                shutil.rmtree(old)


def go_back(store: Store, folder: Run, phases: Sequence[Phase], say: Callable[[str], None]) -> state.Position:
    """The position to resume from. What came after it is undone in the store, or marked as redone.

    Raises `Refused` where the run committed checkpoints but none of them is complete.
    """
    store.tables.check()
    if folder.has_steps() and not store.ledger.knows(folder.id):
        raise Refused(
            f"{store.path}: expected the store that the run in {folder.folder} began with, got one that has "
            "nothing of this run. What to do: put the run's store back, or start a new run with another --out"
        )
    commits = {c.step: c for c in store.ledger.commits(folder.id)}
    problems = [f"row {row} of the commits in {store.path}" for row in store.tables.damaged("commits")]
    chosen: Commit | None = None
    for commit in reversed(commits.values()):
        problem = _damage(folder, phases, commit, commits)
        if not problem:
            chosen = commit
            break
        problems.append(problem)
    if commits and chosen is None:
        raise Refused(
            f"{folder.folder}: no checkpoint that the run committed is complete: "
            f"{'; '.join(problems[:5])}. What to do: restore one of them from a copy, or start a new run "
            "with another --out"
        )
    step = chosen.step if chosen else 0
    if problems:
        say(f"damaged: {'; '.join(problems)}; resuming from step {step}")
    # Metrics first: where the run is killed in between, its store still knows it.
    for line in folder.forget_after(step or -1):  # the measurement of step 0 is made again
        say(f"damaged: {folder.metrics_file}:{line}; dropped")
    store.ledger.rewind(folder.id, to=chosen)
    return state.read_position(folder.checkpoint(step), chosen.digest) if chosen else state.Position()


def start_of(folder: Run, phase: Phase) -> Path | None:
    """The checkpoint that the phase began with; None at the start of the run."""
    return folder.checkpoint(phase.begins) if phase.begins else None


def _damage(folder: Run, phases: Sequence[Phase], commit: Commit, commits: Mapping[int, Commit]) -> str:
    """Why the run can't resume from this commit: damage to its checkpoint, or to its phase's reference."""
    problem = state.damage(folder.checkpoint(commit.step), commit)
    if problem:
        return problem
    position = state.read_position(folder.checkpoint(commit.step), commit.digest)
    for phase in phases:
        # Whose reference is, or begins as, the checkpoint that the phase began with.
        is_anchored = phase.begins > 0 and phase.config.policy.reference in ("phase", "ema", "periodic")
        if is_anchored and phase.name == position.phase and position.step < phase.ends:
            anchor = commits.get(phase.begins)
            if anchor is None or anchor.digest != position.anchor:
                return f"step {commit.step}: the commit of step {phase.begins}, its reference, is missing"
            return state.damage(folder.checkpoint(phase.begins), anchor)
    return ""


def is_checkpoint(folder: Path) -> bool:
    """Whether it is RUN/checkpoints/step-N."""
    return (folder / state.POSITION).is_file()


def run_of(folder: Path) -> Path:
    """The folder of the run that a checkpoint belongs to."""
    return folder.absolute().parents[1]


def load_checkpoint(folder: Path, config: configuration.PolicyConfig) -> Policy:
    """`config`: [policy] of the run. Where the run averages its weights, these are averaged too."""
    run = RunConfig.load(run_of(folder) / "config.json")
    policy = Policy.load(config, seed=derive(run.train.seed, "weights"))
    assign(folder, AVERAGE if exists(folder, AVERAGE) else "model", policy.weights())
    return policy
