"""`collect`: sample, append each response as it finishes, score. Every response of agro's own is made here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agro.config import Sampler
from agro.rewards import Reward, check_failures
from agro.rollout.rollout import Rollout
from agro.store import Origin, Store
from agro.types import Prompt, Sample

FLUSH_SECONDS = 0.1  # responses that finish within this time are stored together


class Activity(Protocol):
    """Reports what a process is at, and stops it between two pieces of work."""

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """`name` begins, or has come so far."""
        ...

    def check(self) -> None:
        """Raises `Interrupted` where a stop was asked for."""
        ...


class Quiet:
    """An `Activity` that nobody watches."""

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Nothing is shown."""

    def check(self) -> None:
        """Nothing stops it."""


@dataclass(frozen=True)
class Task:
    """What responses are made for."""

    run: str | None = None  # that they belong to
    step: int | None = None  # of the run, where they are made for one
    seed: int = 0
    numbers: tuple[int, ...] | None = None  # of the prompts among all that the run asks; 0 … unless given
    ledger: str = (
        ""  # under which each response is stored once: what another process finished isn't sampled again
    )
    max_failed: float = 1.0  # largest share of rewards that may fail


@dataclass(frozen=True)
class Collected:
    """What a call of `collect` brought into the store."""

    ids: tuple[int, ...] = ()  # by number of the response, not in the order of finishing
    failed: int = 0  # rewards that couldn't be computed
    tokens: int = 0  # sampled
    failed_requests: int = 0  # to the engine; each was asked again


def collect(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    sampler: Sampler,
    store: Store,
    task: Task,
    reward: Reward | None = None,
    activity: Activity | None = None,
) -> Collected:
    """`sampler.n` responses to each prompt, stored and, with a `reward`, scored.

    A response is appended, unscored, as soon as it finishes, or with the next one where less than `FLUSH_SECONDS` have passed
    since the last was. So a process that is killed keeps what finished before. Raises `Refused` where more than a share `task.max_failed` of the rewards fail; the responses stay in
    the store, their rewards unknown.
    """
    activity = activity or Quiet()
    failures = rollout.engine.failures
    samples = _sample(rollout, prompts, sampler, store, task, activity)
    samples.sort(key=lambda s: (s.meta["index"], s.id))
    failed = 0
    if reward is not None:
        activity.stage("scoring")
        failed = score(reward, samples, store, task.max_failed)
    tokens = sum(int(s.action.sum()) for s in samples if s.action is not None)
    ids = tuple(s.id for s in samples if s.id is not None)
    return Collected(ids, failed, tokens, rollout.engine.failures - failures)


def score(reward: Reward, samples: Sequence[Sample], store: Store, max_failed: float) -> int:
    """Score stored samples and keep the rewards; returns how many failed. Raises as `collect` does."""
    scores = reward.score(samples)
    store.set_rewards((s.id or 0, found.value, found.meta) for s, found in zip(samples, scores, strict=True))
    return check_failures(samples, scores, max_failed)


def _sample(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    sampler: Sampler,
    store: Store,
    task: Task,
    activity: Activity,
) -> list[Sample]:
    """The responses as they are in the store, in the order in which they finished."""
    total = len(prompts) * sampler.n
    numbers = task.numbers or tuple(range(len(prompts)))
    stored = _earlier(store, task, numbers)
    skip = {s.meta["index"] for s in stored}
    finished: list[Sample] = []
    flushed = time.monotonic()

    def flush() -> None:
        nonlocal flushed
        if finished:
            origins = (
                [_origin(task, s, sampler.n, i) for i, s in enumerate(finished)] if task.ledger else None
            )
            ids = store.append(finished, run=task.run, step=task.step, origins=origins)
            stored.extend(s.replace(id=i) for i, s in zip(ids, finished, strict=True))
            finished.clear()
        flushed = time.monotonic()

    def is_due() -> bool:
        return time.monotonic() - flushed >= FLUSH_SECONDS

    activity.stage("sampling", len(skip), total)
    try:
        for sample in rollout.sample(prompts, sampler.n, sampler, seed=task.seed, numbers=numbers, skip=skip):
            # The samples of an episode come one after the other, and are stored together.
            goes_on = bool(finished) and sample.episode is not None and sample.episode == finished[-1].episode
            if is_due() and not goes_on:
                flush()
            finished.append(sample)
            activity.stage("sampling", len(stored) + len(finished), total)
            if sample.episode is None:
                if is_due():
                    flush()
                activity.check()
    finally:
        flush()
    return stored


def _earlier(store: Store, task: Task, numbers: Sequence[int]) -> list[Sample]:
    """What an earlier process finished of these prompts."""
    if not task.ledger:
        return []
    return list(store.samples(ids=store.by_origin(task.ledger, numbers)))


def _origin(task: Task, sample: Sample, n: int, place: int) -> Origin:
    """Where the response of a prompt stands in the ledger; samples of one episode are stored together."""
    index = sample.meta["index"]
    part = f"{index % n}" if sample.episode is None else f"{index % n}.{place}"
    return Origin(task.ledger, index // n, part)
