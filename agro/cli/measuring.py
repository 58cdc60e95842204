"""Responses of a model to prompts, scored, and those of a log, with their log-probs under a model that may
not have written them. Responses are kept in a store as they finish, so that a kill loses few."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agro.cli.common import opened_log
from agro.config import DataConfig, SamplerConfig
from agro.errors import Refused
from agro.io.near_copies import clusters
from agro.io.numbers import duration
from agro.io.record_files import fingerprint
from agro.io.terminal import drawn, plain, visible
from agro.rewards.function import RESERVED
from agro.rollout.collect import SilentActivity, Task, collect
from agro.rollout.evaluate import Heldout, heldout
from agro.rollout.off_policy import LoggedResponses, RankedPair, pairs_by_reward
from agro.store import DrawnGroups, Pair, Store
from agro.store.location import Location
from agro.train.collate import collate, total_reward
from agro.train.feed import select_valid
from agro.train.micro import TOKENS, MicroBatch
from agro.train.step import Passes, streams_of
from agro.types import Prompt, Sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agro.models.policy import Policy
    from agro.rollout.rollout import EpisodeReward, Rollout

TOGETHER = 64  # samples in one batch


def streams_along(
    policy: Policy, samples: Sequence[Sample], want: Sequence[str], reference: Policy | None = None
) -> dict[str, list[NDArray[np.float64]]]:
    """By stream and sample the values at the tokens that its author chose, [A] each.

    `samples` are encoded. `want`: as of `Policy.streams`; "kl" is exact, from `reference`.
    """
    passes = Passes(MicroBatch(tokens=TOKENS))
    found: dict[str, list[NDArray[np.float64]]] = {name: [] for name in want}
    for start in range(0, len(samples), TOGETHER):
        batch = collate(samples[start : start + TOGETHER], 0).to(policy.device)
        streams = streams_of(policy, batch, want, passes, reference)
        for name in want:
            rows = zip(streams[name], batch.mask, strict=True)
            found[name] += [row[chosen].double().cpu().numpy() for row, chosen in rows]
    return found


@dataclass(frozen=True)
class Log:
    """The responses of a log, and its judgments of two."""

    name: str
    samples: list[Sample]
    pairs: list[Pair]

    @classmethod
    def read(cls, path: Path) -> Log:
        """A store, or a file as `agro import` takes it."""
        with opened_log(path) as store:
            return cls(str(path), list(store.samples()), list(store.pairs()))

    def prompts(self) -> list[Prompt]:
        """With the columns that rewards read."""
        found: dict[str, Prompt] = {}
        for s in self.samples:
            if s.prompt_id not in found:
                columns = {name: value for name, value in s.meta.items() if name not in RESERVED}
                found[s.prompt_id] = Prompt(s.prompt, s.prompt_id, columns)
        return list(found.values())


@dataclass(frozen=True)
class RescoredLog:
    """N responses that the model can read; the rows of an episode are one.

    `logp`, `values`: by response those of the tokens that its author chose; `values` where the model has a
    value head. `clusters`: [N] a number of each prompt's near-copies. `dropped`: samples that the model can't
    read, by reason.
    """

    responses: Sequence[Sequence[Sample]]
    logp: Sequence[NDArray[np.float64]]
    values: Sequence[NDArray[np.float64]] | None
    clusters: NDArray[np.int64]
    dropped: dict[str, int]

    @classmethod
    def of(cls, log: Log, policy: Policy) -> RescoredLog:
        valid = select_valid(DrawnGroups(log.samples), policy.encoder, None, ())
        if not valid.samples:
            raise Refused(
                f"--log {log.name}: expected responses that the model can read, got none of "
                f"{len(log.samples)}; dropped: {dict(valid.dropped) or 'nothing'}"
            )
        samples = [sample.replace(learn=None) for sample in valid.samples]  # all that the author chose
        streams = streams_along(
            policy, samples, ["logp"] if policy.value is None else ["logp", "prefix_value"]
        )
        rows: dict[Any, list[int]] = {}
        for i, s in enumerate(samples):
            rows.setdefault((s.prompt_id, i if s.episode is None else s.episode), []).append(i)
        joined = {
            name: [np.concatenate([of_sample[i] for i in of]) for of in rows.values()]
            for name, of_sample in streams.items()
        }
        responses = [[samples[i] for i in of] for of in rows.values()]
        texts = {of[0].prompt_id: plain(of[0].prompt) for of in responses}
        labels = clusters(list(texts.values()), DataConfig().near_copies).tolist()
        number = dict(zip(texts, labels, strict=True))
        of_response = np.array([number[of[0].prompt_id] for of in responses], np.int64)
        return cls(responses, joined["logp"], joined.get("prefix_value"), of_response, dict(valid.dropped))

    @property
    def totals(self) -> NDArray[np.float64]:
        """[N] log-probs of complete responses."""
        return np.array([logp.sum() for logp in self.logp])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] in tokens."""
        return np.array([len(logp) for logp in self.logp])

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[N], NaN where unknown."""
        return np.array([total_reward(of[0]) for of in self.responses])

    def scored(self) -> RescoredLog:
        """Those with a reward."""
        chosen = np.flatnonzero(~np.isnan(self.rewards)).tolist()
        dropped = dict(self.dropped)
        if len(chosen) < len(self.responses):
            dropped["no reward"] = len(self.responses) - len(chosen)
        return replace(
            self,
            responses=[self.responses[i] for i in chosen],
            logp=[self.logp[i] for i in chosen],
            values=None if self.values is None else [self.values[i] for i in chosen],
            clusters=self.clusters[chosen],
            dropped=dropped,
        )

    def obstacle(self) -> str:
        """Why nothing can be estimated off-policy from these scored responses; empty where it may be."""
        if not self.responses:
            return "the log has no scored responses"
        unknown = sum(any(not s.knows_behavior or s.truncation for s in of) for of in self.responses)
        if unknown:
            of = f"{unknown} of its {len(self.responses)} responses"
            return f"the log has no log-probs of what wrote it for {of}"
        return ""

    def logged(self) -> LoggedResponses:
        """With the log-ratios of their tokens, and rewards of tokens where they came with these."""
        lengths = self.lengths
        ratios, rewards = np.zeros((2, len(lengths), lengths.max()))
        for i, (of, logp) in enumerate(zip(self.responses, self.logp, strict=True)):
            ratios[i, : lengths[i]] = logp - np.concatenate([_chosen(s, s.behavior_logp) for s in of])
            by_token = np.concatenate([_chosen(s, s.token_reward) for s in of])
            rewards[i, : lengths[i]] = np.nan_to_num(by_token)
            rewards[i, lengths[i] - 1] += of[0].reward or 0.0
        return LoggedResponses(ratios, rewards, lengths, self.clusters)

    def critic_values(self) -> NDArray[np.float64]:
        """[N,T] of the value head, before each token."""
        assert self.values is not None
        padded = np.zeros((len(self.values), max(map(len, self.values))))
        for row, values in zip(padded, self.values, strict=True):
            row[: len(values)] = values
        return padded

    def pairs(self, log: Log) -> list[RankedPair]:
        """The log's judgments; without any all responses to one prompt with unequal rewards."""
        number = {s.id: i for i, of in enumerate(self.responses) for s in of}
        rewards, found = self.rewards, []
        for pair in log.pairs:
            winner, loser = number.get(pair.winner), number.get(pair.loser)
            if winner is None or loser is None or pair.is_tie:
                continue
            margin = float(rewards[winner] - rewards[loser])
            if pair.votes_winner and pair.votes_loser:  # of Bradley and Terry
                margin = math.log(pair.votes_winner / pair.votes_loser)
            found.append(RankedPair(winner, loser, margin))
        prompts = np.unique([of[0].prompt_id for of in self.responses], return_inverse=True)[1]
        return found or pairs_by_reward(rewards, prompts)


