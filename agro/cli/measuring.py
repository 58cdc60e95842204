"""Responses of a model to prompts, scored; kept in a store as they finish, so that a kill loses few."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from agro.config import SamplerConfig
from agro.io.numbers import duration
from agro.io.record_files import fingerprint
from agro.io.terminal import drawn, visible
from agro.pages.store.measurements import streams_along
from agro.rollout import Activity, Task, collect
from agro.rollout.evaluate import Heldout, heldout
from agro.store import Store
from agro.store.location import Location
from agro.types import Prompt

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agro.models.policy import Policy
    from agro.rollout.rollout import EpisodeReward, Rollout


@dataclass(frozen=True)
class Measurement:
    """How responses are sampled and scored. `store`: where they are kept, if anywhere."""

    scorer: EpisodeReward
    sampler: SamplerConfig
    seed: int
    store: Location | None = None

    def of(self, rollout: Rollout, model: str, prompts: Sequence[Prompt]) -> Heldout:
        """Of a model; those that the store has already from the same weights, prompts and settings aren't
        sampled again."""
        progress, ledger = SamplingProgress(model), ""
        if self.store is not None:
            decides = {
                "model": fingerprint(model) if Path(model).is_dir() else model,
                "tokenizer": rollout.encoder.fingerprint,
                "prompts": [[prompt.id, prompt.text] for prompt in prompts],
                "sampler": self.sampler.model_dump(mode="json"),
                "seed": self.seed,
                "environment": None if rollout.environment is None else rollout.environment.name,
            }
            ledger = f"eval:{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]}"
        with TemporaryDirectory() as folder, Store.open(self.store or Path(folder) / "eval.db") as store:
            earlier = len(store.experience.find_in_ledger(ledger, range(len(prompts)))) if ledger else 0
            if earlier:
                print(f"{self.store}: {earlier} responses are there already", file=sys.stderr)
            task = Task(seed=self.seed, ledger=ledger)
            done = collect(rollout, prompts, self.sampler, store, task, activity=progress)
            progress.end()
            stored = list(store.samples(ids=done.ids))
            result = heldout(rollout, self.scorer, prompts, self.sampler, self.seed, stored)
            if self.store is not None:
                store.set_rewards((s.id or 0, s.reward, {}) for s in result.samples)
            return result


class SamplingProgress(Activity):
    """On a terminal's stderr how many responses of a model are there, and the time left."""

    def __init__(self, model: str) -> None:
        self.model, self.is_shown = model, sys.stderr.isatty()
        self.began, self.earlier = 0.0, 0  # of the first stage

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """The first one of sampling has the responses that were there before."""
        if not self.is_shown or done is None or total is None:
            return
        if self.began == 0.0:
            self.began, self.earlier = time.monotonic(), done
        text = f"{self.model}: {done}/{total} responses"
        if done > self.earlier:
            seconds = (time.monotonic() - self.began) / (done - self.earlier) * (total - done)
            text += f", {duration(seconds)} left"
        print(f"\r\x1b[K{visible(text)}", end="", file=drawn(sys.stderr), flush=True)

    def end(self) -> None:
        if self.is_shown:
            print("\r\x1b[K", end="", file=drawn(sys.stderr), flush=True)


def policy_of(rollout: Rollout) -> Policy:
    """The model in this process that it samples from."""
    from agro.rollout.engines.hf import HF

    assert isinstance(rollout.engine, HF)
    return rollout.engine.policy


def along_samples(
    rollout: Rollout, other: Rollout | None, result: Heldout, temperature: float
) -> dict[str, NDArray[np.float64]]:
    """[M,n] of each response the mean entropy of its tokens' distributions, in nats, and with another model
    the sum of their exact KL divergences from that, whose mean is the KL of complete responses.

    Nothing at another temperature than the policy's own; no KL where the tokens aren't the same.
    """
    policy = policy_of(rollout)
    if temperature != policy.temperature or any(s.tokens is None for s in result.samples):
        return {}
    reference = None
    if other is not None and other.encoder.fingerprint == rollout.encoder.fingerprint:
        reference = policy_of(other)
    want = ["entropy"] if reference is None else ["entropy", "kl"]
    streams = streams_along(policy, result.samples, want, reference)
    position = {id(sample): i for i, sample in enumerate(result.samples)}
    found = {}
    for name, of_sample in streams.items():
        joined = [np.concatenate([of_sample[position[id(s)]] for s in r]) for r in result.responses]
        values = [float(x.sum() if name == "kl" else x.mean()) for x in joined]
        found[name] = np.array(values).reshape(result.rewards.shape)
    return found
