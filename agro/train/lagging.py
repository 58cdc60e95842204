"""A source whose sampler has earlier weights.

With `source.sync_every` the weights that sample are those of up to so many optimizer steps ago, with
`source.sync_from` one of the last such copies, drawn at random: a function of seed and version, also after a
resume. With `policy.reference = "sampler"` they are the reference too.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

from agro.io.files import remove
from agro.models.published import load_published
from agro.rollout import CollectResult
from agro.rollout.rollout import embedded
from agro.runs.folder import Run
from agro.store import Store
from agro.train.learner import Learner
from agro.train.phases import derive
from agro.train.recovery import read_position
from agro.train.source import FillRequest, InlineSource


@dataclass(frozen=True)
class Copies:
    """Weights that a run keeps beside its checkpoints: the folders RUN/weights/`name`/vVERSION.

    One stays until no checkpoint needs it: a run that continues from one finds what it had there.
    """

    run: Run
    store: Store
    name: str
    last: int = 1  # how many of the last ones are in use at a time

    def folder(self, version: int) -> Path:
        return self.run.folder / "weights" / self.name / f"v{version:08d}"

    def versions(self) -> list[int]:
        """In rising order."""
        return sorted(int(folder.name[1:]) for folder in self.folder(0).parent.glob("v*"))

    def until(self, version: int) -> list[int]:
        """Those up to a version; later ones, of steps that are lost, are removed."""
        for later in self.versions():
            if later > version:
                remove(self.folder(later))
        return self.versions()

    def prune(self, now: int) -> None:
        """Remove all but those in use at version `now`, and where the run continues from a checkpoint."""
        commits = self.store.ledger.commits(self.run.id)
        folders = [self.run.checkpoint(commit.step) for commit in commits]
        starts = [read_position(folder, "").version for folder in folders if folder.is_dir()]
        copies, needed = self.versions(), set[int]()
        for start in (*starts, now):
            needed |= set([version for version in copies if version <= start][-self.last :])
        for version in set(copies) - needed:
            remove(self.folder(version))


class LaggingSource:
    """Samples in this process with a copy of the policy, whose weights are renewed now and then.

    Versions and log-probs of its samples are those of the copy, which is in RUN/weights/synced.
    """

    def __init__(self, current: InlineSource, folder: Run) -> None:
        """`current`: the source without a lag, whose engine monitors use."""
        self.current = current
        self.copies = Copies(folder, current.store, "synced", current.config.source.sync_from)
        self.lagging: InlineSource | None = None

    def fill(self, wanted: FillRequest) -> CollectResult:
        assert self.lagging is not None, "weights are published before a step"
        filled = self.lagging.fill(wanted)
        return replace(filled, measured={**filled.measured, "sampler_version": self._version})

    def publish(self, learner: Learner) -> None:
        """Copy the policy where the newest copy is `source.sync_every` steps old, and choose one of the last
        `source.sync_from`: the same from one new copy to the next."""
        self.current.publish(learner)
        copies = self.copies.until(learner.version)
        if not copies or learner.version - copies[-1] >= self.current.config.source.sync_every:
            learner.publish(self.copies.folder(learner.version))
            copies.append(learner.version)
        last = copies[-self.copies.last :]
        version = last[derive(self.current.config.train.seed, "sampler", copies[-1]) % len(last)]
        if version == self._version:
            return
        if self.lagging is None:
            config = self.current.config
            policy = load_published(config.policy, self.copies.folder(version))
            rollout = copy(self.current.rollout)
            rollout.engine = embedded(policy, version, fused=config.engine.fused)
            self.lagging = replace(self.current, rollout=rollout, weights=None)
        else:
            self.lagging.rollout.engine.load(self.copies.folder(version), version)
        if self.current.config.policy.reference == "sampler":
            learner.refer(self.copies.folder(version))
        self.copies.prune(learner.version)

    @property
    def _version(self) -> int:
        """Of the sampler's weights; -1: it has none yet."""
        return -1 if self.lagging is None else self.lagging.rollout.engine.version
