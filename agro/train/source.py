"""Where the fresh samples of a step come from: this process, or collectors.

`CollectorSource` is the trainer's side of sampling in other processes; the other one is
`agro.place.collector`. The trainer publishes its weights after each step (`agro.train.publications`). A
collector loads them, claims prompts in the store, samples, scores, and marks the prompts done, so that
sampling and training overlap.
Collectors are at most `ahead` prompts ahead of training, which bounds the staleness of their samples.

Either side may be killed, or stopped. It counts as dead when it hasn't renewed its lease in the store for
`source.lease_seconds`. The claim of a dead collector goes to the next one, which samples only the missing
responses; the store keeps each response of a claim once, and its first reward, so that a collector that goes
on after all changes nothing. What a killed trainer took since its last commit is ready again. Responses that
are too stale are made again, under their numbers.

With `source.sync_every` the weights that sample in this process are those of up to so many optimizer steps
ago, with `source.sync_from` one of the last such copies, drawn at random: a function of seed and version,
also after a resume. With `policy.reference = "sampler"` they are the reference too.
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
    """The fresh groups of a step."""

    step: int  # of the run, from 1
    groups: int
    first: int  # number of the first prompt, in the order of the phase
    before: int = 0  # groups that were sampled for this step already
    joining: Sequence[Prompt] = ()  # that get `n` responses: of stored groups, or of groups asked again
    n: int = 0


class Source(Protocol):
    """Where fresh samples come from. What else one can do is declared in `agro.train.around`."""

    def fill(self, wanted: FillRequest) -> CollectResult:
        """Return once the store has the requested groups, with the ids of their samples.

        With `joining` prompts it samples to these, and to no others.
        """
        ...

    def publish(self, learner: Learner) -> None:
        """Generate later samples with the learner's current weights."""
        ...


class PromptOrder:
    """An endless sequence of epochs over the prompts, each in an order that depends on seed and epoch."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts, self.seed = prompts, seed
        self._epoch, self._order = -1, list(prompts)

    def take(self, start: int, count: int) -> list[Prompt]:
        """Number `start` and the following ones."""
        prompts: list[Prompt] = []
        while len(prompts) < count:
            epoch, offset = divmod(start + len(prompts), len(self.prompts))
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = sorted(self.prompts, key=lambda p: (derive(self.seed, epoch, p.id), p.id))
            prompts += self._order[offset : offset + count - len(prompts)]
        return prompts


class UncertainOrder(PromptOrder):
    """Prompts of uncertain value first (SPO, arXiv 2509.13232), see `data.prompt_order`."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, candidates: int, values: TrackedValues) -> None:
        """`candidates`: for each prompt that is taken, 2 or more; `values`: of the run."""
        super().__init__(prompts, seed)
        self.candidates, self.values = candidates, values

    def take(self, start: int, count: int) -> list[Prompt]:
        """Raises `Refused` for rewards that aren't from 0 to 1, and where there are too few prompts."""
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
        at = At(self.values.run, start, self.seed, self.values.learner.version)
        return [prompts[name] for name in pick_likely(log_weight, count, at)]


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
    weights: Path | None = None  # folder of published versions; None where the engine is in this process

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
        folder = self.weights / f"v{learner.version:08d}"  # servers keep what they know of a path
        learner.publish(folder)
        with plugins.errors_of(engine.load, f"engine {type(engine).__name__}: load"):
            engine.load(folder, learner.version)
        for other in self.weights.glob("v*"):
            if other != folder:
                remove(other)


def without_hint(prompt: Prompt) -> Prompt:
    """The prompt without a column `hint`: `meta.hint` of a sample says that a hint was read."""
    columns = {name: value for name, value in prompt.columns.items() if name != "hint"}
    return Prompt(prompt.text, prompt.id, columns)


def stored_prompt(store: Store, prompt_id: str) -> Prompt | None:
    """The prompt of a group, with the columns of its first intact record; None where none is intact."""
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
    """What several calls added, of which a step trains on `ids`."""
    measured = dict(parts[-1].measured)
    if len(parts) > 1:  # what counts over them; a share of each can't be added
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
        folders = [self.run.checkpoint(commit.step) for commit in self.store.ledger.commits(self.run.id)]
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
        self.current, self.config = current, current.config
        self.copies = Copies(folder, current.store, "synced", self.config.source.sync_from)
        self.lagging: InlineSource | None = None
        self.version = -1  # of the weights that sample; -1: there are none yet

    def fill(self, wanted: FillRequest) -> CollectResult:
        assert self.lagging is not None, "weights are published before a step"
        filled = self.lagging.fill(wanted)
        return replace(filled, measured={**filled.measured, "sampler_version": self.version})

    def publish(self, learner: Learner) -> None:
        """Copy the policy where the newest copy is `source.sync_every` steps old, and choose one of the last
        `source.sync_from`: the same from one new copy to the next."""
        self.current.publish(learner)
        copies = self.copies.until(learner.version)
        if not copies or learner.version - copies[-1] >= self.config.source.sync_every:
            learner.publish(self.copies.folder(learner.version))
            copies.append(learner.version)
        last = copies[-self.copies.last :]
        version = last[derive(self.config.train.seed, "sampler", copies[-1]) % len(last)]
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
LOOK_SECONDS = 5.0  # between two looks whether the published weights are still there


def ahead(config: RunConfig) -> int:
    """Prompts that may wait for training: a step's, and more as `data.max_age` allows (a step's if unset, and
    then a collector goes on as long as fewer than a step's are done)."""
    steps = 1 if config.data.max_age is None else config.data.max_age // config.train.updates
    return config.train.groups * (1 + steps)


@dataclass(eq=False)
class CollectorSource:
    """Waits until collectors have added the fresh groups of a step."""

    phase: Phase
    store: Store
    run: str  # its id
    publications: Publications
    activity: Activity
    step: int  # the last one that the run has made, by which collectors know how far they are ahead
    process: ProcessReport = field(default_factory=lambda: ProcessReport("trainer", "trainer"))
    learner: Learner | None = None  # the one that published last

    def publish(self, learner: Learner) -> None:
        """Publish weights, unless collectors are to keep those before (`source.sync_every`), and the step."""
        self.learner, version = learner, learner.version
        newest = self.publications.newest()
        is_due = newest is None or not 0 <= version - newest.version < self.phase.config.source.sync_every
        if newest is not None and not is_due and self.publications.has(newest):
            version = newest.version
        self.publications.publish(PublishedWeights(version, self.phase.name, self.step), learner.publish)
        self.publications.report(replace(self.process, version=learner.version, step=self.step))

    def fill(self, wanted: FillRequest) -> CollectResult:
        """Wait for so many requests and their responses, and take them.

        Responses that are too stale are made again, with newer weights, so that what was lost with a killed
        trainer changes neither the prompts nor their order.
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
                    self.publish(self.learner)  # a database lost them where its server crashed
            time.sleep(POLL_SECONDS)
        requests.take(self.run, wanted.step, sorted(valid))
        self.step = wanted.step
        return CollectResult(
            tuple(sample.id for sample in samples),
            failed=sum(not sample.has_reward for sample in samples),
            tokens=sum(sample.actions for sample in samples if sample.actions is not None),
            too_stale=skipped,
        )
