"""A source whose sampler has earlier weights of the policy: those of up to `source.sync_every` optimizer
steps ago, or one of the last `source.sync_from` such copies, drawn at random.

Which weights sample is a function of seed and version, also after a resume: the copies are in
RUN/weights/synced under their versions until no checkpoint needs them.

With `policy.reference = "sampler"` they are the reference too: the sampler is then a rival that the policy is
told apart from (self-play, arXiv 2401.01335; SePPO, arXiv 2410.05255, whose rival is a random earlier one).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from agro.models.published import load_published
from agro.rollout import CollectResult
from agro.rollout.rollout import Rollout, embedded
from agro.runs.folder import Run
from agro.train.abilities import SOURCES, SourceCapability
from agro.train.copies import Copies
from agro.train.learner import Learner
from agro.train.phases import derive
from agro.train.source import FillRequest, InlineSource


class LaggingSource:
    """Samples in this process with a copy of the policy, whose weights are renewed now and then.

    Versions and log-probs of its samples are those of the copy.
    """

    can: ClassVar[frozenset[SourceCapability]] = SOURCES["lagging"]

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
        """Copy the policy where the newest copy is `source.sync_every` steps old, and choose one."""
        self.current.publish(learner)
        copies = self.copies.until(learner.version)
        if not copies or learner.version - copies[-1] >= self.current.config.source.sync_every:
            learner.publish(self.copies.folder(learner.version))
            copies.append(learner.version)
        version = self._choose(copies)
        if version == self._version:
            return
        self._load(version)
        if self.current.config.policy.reference == "sampler":
            learner.refer(self.copies.folder(version))
        self.copies.prune(learner.version)

    @property
    def _version(self) -> int:
        """Of the sampler's weights; -1: it has none yet."""
        return -1 if self.lagging is None else self.lagging.rollout.engine.version

    def _choose(self, copies: list[int]) -> int:
        """One of the last `source.sync_from` copies: the same from one new copy to the next."""
        config = self.current.config
        last = copies[-config.source.sync_from :]
        return last[derive(config.train.seed, "sampler", copies[-1]) % len(last)]

    def _load(self, version: int) -> None:
        if self.lagging is None:
            self.lagging = self._open(version)
        else:
            self.lagging.rollout.engine.load(self.copies.folder(version), version)

    def _open(self, version: int) -> InlineSource:
        config, rollout = self.current.config, self.current.rollout
        policy = load_published(config.policy, self.copies.folder(version))
        engine = embedded(policy, version, fused=config.engine.fused)
        copy = Rollout(rollout.encoder, engine, rollout.environment, rollout.max_turns, rollout.source)
        return replace(self.current, rollout=copy, weights=None)
