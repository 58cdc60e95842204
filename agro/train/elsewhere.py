"""Sampling in other processes, the trainer's side. The other one is `agro.place.collector`.

The trainer publishes its weights after each step (`agro.train.publications`). A collector loads them, claims
prompts in the store, samples, scores, and marks the prompts done, so that sampling and training overlap.
Collectors are at most `ahead` prompts ahead of training, which bounds the staleness of their samples.

Either side may be killed, or stopped. It counts as dead when it hasn't renewed its lease in the store for
`source.lease_seconds`. The claim of a dead collector goes to the next one, which samples only the missing
responses; the store keeps each response of a claim once, and its first reward, so that a collector that goes
on after all changes nothing. What a killed trainer took since its last commit is ready again. Responses that
are too stale are made again, under their numbers.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from agro.config import RunConfig
from agro.errors import Refused
from agro.rollout import Activity, CollectResult
from agro.store import Store
from agro.store.records import LedgerSample
from agro.store.sample_rows import ledger_of
from agro.train.learner import Learner
from agro.train.phases import Phase
from agro.train.publications import ProcessReport, Publications, PublishedWeights
from agro.train.source import FillRequest

POLL_SECONDS = 0.1
LOOK_SECONDS = 5.0


def ahead(config: RunConfig) -> int:
    """Prompts that may wait for training: a step's, and more as `data.max_age` allows (a step's if unset)."""
    steps = 1 if config.data.max_age is None else config.data.max_age // config.train.updates
    return config.train.groups * (1 + steps)


class CollectorSource:
    """Waits until collectors have added the fresh groups of a step."""

    def __init__(
        self,
        phase: Phase,
        store: Store,
        run: str,
        publications: Publications,
        activity: Activity,
        step: int = 0,
    ) -> None:
        """`run`: its id. `step`: the last one that it has made, by which collectors know how far they are
        ahead."""
        self.phase, self.config, self.store, self.run = phase, phase.config, store, run
        self.publications, self.activity = publications, activity
        self.version = 0  # of the learner's weights
        self.step = step  # of the run, the last one that was filled
        self.process = ProcessReport("trainer", "trainer")
        self._learner: Learner | None = None
        self._looked = time.monotonic()  # whether the published weights are still there

    def fill(self, wanted: FillRequest) -> CollectResult:
        if not wanted.groups:
            return CollectResult()
        numbers, samples, skipped = self._wait(wanted.groups)
        self.store.requests.take(self.run, wanted.step, numbers)
        self.step = wanted.step
        failed = sum(not sample.has_reward for sample in samples)
        tokens = sum(sample.actions for sample in samples)
        ids = tuple(sample.id for sample in samples)
        return CollectResult(ids, failed, tokens, too_stale=skipped, failed_requests=None)

    def publish(self, learner: Learner) -> None:
        """Publish weights, unless collectors are to keep those before (`source.sync_every`), and the step."""
        self.version = learner.version
        newest = self.publications.newest()
        version = learner.version
        is_due = newest is None or not 0 <= version - newest.version < self.config.source.sync_every
        if newest is not None and not is_due and self.publications.has(newest):
            version = newest.version
        self._learner = learner
        weights = PublishedWeights(version, self.phase.name, self.step)
        self.publications.publish(weights, learner.publish)
        self.publications.report(replace(self.process, version=self.version, step=self.step))

    def _wait(self, groups: int) -> tuple[list[int], list[LedgerSample], int]:
        """So many requests and their responses, once these are there, and how many others were too stale.

        Those too stale are sampled again, with newer weights, so that what was lost with a killed trainer
        changes neither the prompts nor their order.
        """
        seconds, max_age = self.config.source.wait_seconds, self.config.data.max_age
        oldest = -math.inf if max_age is None else self.version - max_age
        deadline = time.monotonic() + seconds
        samples: list[LedgerSample] = []
        valid = set[int]()  # numbers of requests
        skipped = 0
        while len(valid) < groups:
            numbers = self.store.requests.ready(self.run, groups)
            if not valid.issuperset(numbers):
                deadline = time.monotonic() + seconds
                samples = self.store.experience.in_ledger(ledger_of(self.run), numbers)
                stale = [sample.number for sample in samples if sample.version < oldest]
                skipped += sum(sample.number in stale for sample in samples)
                samples = [sample for sample in samples if sample.number not in stale]
                valid = set(numbers) - set(stale)
                if stale:
                    self.store.requests.reopen(self.run, sorted(set(stale)))
            self.activity.stage("waiting for samples", len(valid), groups)
            self.activity.check()
            if len(valid) < groups and time.monotonic() > deadline:
                raise Refused(
                    f"source.wait_seconds: waited {seconds:g} s for {groups} prompts with "
                    f"{self.config.sampler.n} scored responses each, got {len(valid)}. What to do: start a "
                    f"collector (agro collect {self.publications}), or find out why the running ones make "
                    "no progress; then continue with --resume"
                )
            if len(valid) < groups:
                self._publish_again()
                time.sleep(POLL_SECONDS)
        return sorted(valid), samples, skipped

    def _publish_again(self) -> None:
        """Publish what a database lost where its server crashed, for which collectors wait."""
        if self._learner is None or time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        newest = self.publications.newest()
        if newest is None or not self.publications.has(newest):
            self.publish(self._learner)
