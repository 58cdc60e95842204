"""Sources of a step's fresh samples: this process, or collectors.

`CollectorSource` is the trainer's side of sampling in other processes; `agro.place.collector` is the other
side. The trainer publishes its weights after each step (`agro.train.publications`). A collector loads them,
claims prompts in the store, samples, scores, and marks the prompts done, so that sampling and training
overlap. Collectors are at most `ahead` prompts ahead of training, which bounds their samples' staleness.

Either side may be killed or stopped. It counts as dead once it hasn't renewed its lease in the store for
`source.lease_seconds`. Another collector takes over a dead one's claim and samples only the missing
responses. The store keeps each response of a claim once, with its first reward, so a collector that was
presumed dead but continues changes nothing. What a killed trainer took since its last commit becomes ready
again. Responses that are too stale are sampled again, under the same numbers.

With `source.sync_every` the sampling weights in this process lag by up to that many optimizer steps. With
`source.sync_from` they are one of the last such copies, chosen at random by a function of seed and version,
so that a resume chooses the same. With `policy.reference = "sampler"` they are the reference too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from agro.config import RunConfig
from agro.errors import Refused
from agro.io import plugins
from agro.io.files import remove
from agro.models.encoding import Encoder, InvalidSample
from agro.models.published import load_published
from agro.rewards import Reward
from agro.rewards.function import RESERVED
from agro.rollout import Activity, CollectResult, Rollout, Task, collect
from agro.rollout.rollout import embedded
from agro.runs.folder import Run
from agro.store import At, Store
from agro.store.draw_rules import pick_likely
from agro.store.sample_rows import ledger_of
from agro.store.samples import LedgerSample
from agro.train.collate import TrackedValues
from agro.train.learner import Learner
from agro.train.phases import Phase, derive, read_position
from agro.train.publications import ProcessReport, Publications, PublishedWeights
from agro.types import Prompt


@dataclass(frozen=True)
class FillRequest:
    """A request for a step's fresh groups."""

    step: int  # the run's step, from 1
    groups: int
    first: int  # index of the first prompt in the order of the phase
    before: int = 0  # number of groups already sampled for this step
    joining: Sequence[Prompt] = ()  # prompts of stored or earlier groups that get `n` more responses each
    n: int = 0


class Source(Protocol):
    """Provides fresh samples. `agro.train.around` declares the other abilities of sources."""

    def fill(self, wanted: FillRequest) -> CollectResult:
        """Return the ids of the requested groups' samples once the store has them.

        With `joining` prompts the source samples to these only.
        """
        ...

    def publish(self, learner: Learner) -> None:
        """Use the learner's current weights for the samples that follow."""
        ...


class PromptOrder:
    """An endless sequence of epochs over the prompts, each in an order that depends on seed and epoch."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts, self.seed = prompts, seed
        self._epoch, self._order = -1, list(prompts)

    def take(self, start: int, count: int) -> list[Prompt]:
        """Return `count` prompts, from index `start` on."""
        prompts: list[Prompt] = []
        while len(prompts) < count:
            epoch, offset = divmod(start + len(prompts), len(self.prompts))
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = sorted(self.prompts, key=lambda p: (derive(self.seed, epoch, p.id), p.id))
            prompts += self._order[offset : offset + count - len(prompts)]
        return prompts


class UncertainOrder(PromptOrder):
    """Prefers prompts of uncertain value (SPO, arXiv 2509.13232), see `data.prompt_order`."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, candidates: int, values: TrackedValues) -> None:
        """`candidates`: number of candidates per selected prompt, 2 or more; `values`: those of the run."""
        super().__init__(prompts, seed)
        self.candidates, self.values = candidates, values

    def take(self, start: int, count: int) -> list[Prompt]:
        """Raises `Refused` for rewards outside 0 to 1, and if there are too few prompts."""
        if count > len(self.prompts):
            raise Refused(
                f'data.prompt_order = "uncertain" takes {count} different prompts at a step, and there are '
                f"{len(self.prompts)}. What to do: lower train.groups"
            )
        prompts = {p.id: p for p in super().take(start * self.candidates, count * self.candidates)}
        log_weight = {}
        stored = self.values.store.experience.rewards(self.values.run, prompts, without=())
        for name, rewards in stored.items():
            if outside := [reward for _, reward in rewards if not 0 <= reward <= 1]:
                raise Refused(
                    f'data.prompt_order = "uncertain" needs rewards from 0 to 1, but a response to prompt '
                    f'{name} has {outside[0]:g}. What to do: rescale the reward, or set "epochs"'
                )
            value = self.values.value(rewards, 0.5)
            log_weight[name] = math.log(math.sqrt(value * (1 - value)) + 0.05)
        point = At(self.values.run, start, self.seed, self.values.learner.version)
        return [prompts[name] for name in pick_likely(log_weight, count, point)]


