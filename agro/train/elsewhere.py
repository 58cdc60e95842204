"""Sampling in other processes, the trainer's side. The other one is `agro.train.elsewhere`.

The trainer writes its weights into RUN/weights/ after each step, and names the newest in
RUN/weights/latest.json. A collector loads them, claims prompts in the store, samples, scores, and marks the
prompts done, so that sampling and training overlap. Collectors are at most `ahead` prompts ahead of training,
which bounds the staleness of their samples.

Either side may be killed. The claim of a dead collector goes to the next one, which samples only the missing
responses; the store keeps each response of a claim once. What a killed trainer took since its last commit is
ready again.

The collector that `agro collect RUN` runs: it samples and scores for a run that another process trains.

See `agro.train.elsewhere` for what the two share.
"""

from __future__ import annotations

import fcntl
import json
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from agro.config import RunConfig, check_texts
from agro.errors import Refused
from agro.io.files import remove, write
from agro.models.policy import Policy
from agro.rewards import Reward, load_reward
from agro.rollout import Activity, CollectResult, Rollout, Task, collect
from agro.rollout.engines import Engine
from agro.rollout.rollout import EpisodeReward, load_engine, load_rollout
from agro.store import Store
from agro.store.sample_rows import ledger_of
from agro.train.abilities import SourceCapability
from agro.train.collate import recording
from agro.train.fingerprints import of_prompts_and_scoring
from agro.train.inputs import configured_prompts, valid_prompts
from agro.train.learner import Learner
from agro.train.phases import Phase, derive
from agro.train.source import FillRequest, PromptOrder
from agro.types import Sample

POLL_SECONDS = 0.1
KEPT = 3  # published weights: a collector may still be loading the ones before the newest


class CollectorSource:
    """Waits until collectors have added the fresh groups of a step."""

    can: ClassVar[frozenset[SourceCapability]] = frozenset()

    def __init__(self, phase: Phase, store: Store, run: str, folder: Path, activity: Activity) -> None:
        """`folder`: of the run, into whose weights/ the learner publishes."""
        self.phase, self.config, self.store, self.run = phase, phase.config, store, run
        self.weights, self.activity = folder / "weights", activity
        self.version = 0  # of the learner's weights
        self.step = 0  # of the run, the last one that was filled
        published = PublishedWeights.read(folder)
        for weights in self.weights.glob("v*"):  # of a process that was killed before it named them
            if published is None or weights.name > published.folder.name:
                remove(weights)

    def fill(self, wanted: FillRequest) -> CollectResult:
        if not wanted.groups:
            return CollectResult()
        numbers, skipped = self._wait(wanted.groups)
        samples = self._samples(numbers)
        self.store.requests.take(self.run, wanted.step, numbers)
        self.step = wanted.step
        tokens = sum(int(s.action.sum()) for s in samples if s.action is not None)
        failed = sum(s.reward is None for s in samples)
        ids = self.store.experience.find_in_ledger(ledger_of(self.run), numbers)
        return CollectResult(tuple(ids), failed, tokens, too_stale=skipped, failed_requests=None)

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
            previous = len(numbers)
            numbers, stale = self._valid(self.store.requests.ready(self.run, groups))
            skipped += stale
            if len(numbers) > previous or stale:
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
        max_age = self.config.data.max_age
        if max_age is None:
            return numbers, 0
        valid, stale, responses = [], [], 0
        for number in numbers:
            samples = self._samples([number])
            oldest = min((s.oldest_version for s in samples), default=self.version)
            if self.version - oldest > max_age:
                stale.append(number)
                responses += len(samples)
            else:
                valid.append(number)
        self.store.requests.take(self.run, SKIPPED, stale)
        return valid, responses

    def _samples(self, numbers: Collection[int]) -> list[Sample]:
        """What the requests brought; damaged samples are for the draw to report."""
        ids = self.store.experience.find_in_ledger(ledger_of(self.run), list(numbers))
        return list(self.store.samples(ids=ids, skip_damaged=True))


SKIPPED = 0  # the step of requests that no step trains on
LATEST = "latest.json"


def ahead(config: RunConfig) -> int:
    """Prompts that may wait for training: a step's, and more as `data.max_age` allows (a step's if unset)."""
    steps = 1 if config.data.max_age is None else config.data.max_age // config.train.updates
    return config.train.groups * (1 + steps)


@dataclass(frozen=True)
class PublishedWeights:
    """The newest weights of a run."""

    version: int
    phase: str
    folder: Path
    step: int = 0  # of the run, the last one that was trained on
    ended: bool = False

    @classmethod
    def read(cls, run: Path) -> PublishedWeights | None:
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


