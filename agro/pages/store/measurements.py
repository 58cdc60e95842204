"""The responses of a log with their log-probs under a model that may not have written them, and what it, and
a reference, say of them: ranking, coverage, weights, β."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.config import DataConfig
from agro.errors import Refused
from agro.io.terminal import plain
from agro.models.policy import Policy
from agro.pages.store.value_on_log import LoggedResponses
from agro.stats.off_policy import Weights
from agro.store import DrawnGroups, Store
from agro.store.split import clusters
from agro.store.survey import are_repeats
from agro.train.collate import collate, total_reward
from agro.train.feed import select_valid
from agro.train.measure import summary
from agro.train.step import TOKENS, MicroBatch, Passes, streams_of
from agro.types import Sample

LIMIT = 1000  # prompts that are measured, unless more are asked for
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Measurements:
    """What a model says of the N valid responses of some groups; [N] each, NaN where unknown.

    Log-probs are sums over tokens, in nats. `group`: a number of the prompt; `repeats`: whether an earlier
    response of the group has the same text; `rows`: by group of how many stored responses they are; `pairs`:
    [P,2] winners and losers of judged pairs. `total`: groups of the store. `template`: what the chat template
    shows, by kind of content.
    """

    rescored: RescoredLog
    group: NDArray[np.int64]
    repeats: NDArray[np.bool_]
    ref_logp: Values
    against_reference: bool
    rows: NDArray[np.int64]
    pairs: NDArray[np.int64]
    total: int
    template: Mapping[str, str]

    @cached_property
    def groups(self) -> list[NDArray[np.int64]]:
        """The responses of each group that has some."""
        return [np.flatnonzero(self.group == number) for number in np.unique(self.group)]

    @cached_property
    def unequal(self) -> list[NDArray[np.int64]]:
        """The scored responses of each group of unequal rewards."""
        rewards = self.rescored.rewards
        scored = [of[~np.isnan(rewards[of])] for of in self.groups]
        return [of for of in scored if len(of) and np.ptp(rewards[of])]

    @property
    def scores(self) -> Values:
        """[N] log π/π_ref, or log π without a reference."""
        return self.rescored.totals - self.ref_logp if self.against_reference else self.rescored.totals

    @property
    def auc(self) -> Values:
        """[G] of each group of unequal rewards: how often `scores` ranks the better of two responses higher,
        where equal ones count one half."""
        rewards, scores, shares = self.rescored.rewards, self.scores, []
        for of in self.unequal:
            is_better = rewards[of, None] > rewards[of]
            lead = (scores[of, None] - scores[of])[is_better]
            shares.append(np.where(lead == 0, 0.5, lead > 0).mean())
        return np.array(shares, np.float64)

    @property
    def per_token(self) -> dict[str, Values]:
        """Mean log π of a token, of the best and of the worst responses of groups with unequal rewards."""
        mean, rewards = self.rescored.totals / self.rescored.lengths, self.rescored.rewards
        best = [np.empty(0), *(mean[of[rewards[of] == rewards[of].max()]] for of in self.unequal)]
        worst = [np.empty(0), *(mean[of[rewards[of] == rewards[of].min()]] for of in self.unequal)]
        return {"best": np.concatenate(best), "worst": np.concatenate(worst)}

    @property
    def coverage(self) -> Values:
        """[G] π of all distinct responses to a prompt together: the share of π that the data show."""
        mass = np.where(self.repeats, 0.0, np.exp(self.rescored.totals))
        return np.array([mass[of].sum() for of in self.groups], np.float64).clip(max=1.0)

    @property
    def ess(self) -> tuple[float | None, int]:
        """(Σw)² / Σw² over the number n of responses with known log μ, w = π/μ; and n."""
        log_w = self.rescored.totals - self.rescored.behavior
        log_w = log_w[np.isfinite(log_w)]
        return (Weights.of(log_w).ess / len(log_w) if len(log_w) else None), len(log_w)

    @property
    def balance(self) -> Values:
        """[G] the β at which βρ differs as much as the rewards, in groups where both differ.

        ρ is log π/π_ref. Without a reference it is log π: at this β the optimum's log-ratios differ as much
        as the model's log-probs do now.
        """
        rho, rewards = self.scores, self.rescored.rewards
        spreads = [(rewards[of].std(), rho[of].std()) for of in self.unequal]
        return np.array([of_rewards / of_rho for of_rewards, of_rho in spreads if of_rho > 0])

    def to_json(self) -> dict[str, Any]:
        """Shares, nats and β; None where unknown."""
        logp, lengths, auc = self.rescored.totals, self.rescored.lengths, self.auc
        ranked, (ess, weighted), (winner, loser) = summary("auc", auc), self.ess, self.pairs.T
        balance, middle_half = self.balance, [None, None, None]
        if len(balance):
            middle_half = np.quantile(balance, (0.25, 0.5, 0.75)).tolist()
        of = "log π/π_ref" if self.against_reference else "log π"
        right = [(score[winner] >= score[loser]) for score in (logp, logp / lengths)]
        unequal = [int(self.group[of[0]]) for of in self.unequal]
        return {
            "auc_of": of,
            "auc": ranked.get("auc"),
            "auc_se": ranked["auc_se"] if len(auc) > 1 else None,
            "auc_groups": len(auc),
            "auc_dropped": int(self.rows[unequal].sum()) - sum(map(len, self.unequal)),
            "invalid": dict(self.rescored.dropped),
            "template": dict(self.template) or None,
            "ranked_share": float(right[0].mean()) if len(winner) else None,
            "ranked_share_per_token": float(right[1].mean()) if len(winner) else None,
            "ranked_pairs": len(winner),
            "measured_groups": len(self.groups),
            "logp": _mean(logp),
            "logp_per_token": _mean(logp / lengths),
            "ref_logp": _mean(self.ref_logp),
            "ref_logp_per_token": _mean(self.ref_logp / lengths),
            "best_logp_per_token": _mean(self.per_token["best"]),
            "worst_logp_per_token": _mean(self.per_token["worst"]),
            "policy_coverage": _mean(self.coverage),
            "ess": ess,
            "concentrability": None if ess is None else 1 / ess,
            "ess_responses": weighted,
            "beta": {**dict(zip(("low", "middle", "high"), middle_half)), "groups": len(balance), "of": of},
        }


def measure(
    store: Store, policy: Policy, reference: Policy | None = None, limit: int | None = LIMIT
) -> Measurements:
    """Measure up to `limit` groups, every so many in the order of the store, and the judged pairs in them.

    The ranking of pairs is the share whose winner has at least the log π of the loser (ranking accuracy,
    arXiv 2405.19534). Raises `Refused` where the two models have different tokenizers.
    """
    if reference is not None and reference.fingerprint != policy.fingerprint:
        raise Refused(
            f"expected a reference with the tokenizer of the model, got another ({reference.name}); use the "
            "model that training started from"
        )
    total = store.counts().groups
    stride = 1 if limit is None else max(1, -(-total // limit))
    prompts = [group.prompt_id for group in islice(store.groups(), 0, None, stride)]
    samples = [sample for prompt in prompts for sample in store.samples(prompt_id=prompt)]
    rescored = RescoredLog.of(samples, policy)
    ref_logp = np.full(len(rescored.responses), np.nan)
    if reference is not None:
        ref_logp = RescoredLog.of(samples, reference).totals
    number = {prompt: i for i, prompt in enumerate(prompts)}
    texts = ["".join(sample.response for sample in of) for of in rescored.responses]
    group = np.array([number[of[0].prompt_id] for of in rescored.responses], np.int64)
    place = {sample.id: i for i, of in enumerate(rescored.responses) for sample in of}
    pairs = (pair for pair in store.pairs() if not pair.is_tie)
    judged = [(place.get(pair.winner), place.get(pair.loser)) for pair in pairs]
    ids = {(number[s.prompt_id], s.id if s.episode is None else s.episode) for s in samples}
    return Measurements(
        rescored,
        group,
        np.array(are_repeats(f"{g} {text}" for g, text in zip(group, texts, strict=True)), bool),
        ref_logp,
        reference is not None,
        np.bincount([g for g, _ in ids], minlength=len(prompts)),
        np.array([pair for pair in judged if None not in pair], np.int64).reshape(-1, 2),
        total,
        policy.chat.template.abilities() if policy.tokenizer.chat_template else {},
    )


def _mean(values: Values) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


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
class RescoredLog:
    """N responses that the model can read; the rows of an episode are one.

    `logp`: by response those of the tokens that its author chose. `clusters`: [N] a number of each prompt's
    near-copies. `dropped`: samples that the model can't read, by reason; `examples`: of each reason the
    first, in words.
    """

    responses: Sequence[Sequence[Sample]]
    logp: Sequence[NDArray[np.float64]]
    clusters: NDArray[np.int64]
    dropped: Counter[str]
    examples: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, log: Sequence[Sample], policy: Policy) -> RescoredLog:
        """All is empty where the model can read none."""
        valid = select_valid(DrawnGroups(list(log)), policy.encoder, None, ())
        samples = [sample.replace(learn=None) for sample in valid.samples]  # all that the author chose
        of_sample = streams_along(policy, samples, ["logp"])["logp"]
        rows: dict[Any, list[int]] = {}
        for i, s in enumerate(samples):
            rows.setdefault((s.prompt_id, i if s.episode is None else s.episode), []).append(i)
        logp = [np.concatenate([of_sample[i] for i in of]) for of in rows.values()]
        responses = [[samples[i] for i in of] for of in rows.values()]
        texts = {of[0].prompt_id: plain(of[0].prompt) for of in responses}
        labels = clusters(list(texts.values()), DataConfig().near_copies).tolist()
        number = dict(zip(texts, labels, strict=True))
        of_response = np.array([number[of[0].prompt_id] for of in responses], np.int64)
        return cls(responses, logp, of_response, valid.dropped, valid.examples)

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


def _chosen(sample: Sample, values: NDArray[Any] | None) -> NDArray[np.float64]:
    """Values at the tokens that the author chose; NaN where unknown."""
    assert sample.action is not None
    if values is None:
        return np.full(int(sample.action.sum()), np.nan)
    return np.asarray(values[sample.action], np.float64)