@dataclass
class InlineSource:
    """Samples in this process, step by step."""

    config: RunConfig
    rollout: Rollout
    prompts: PromptOrder
    reward: Reward | None
    store: Store
    run: str  # its id
    activity: Activity
    weights: Path | None = None  # folder of published versions; None if the engine is in this process

    def fill(self, wanted: FillRequest) -> CollectResult:
        config, sampler, kind = self.config, self.config.sampler, "sample"
        if wanted.joining:
            sampler, kind = sampler.model_copy(update={"n": wanted.n}), "complete"
        elif not wanted.groups:
            return CollectResult()
        prompts = wanted.joining or self.prompts.take(wanted.first, wanted.groups)
        numbers = tuple(range(wanted.before, wanted.before + len(prompts)))
        seed = derive(config.train.seed, kind, wanted.step)
        task = Task(self.run, wanted.step, seed, numbers, max_failed=config.reward.max_failed)
        return collect(self.rollout, prompts, sampler, self.store, task, self.reward, self.activity)

    def publish(self, learner: Learner) -> None:
        engine = self.rollout.engine
        if engine.version == learner.version:
            return
        if self.weights is None:
            learner.show()
            engine.version = learner.version
            return
        folder = self.weights / f"v{learner.version:08d}"  # servers cache weights by path
        learner.publish(folder)
        with plugins.errors_of(engine.load, f"engine {type(engine).__name__}: load"):
            engine.load(folder, learner.version)
        for other in self.weights.glob("v*"):
            if other != folder:
                remove(other)


def without_hint(prompt: Prompt) -> Prompt:
    """The prompt without its `hint` column: a sample's `meta.hint` marks that the model read the hint."""
    columns = {name: value for name, value in prompt.columns.items() if name != "hint"}
    return Prompt(prompt.text, prompt.id, columns)


def stored_prompt(store: Store, prompt_id: str) -> Prompt | None:
    """The prompt of a group, with the columns of its first intact record; None if none is intact."""
    for sample in store.samples(prompt_id=prompt_id, skip_damaged=True):
        columns = {name: value for name, value in sample.meta.items() if name not in RESERVED}
        return Prompt(sample.prompt, sample.prompt_id, columns)
    return None


def can_be_asked(prompt: Prompt, encoder: Encoder) -> bool:
    """Whether a prompt can be encoded, and leaves room for a response."""
    try:
        encoder.checked_prompt(prompt)
    except InvalidSample:
        return False
    return True


def joined(parts: Sequence[CollectResult], ids: tuple[int, ...]) -> CollectResult:
    """Combine the results of several calls, of which a step trains on `ids`."""
    measured = dict(parts[-1].measured)
    if len(parts) > 1:  # counts add up; shares don't
        failed = [part.measured.get("requests_failed") for part in parts]
        measured["requests_failed"] = None if None in failed else sum(failed)
        measured.pop("draft_accepted", None)
    return CollectResult(
        ids,
        failed=sum(part.failed for part in parts),
        tokens=sum(part.tokens for part in parts),
        too_stale=sum(part.too_stale for part in parts),
        measured=measured,
    )


@dataclass(frozen=True)
class Copies:
    """Weights that a run keeps in addition to its checkpoints, in the folders RUN/weights/`name`/vVERSION.

    A copy stays until no checkpoint needs it, so that a run resumed from any checkpoint has the same copies.
    """

    run: Run
    store: Store
    name: str
    in_use: int = 1  # number of most recent copies in use at a time

    def folder(self, version: int) -> Path:
        return self.run.folder / "weights" / self.name / f"v{version:08d}"

    def versions(self) -> list[int]:
        """All versions, ascending."""
        return sorted(int(folder.name[1:]) for folder in self.folder(0).parent.glob("v*"))

    def until(self, version: int) -> list[int]:
        """The versions up to `version`. Removes later ones, which belong to lost steps."""
        for later in self.versions():
            if later > version:
                remove(self.folder(later))
        return self.versions()

    def prune(self, current: int) -> None:
        """Remove all copies but those in use at version `current` or at the version of a checkpoint."""
        folders = [self.run.checkpoint(commit.step) for commit in self.store.ledger.commits(self.run.id)]
        starts = [read_position(folder, "").version for folder in folders if folder.is_dir()]
        copies, needed = self.versions(), set[int]()
        for start in (*starts, current):
            needed |= set([version for version in copies if version <= start][-self.in_use :])
        for version in set(copies) - needed:
            remove(self.folder(version))


