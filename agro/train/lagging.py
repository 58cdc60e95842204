"""A source whose sampler keeps its weights for several optimizer steps (`source.sync_every`).

The lag is exact, also after a resume: the sampler's weights are in RUN/weights/synced under their version
until no checkpoint needs them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from agro.io.files import remove
from agro.models.published import load_published
from agro.rollout import CollectResult
from agro.rollout.rollout import Rollout, embedded
from agro.runs.folder import Run
from agro.train.abilities import SourceCapability
from agro.train.learner import Learner
from agro.train.source import FillRequest, InlineSource
from agro.train.state import read_position


class LaggingSource:
    """Samples in this process with a copy of the policy, whose weights are renewed now and then.

    Versions and log-probs of its samples are those of the copy.
    """

    can: ClassVar[frozenset[SourceCapability]] = InlineSource.can - {"samples_current_weights"}

    def __init__(self, current: InlineSource, folder: Run) -> None:
        """`current`: the source without a lag, whose engine monitors use."""
        self.current, self.folder = current, folder
        self.synced = folder.folder / "weights" / "synced"
        self.lagging: InlineSource | None = None

    def fill(self, wanted: FillRequest) -> CollectResult:
        assert self.lagging is not None, "weights are published before a step"
        return self.lagging.fill(wanted)

    def publish(self, learner: Learner) -> None:
        """Renew the copy's weights where they are `source.sync_every` optimizer steps old."""
        self.current.publish(learner)
        version = self._version
        if not 0 <= version <= learner.version:  # the run was resumed, or rolled back
            version = max((v for v in self._versions() if v <= learner.version), default=-1)
        if version < 0 or learner.version - version >= self.current.config.source.sync_every:
            version = learner.version
            learner.publish(self._folder(version))
        if version != self._version:
            self._load(version)
            self._prune()

    @property
    def _version(self) -> int:
        """Of the copy's weights; -1: it has none yet."""
        return -1 if self.lagging is None else self.lagging.rollout.engine.version

    def _load(self, version: int) -> None:
        if self.lagging is None:
            self.lagging = self._open(version)
        else:
            self.lagging.rollout.engine.load(self._folder(version), version)

    def _open(self, version: int) -> InlineSource:
        config, rollout = self.current.config, self.current.rollout
        policy = load_published(config.policy, self._folder(version))
        engine = embedded(policy, version, fused=config.engine.fused)
        copy = Rollout(rollout.encoder, engine, rollout.environment, rollout.max_turns, rollout.source)
        return replace(self.current, rollout=copy, weights=None)

    def _folder(self, version: int) -> Path:
        return self.synced / f"v{version:08d}"

    def _versions(self) -> list[int]:
        return sorted(int(folder.name[1:]) for folder in self.synced.glob("v*"))

    def _prune(self) -> None:
        """Remove all but the weights in use, and those with which the run continues from a checkpoint."""
        commits = self.current.store.ledger.commits(self.current.run)
        folders = [self.folder.checkpoint(commit.step) for commit in commits]
        starts = [read_position(folder, "").version for folder in folders if folder.is_dir()]
        versions = self._versions()
        needed = {max((v for v in versions if v <= start), default=-1) for start in (*starts, self._version)}
        for version in set(versions) - needed:
            remove(self._folder(version))
