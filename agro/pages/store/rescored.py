"""The responses of a log, with their log-probs under a model that may not have written them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.config import DataConfig
from agro.io.near_copies import clusters
from agro.io.terminal import plain
from agro.models.policy import Policy
from agro.rewards.function import RESERVED
from agro.rollout.off_policy import LoggedResponses, RankedPair, pairs_by_reward
from agro.store import DrawnGroups, Pair
from agro.train.collate import collate, total_reward
from agro.train.feed import select_valid
from agro.train.micro import TOKENS, MicroBatch
from agro.train.step import Passes, streams_of
from agro.types import Prompt, Sample

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
    read, by reason; `examples`: of each reason the first, in words.
    """

    responses: Sequence[Sequence[Sample]]
    logp: Sequence[NDArray[np.float64]]
    values: Sequence[NDArray[np.float64]] | None
    clusters: NDArray[np.int64]
    dropped: Counter[str]
    examples: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, log: Log, policy: Policy) -> RescoredLog:
        """All is empty where the model can read none."""
        valid = select_valid(DrawnGroups(log.samples), policy.encoder, None, ())
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
        values = joined.get("prefix_value")
        return cls(responses, joined["logp"], values, of_response, valid.dropped, valid.examples)

    @property
    def totals(self) -> NDArray[np.float64]:
        """[N] log-probs of complete responses."""
        return np.array([logp.sum() for logp in self.logp], np.float64)

    @property
    def behavior(self) -> NDArray[np.float64]:
        """[N] log-probs under what wrote them, NaN where unknown: also where it sampled from fewer tokens."""
        totals = []
        for of in self.responses:
            left_out = any(s.truncation or s.kept is not None for s in of)
            totals.append(math.nan if left_out else sum(_chosen(s, s.behavior_logp).sum() for s in of))
        return np.array(totals, np.float64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] in tokens."""
        return np.array([len(logp) for logp in self.logp], np.int64)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[N], NaN where unknown."""
        return np.array([total_reward(of[0]) for of in self.responses], np.float64)

    def scored(self) -> RescoredLog:
        """Those with a reward."""
        chosen = np.flatnonzero(~np.isnan(self.rewards)).tolist()
        dropped = self.dropped.copy()
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