class LaggingSource:
    """Samples in this process with a copy of the policy, whose weights are updated at intervals.

    Its samples have the version and the log-probs of the copy, which is in RUN/weights/synced.
    """

    def __init__(self, current: InlineSource, folder: Run) -> None:
        """`current`: the source without a lag; monitors use its engine."""
        self.current, self.config = current, current.config
        self.copies = Copies(folder, current.store, "synced", self.config.source.sync_from)
        self.lagging: InlineSource | None = None
        self.version = -1  # of the sampling weights; -1: none yet

    def fill(self, wanted: FillRequest) -> CollectResult:
        assert self.lagging is not None, "weights are published before a step"
        filled = self.lagging.fill(wanted)
        return replace(filled, measured={**filled.measured, "sampler_version": self.version})

    def publish(self, learner: Learner) -> None:
        """Copy the policy if the newest copy is `source.sync_every` steps old. Sample with one of the last
        `source.sync_from` copies, the same one until the next copy."""
        self.current.publish(learner)
        copies = self.copies.until(learner.version)
        if not copies or learner.version - copies[-1] >= self.config.source.sync_every:
            learner.publish(self.copies.folder(learner.version))
            copies.append(learner.version)
        recent = copies[-self.copies.in_use :]
        version = recent[derive(self.config.train.seed, "sampler", copies[-1]) % len(recent)]
        if version == self.version:
            return
        self.version, folder = version, self.copies.folder(version)
        if self.lagging is None:
            rollout = copy(self.current.rollout)
            policy = load_published(self.config.policy, folder)
            rollout.engine = embedded(policy, version, fused=self.config.engine.fused)
            self.lagging = replace(self.current, rollout=rollout, weights=None)
        else:
            self.lagging.rollout.engine.load(folder, version)
        if self.config.policy.reference == "sampler":
            learner.refer(folder)
        self.copies.prune(learner.version)


POLL_SECONDS = 0.1
LOOK_SECONDS = 5.0  # between checks that the published weights still exist


def ahead(config: RunConfig) -> int:
    """Number of prompts that may wait for training: one step's, plus what `data.max_age` allows. If that is
    unset it is one more step's, and a collector continues while fewer than a step's prompts are done."""
    steps = 1 if config.data.max_age is None else config.data.max_age // config.train.updates
    return config.train.groups * (1 + steps)


@dataclass(eq=False)
class CollectorSource:
    """Waits until collectors have added a step's fresh groups."""

    phase: Phase
    store: Store
    run: str  # its id
    publications: Publications
    activity: Activity
    step: int  # the run's last completed step, which tells collectors how far ahead they are
    process: ProcessReport = field(default_factory=lambda: ProcessReport("trainer", "trainer"))
    learner: Learner | None = None  # the one that published last

    def publish(self, learner: Learner) -> None:
        """Publish the step, and the weights unless `source.sync_every` makes collectors keep older ones."""
        self.learner, version = learner, learner.version
        newest = self.publications.newest()
        is_due = newest is None or not 0 <= version - newest.version < self.phase.config.source.sync_every
        if newest is not None and not is_due and self.publications.has(newest):
            version = newest.version
        self.publications.publish(PublishedWeights(version, self.phase.name, self.step), learner.publish)
        self.publications.report(replace(self.process, version=learner.version, step=self.step))

    def fill(self, wanted: FillRequest) -> CollectResult:
        """Wait for the step's requests and their responses, and take them.

        Responses that are too stale are sampled again with newer weights, so a killed trainer's lost work
        changes neither the prompts nor their order.
        """
        if not wanted.groups:
            return CollectResult()
        config, requests = self.phase.config, self.store.requests
        max_age, seconds = config.data.max_age, config.source.wait_seconds
        version = 0 if self.learner is None else self.learner.version
        deadline = time.monotonic() + seconds
        next_look = time.monotonic() + LOOK_SECONDS
        samples: list[LedgerSample] = []
        valid = set[int]()  # numbers of requests
        skipped = 0
        while True:
            numbers = requests.ready(self.run, wanted.groups)
            if not valid.issuperset(numbers):
                deadline = time.monotonic() + seconds
                ready = self.store.experience.in_ledger(ledger_of(self.run), numbers)
                stale = set[int]()
                if max_age is not None:
                    stale = {sample.number for sample in ready if sample.version < version - max_age}
                samples = [sample for sample in ready if sample.number not in stale]
                skipped += len(ready) - len(samples)
                valid = set(numbers) - stale
                if stale:
                    requests.reopen(self.run, sorted(stale))
            self.activity.stage("waiting for samples", len(valid), wanted.groups)
            self.activity.check()
            if len(valid) >= wanted.groups:
                break
            if time.monotonic() > deadline:
                raise Refused(
                    f"source.wait_seconds: waited {seconds:g} s for {wanted.groups} prompts with "
                    f"{config.sampler.n} scored responses each, got {len(valid)}. What to do: start a "
                    f"collector (agro collect {self.publications}), or find out why the running ones make "
                    "no progress; then continue with --resume"
                )
            if self.learner is not None and time.monotonic() > next_look:
                next_look = time.monotonic() + LOOK_SECONDS
                newest = self.publications.newest()
                if newest is None or not self.publications.has(newest):
                    self.publish(self.learner)  # a database loses them if its server crashes
            time.sleep(POLL_SECONDS)
        requests.take(self.run, wanted.step, sorted(valid))
        self.step = wanted.step
        return CollectResult(
            tuple(sample.id for sample in samples),
            failed=sum(not sample.has_reward for sample in samples),
            tokens=sum(sample.actions for sample in samples if sample.actions is not None),
            too_stale=skipped,
        )