def _chosen(sample: Sample, values: NDArray[Any] | None) -> NDArray[np.float64]:
    """Values at the tokens that the author chose; NaN where unknown."""
    assert sample.action is not None
    if values is None:
        return np.full(int(sample.action.sum()), np.nan)
    return np.asarray(values[sample.action], np.float64)


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
        progress = SamplingProgress(model)
        if self.store is None:
            samples = rollout.sample(prompts, self.sampler.n, self.sampler, seed=self.seed)
            counted = progress.counting(samples, len(prompts) * self.sampler.n)
            return heldout(rollout, self.scorer, prompts, self.sampler, self.seed, counted)
        with Store.open(self.store) as store:
            ledger = self._ledger(model, rollout, prompts)
            earlier = len(store.experience.find_in_ledger(ledger, range(len(prompts))))
            if earlier:
                print(f"{self.store}: {earlier} responses are there already", file=sys.stderr)
            task = Task(seed=self.seed, ledger=ledger)
            done = collect(rollout, prompts, self.sampler, store, task, activity=progress)
            progress.end()
            stored = list(store.samples(ids=done.ids))
            result = heldout(rollout, self.scorer, prompts, self.sampler, self.seed, stored)
            store.set_rewards((s.id or 0, s.reward, {}) for s in result.samples)
            return result

    def _ledger(self, model: str, rollout: Rollout, prompts: Sequence[Prompt]) -> str:
        """A name for all that decides the responses."""
        played = rollout.environment
        decides = {
            "model": fingerprint(model) if Path(model).is_dir() else model,
            "tokenizer": rollout.encoder.fingerprint,
            "prompts": [[prompt.id, prompt.text] for prompt in prompts],
            "sampler": self.sampler.model_dump(mode="json"),
            "seed": self.seed,
            "environment": None if played is None else played.name,
        }
        return f"eval:{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]}"


class SamplingProgress(SilentActivity):
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

    def counting(self, samples: Iterator[Sample], total: int) -> Iterator[Sample]:
        """The samples, each shown as it comes; rows of one episode are one response."""
        numbers = set()
        self.stage("sampling", 0, total)
        for sample in samples:
            numbers.add(sample.meta["index"])
            self.stage("sampling", len(numbers), total)
            yield sample
        self.end()

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