class Collector:
    """Samples and scores for a run that another process trains."""

    def __init__(self, run: Path, activity: Activity, say: Callable[[str], None]) -> None:
        """Raises `Refused` where `run` isn't a run with source.kind = "elsewhere"."""
        self.run, self.activity, self.say = run, activity, say
        if not (run / "config.json").exists():
            raise Refused(
                f"{run}: expected the folder of a run (with config.json); start it with agro train first"
            )
        self.config = RunConfig.load(run / "config.json")
        check_texts(self.config.model_dump())
        record = json.loads((run / "config.json").read_text(encoding="utf-8"))
        self.id = str(record["run"])
        if self.config.source.kind != "elsewhere":
            raise Refused(
                f"{run}: expected a run with source.kind = elsewhere, got {self.config.source.kind}, which "
                "samples in the trainer's process"
            )
        if not self.config.data.prompts:
            raise Refused(f"{run}: data.prompts isn't set, so there is nothing to sample from")
        inputs = record["inputs"]
        for key, digest in of_prompts_and_scoring(self.config, {}).items():
            if inputs.get(key, digest) != digest:
                raise Refused(
                    f"{run}: what {key} names has changed since the run began. What to do: put it back, or "
                    f"start a new run; --resume --accept {key} lets the trainer, and then this, go on with it"
                )
        self.prompts, _ = configured_prompts(self.config.data, "prompts")
        self.name = uuid.uuid4().hex
        self.store_file = Path(self.config.data.store) if self.config.data.store else run / "store.db"

    def serve(self) -> int:
        """Collect until the run ends; returns the number of responses."""
        policy, published = self._load()
        self.prompts, _ = valid_prompts(self.prompts, policy.encoder, self.config.data, "prompts")
        responses = 0
        reward = EpisodeReward(load_reward(self.config.reward))
        with closing(reward), Store.open(self.store_file, create=False) as store, alive(self.run, self.name):
            engine = load_engine(self.config.engine, policy, self.say, published.version)
            published = self._renew(engine, published)
            deadline = self._deadline()
            phases = {phase.name: phase for phase in Phase.all(self.config)}
            while not published.ended:
                config = recording(list(phases.values()), phases[published.phase])
                numbers = self._claim(store, config, published.step)
                if numbers:
                    rollout = load_rollout(policy.encoder, engine, config.environment)
                    responses += self._collect(rollout, config, published, store, reward, numbers)
                    deadline = self._deadline()
                elif is_locked(self.run / ".lock"):  # by the trainer, which is at work
                    deadline = self._deadline()
                    time.sleep(POLL_SECONDS)
                elif time.monotonic() > deadline:
                    raise Refused(
                        "source.wait_seconds: the trainer hasn't run for "
                        f"{self.config.source.wait_seconds:g} s. What to do: resume it (agro train … "
                        "--resume), then run agro collect again"
                    )
                else:
                    time.sleep(POLL_SECONDS)
                self.activity.check()
                published = self._renew(engine, published)
        return responses

    def _collect(
        self,
        rollout: Rollout,
        config: RunConfig,
        published: PublishedWeights,
        store: Store,
        reward: Reward,
        numbers: list[int],
    ) -> int:
        """Sample and score the claimed prompts; returns the number of their responses."""
        order = PromptOrder(self.prompts, derive(config.train.seed, "prompts", published.phase))
        prompts = [order.take(number, 1)[0] for number in numbers]
        task = Task(
            run=self.id,
            seed=derive(config.train.seed, "collect"),
            numbers=tuple(numbers),
            ledger=ledger_of(self.id),
            max_failed=config.reward.max_failed,
        )
        collected = collect(rollout, prompts, config.sampler, store, task, reward, self.activity)
        store.requests.finish(self.id, numbers)
        self.say(f"{len(collected.ids)} responses to {len(numbers)} prompts at version {published.version}")
        return len(collected.ids)

    def _deadline(self) -> float:
        return time.monotonic() + self.config.source.wait_seconds

    def _claim(self, store: Store, config: RunConfig, trained: int) -> list[int]:
        """What to sample next: as many prompts as the engine decodes at once, as far as training allows."""
        at_once = max(1, config.sampler.batch // config.sampler.n)
        return store.requests.claim(
            self.id,
            self.name,
            maximum=min(at_once, config.train.groups),
            ahead=ahead(config) - store.requests.backlog(self.id, trained),
            dead=[name for name in store.requests.collectors(self.id) if not is_alive(self.run, name)],
        )

    def _wait(self) -> PublishedWeights:
        """The first weights that the trainer published."""
        seconds = self.config.source.wait_seconds
        deadline = time.monotonic() + seconds
        while True:
            published = PublishedWeights.read(self.run)
            if published is not None:
                return published
            if time.monotonic() > deadline:
                raise Refused(
                    f"source.wait_seconds: waited {seconds:g} s for {self.run / 'weights' / LATEST}, which "
                    "the trainer writes. What to do: start it (agro train … --out RUN), then run agro "
                    "collect again"
                )
            self.activity.check()
            time.sleep(POLL_SECONDS)

    def _load(self) -> tuple[Policy, PublishedWeights]:
        """The published model, in a process of its own."""
        published = self._wait()
        while True:
            changes = {"model": str(published.folder), "new": None, "lora": None}
            try:
                return Policy.load(self.config.policy.model_copy(update=changes)), published
            except (Refused, OSError) as error:
                published = self._newer(published, error)

    def _newer(self, published: PublishedWeights, error: Exception) -> PublishedWeights:
        """Newer weights, published while older ones were being read; raises `error` where there are none."""
        newest = PublishedWeights.read(self.run)
        if newest is None or newest.version == published.version:
            raise error
        return newest

    def _renew(self, engine: Engine, published: PublishedWeights) -> PublishedWeights:
        """Load newer weights, where there are some."""
        newest = PublishedWeights.read(self.run)
        assert newest is not None
        while newest.version != engine.version:
            try:
                engine.load(newest.folder, newest.version)
            except (Refused, OSError) as error:
                newest = self._newer(newest, error)
        return newest


@contextmanager
def alive(run: Path, collector: str) -> Iterator[None]:
    """Make `is_alive` true for this collector while the process lives: the system releases its lock."""
    folder = run / "collectors"
    folder.mkdir(exist_ok=True)
    file = folder / f"{collector}.lock"
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def is_alive(run: Path, collector: str) -> bool:
    return is_locked(run / "collectors" / f"{collector}.lock")


def is_locked(file: Path) -> bool:
    """Whether a living process holds the lock of a file."""
    try:
        lock = file.open("r")
    except FileNotFoundError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
