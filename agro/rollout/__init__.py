"""Reads prompts, and generates responses to them with an encoder, an engine and an environment. `collect`
samples responses, appends each to the store when it finishes, and scores them.

`Rollout` is imported on first use, since prompts and held-out results need no torch.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from agro.config import SamplerConfig
from agro.rewards import Reward, check_failures
from agro.rewards.protocol import cause
from agro.store import Origin, Store
from agro.types import Prompt, Sample

if TYPE_CHECKING:
    from agro.rollout.rollout import Rollout

__all__ = ["Activity", "CollectResult", "Rollout", "Task", "collect"]
FLUSH_SECONDS = 0.1  # responses that finish within this time are stored together


class Activity:
    """Reports the progress of a process, and stops it between two pieces of work.

    This base class reports nothing and never stops.
    """

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Stage `name` begins, or `done` of `total` of it are done."""

    def fail(self, kind: Hashable, error: str) -> None:
        """Report that a reward is unknown because of `error`, once per kind."""

    def say(self, text: str) -> None:
        """Show a message to the user."""

    def check(self) -> None:
        """Raise `Interrupted` if a stop was requested."""


@dataclass(frozen=True)
class Task:
    run: str | None = None  # id of the run
    step: int | None = None  # of the run, if the samples are for one
    seed: int = 0
    numbers: tuple[int, ...] | None = None  # of the prompts in the order of the run; None: from 0
    # A ledger stores each response once: those that another process finished aren't sampled again.
    ledger: str = ""
    max_failed: float = 1.0  # largest share of rewards that may fail


@dataclass(frozen=True)
class CollectResult:
    """What a call of `collect` added to the store."""

    ids: tuple[int, ...] = ()  # in the order of response numbers, not of completion
    failed: int = 0  # rewards that couldn't be computed
    tokens: int = 0  # number of sampled tokens
    too_stale: int = 0  # responses for the run that were never trained on
    # Metrics of the engine after the last response, and of the source's wrappers.
    measured: Mapping[str, Any] = field(default_factory=dict)


def collect(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    sampler: SamplerConfig,
    store: Store,
    task: Task,
    reward: Reward | None = None,
    activity: Activity | None = None,
) -> CollectResult:
    """Sample `sampler.n` responses to each prompt, store them and, with a `reward`, score them.

    A response is appended without a reward when it finishes, or together with later ones if the last append
    was less than `FLUSH_SECONDS` earlier, so that a killed process loses little. Raises `Refused` before
    sampling if the store has another prompt under one of these ids, and after scoring if more than a share
    `task.max_failed` of the rewards failed; the responses then remain in the store, with unknown rewards.
    """
    store.experience.check_prompts((prompt.id, prompt.text) for prompt in prompts)
    activity = activity or Activity()
    engine, total = rollout.engine, len(prompts) * sampler.n
    numbers = task.numbers or tuple(range(len(prompts)))
    ids = store.experience.find_in_ledger(task.ledger, numbers) if task.ledger else []
    samples = list(store.samples(ids=ids)) if ids else []  # by an earlier process
    skip = {s.meta["index"] for s in samples}
    finished: list[Sample] = []  # not stored yet
    flushed = time.monotonic()

    def flush() -> None:
        nonlocal flushed
        if finished and not task.ledger:
            ids = store.append(finished, run=task.run, step=task.step)
            samples.extend(s.replace(id=i) for i, s in zip(ids, finished, strict=True))
        elif finished:
            origins = []  # samples of one episode are stored together
            for i, s in enumerate(finished):
                prompt, part = divmod(s.meta["index"], sampler.n)
                position = f"{part}" if s.episode is None else f"{part}.{i}"
                origins.append(Origin(task.ledger, prompt, position))
            ids = store.append(finished, run=task.run, step=task.step, origins=origins)
            samples.extend(store.samples(ids=ids))  # another collector may have stored some of them
        finished.clear()
        flushed = time.monotonic()

    def is_due() -> bool:
        return time.monotonic() - flushed >= FLUSH_SECONDS

    activity.stage("sampling", len(skip), total)
    engine.check = activity.check
    try:
        for sample in rollout.sample(prompts, sampler.n, sampler, seed=task.seed, numbers=numbers, skip=skip):
            # The samples of an episode arrive consecutively, and are stored together.
            last_episode = finished[-1].episode if finished else None
            continues = sample.episode is not None and sample.episode == last_episode
            if is_due() and not continues:
                flush()
            finished.append(sample)
            activity.stage("sampling", len(samples) + len(finished), total)
            if sample.episode is None:
                if is_due():
                    flush()
                activity.check()
    finally:
        engine.check = Activity().check
        flush()
    samples.sort(key=lambda s: (s.meta["index"], s.id))
    failed = 0
    if reward is not None:
        activity.stage("scoring")
        failed = score(reward, samples, store, task, activity)
    return CollectResult(
        tuple(s.id for s in samples if s.id is not None),
        failed,
        sum(int(s.action.sum()) for s in samples if s.action is not None),
        measured=dict(engine.measured),
    )


def score(reward: Reward, samples: Sequence[Sample], store: Store, task: Task, activity: Activity) -> int:
    """Score stored samples and store the rewards; returns how many failed. Raises as `collect` does.

    Samples in a ledger, which other processes may have scored meanwhile, retain their first rewards.
    """
    scores = reward.score(samples)
    rows = ((s.id or 0, score.value, score.meta) for s, score in zip(samples, scores, strict=True))
    store.set_rewards(rows, once=bool(task.ledger))
    for scored in scores:
        if scored.error is not None:
            activity.fail(cause(scored.error), scored.error)
    return check_failures(samples, scores, task.max_failed)


def __getattr__(name: str) -> Any:
    if name != "Rollout":
        raise AttributeError(f"module 'agro.rollout' has no attribute {name!r}")
    return import_module("agro.rollout.rollout").Rollout
