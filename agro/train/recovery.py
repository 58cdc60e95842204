"""Where a run goes on: the last step that was committed and whose checkpoint is whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from agro.errors import Refused
from agro.store import Commit
from agro.train import checkpoint
from agro.train.checkpoint import Position

if TYPE_CHECKING:
    from agro.train.loop import Trainer


def go_back(trainer: Trainer) -> Position:
    """The last committed step whose checkpoint is whole, with its weights: what came after it is undone or marked."""
    trainer.store.check()
    run, commits = trainer.folder.id, {c.step: c for c in trainer.store.commits(trainer.folder.id)}
    damage = [f"row {row} of the commits in {trainer.store.path}" for row in trainer.store.damaged("commits")]
    for commit in reversed(commits.values()):
        found = _damage(trainer, commit, commits)
        if not found:
            break
        damage.append(found)
    else:
        if commits:
            raise Refused(
                f"{trainer.out}: none of the checkpoints that the run committed is whole: {'; '.join(damage[:5])}. "
                "What to do: restore one of them from a copy, or start a new run with another --out"
            )
        commit = None
    at = commit.step if commit else 0
    if damage:
        trainer.progress.say(f"damaged: {'; '.join(damage)}; going on from step {at}")
    trainer.store.rewind(run, to=commit)
    for line in trainer.folder.forget_after(at or -1):  # the measurement of step 0 is made again
        trainer.progress.say(f"damaged: {trainer.folder.metrics_file}:{line}; left out")
    if commit is None:
        return Position()
    policy = trainer.policy
    return checkpoint.load(
        trainer.folder.checkpoint(at), commit.digest, policy.weights(), policy.value_weights()
    )


def prune(trainer: Trainer, begins: int, keep: int) -> None:
    """Delete all checkpoints but the one that the phase began with and the last `keep` that were committed."""
    kept = {begins, *(c.step for c in trainer.store.commits(trainer.folder.id)[-keep:])}
    checkpoint.prune(trainer.out / "checkpoints", keep={trainer.folder.checkpoint(step) for step in kept})


def _damage(trainer: Trainer, commit: Commit, commits: Mapping[int, Commit]) -> str:
    """What keeps the run from going on at this commit: damage to its checkpoint, or to its phase's reference."""
    folder = trainer.folder.checkpoint(commit.step)
    if found := checkpoint.damage(folder, commit):
        return found
    position, begins = checkpoint.load_position(folder, commit.digest), 0
    for name, config in trainer.phases:
        ends = begins + config.train.steps
        needed = begins and config.policy.reference in ("phase", "ema", "periodic")
        if needed and name == position.phase and position.step < ends:
            reference = commits.get(begins)
            if reference is None or reference.digest != position.anchor:
                return f"step {commit.step}: the commit of step {begins}, its reference, is missing"
            return checkpoint.damage(trainer.folder.checkpoint(begins), reference)
        begins = ends
    return ""
