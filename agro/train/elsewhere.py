"""Sampling in other processes, the trainer's side. The other one is `agro.train.collector`.

The trainer writes its weights into RUN/weights/ after each step, and names the newest in
RUN/weights/latest.json. A collector loads them, claims prompts in the store, samples, scores, and marks the
prompts done, so that sampling and training overlap. Collectors are at most `ahead` prompts ahead of training,
which bounds the staleness of their samples.

Either side may be killed. The claim of a dead collector goes to the next one, which samples only the missing
responses; the store keeps each response of a claim once. What a killed trainer took since its last commit is
ready again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from agro.config import RunConfig
from agro.errors import Refused
from agro.files import remove, write
from agro.rollout import Activity, Collected
from agro.store import Store
from agro.store.requests import ledger_of
from agro.train.learner import Learner
from agro.train.phases import Phase
from agro.train.source import Wanted
from agro.types import Sample

POLL_SECONDS = 0.1
KEPT = 3  # published weights: a collector may still be loading the ones before the newest


class Elsewhere:
    """Waits until collectors have added the fresh groups of a step."""

    def __init__(self, phase: Phase, store: Store, run: str, folder: Path, activity: Activity) -> None:
        """`folder`: of the run, into whose weights/ the learner publishes."""
        self.phase, self.config, self.store, self.run = phase, phase.config, store, run
        self.weights, self.activity = folder / "weights", activity
        self.version = 0  # of the learner's weights
        self.step = 0  # of the run, the last one that was filled
        published = Published.read(folder)
        for weights in self.weights.glob("v*"):  # of a process that was killed before it named them
            if published is None or weights.name > published.folder.name:
                remove(weights)

    def fill(self, wanted: Wanted) -> Collected:
        if not wanted.groups:
            return Collected()
        numbers, skipped = self._wait(wanted.groups)
        samples = self._samples(numbers)
        self.store.take(self.run, wanted.step, numbers)
        self.step = wanted.step
        tokens = sum(int(s.action.sum()) for s in samples if s.action is not None)
        failed = sum(s.reward is None for s in samples)
        ids = self.store.by_origin(ledger_of(self.run), numbers)
        return Collected(tuple(ids), failed, tokens, too_stale=skipped, failed_requests=None)

    def publish(self, learner: Learner) -> None:
        """Write the weights, then name them, so that a collector never loads incomplete ones."""
        self.version = learner.version
        folder = self.weights / f"v{learner.version:08d}"
        if not folder.exists():
            learner.publish(folder)
        latest = {"version": learner.version, "phase": self.phase.name, "step": self.step}
        write(self.weights / LATEST, json.dumps(latest) + "\n")
        for old in sorted(self.weights.glob("v*"))[:-KEPT]:
            remove(old)

    def _wait(self, groups: int) -> tuple[list[int], int]:
        """The requests to train on, once there are so many, and how many responses were too stale."""
        seconds = self.config.source.wait_seconds
        deadline = time.monotonic() + seconds
        numbers: list[int] = []
        skipped = 0
        while len(numbers) < groups:
            before = len(numbers)
            numbers, stale = self._valid(self.store.ready(self.run, groups))
            skipped += stale
            if len(numbers) > before or stale:
                deadline = time.monotonic() + seconds
            self.activity.stage("waiting for samples", len(numbers), groups)
            self.activity.check()
            if len(numbers) < groups and time.monotonic() > deadline:
                raise Refused(
                    f"source.wait_seconds: waited {seconds:g} s for {groups} prompts with "
                    f"{self.config.sampler.n} scored responses each, got {len(numbers)}. What to do: start a "
                    f"collector (agro collect {self.weights.parent}), or find out why the running ones make "
                    "no progress; then continue with --resume"
                )
            if len(numbers) < groups:
                time.sleep(POLL_SECONDS)
        return numbers, skipped

    def _valid(self, numbers: list[int]) -> tuple[list[int], int]:
        """The requests at most `data.max_age` optimizer steps behind; skips and counts the others."""
        most = self.config.data.max_age
        if most is None:
            return numbers, 0
        valid, stale, responses = [], [], 0
        for number in numbers:
            samples = self._samples([number])
            oldest = min((s.oldest_version for s in samples), default=self.version)
            if self.version - oldest > most:
                stale.append(number)
                responses += len(samples)
            else:
                valid.append(number)
        self.store.take(self.run, SKIPPED, stale)
        return valid, responses

    def _samples(self, numbers: Collection[int]) -> list[Sample]:
        """What the requests brought; damaged samples are for the draw to report."""
        ids = self.store.by_origin(ledger_of(self.run), list(numbers))
        return list(self.store.samples(ids=ids, on_damaged=lambda i: None))


SKIPPED = 0  # the step of requests that no step trains on
LATEST = "latest.json"


def ahead(config: RunConfig) -> int:
    """Prompts that may wait for training: a step's, and more as `data.max_age` allows (a step's if unset)."""
    steps = 1 if config.data.max_age is None else config.data.max_age // config.train.updates
    return config.train.groups * (1 + steps)


@dataclass(frozen=True)
class Published:
    """The newest weights of a run."""

    version: int
    phase: str
    folder: Path
    step: int = 0  # of the run, the last one that was trained on
    ended: bool = False

    @classmethod
    def read(cls, run: Path) -> Published | None:
        """None where nothing was published yet."""
        file = run / "weights" / LATEST
        if not file.exists():
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content["version"]
        folder = run / "weights" / f"v{version:08d}"
        return cls(version, content["phase"], folder, content["step"], content.get("ended", False))


def end(run: Path) -> None:
    """Let collectors know that the run has ended."""
    file = run / "weights" / LATEST
    if file.exists():
        content = json.loads(file.read_text(encoding="utf-8"))
        write(file, json.dumps({**content, "ended": True}) + "\n")
