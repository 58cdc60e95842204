"""The responses of a log with their log-probs under a model that may not have written them, and what it, and
a reference, say of them: ranking, coverage, weights, β."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.config import DataConfig
from agro.errors import Refused
from agro.io.terminal import plain
from agro.models.policy import Policy
from agro.pages.store.value_on_log import LoggedResponses
from agro.stats.intervals import Values
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


@dataclass(frozen=True)
class Measurements:
    """What a model says of the responses of some groups, by the keys of `agro check --json`: shares, nats and
    β; None where unknown. `total`: groups of the store; `examples`: a sample that was dropped, by reason."""

    values: dict[str, Any]
    total: int
    examples: Mapping[str, str]


def measure(
    store: Store, policy: Policy, reference: Policy | None = None, limit: int | None = LIMIT
) -> Measurements:
    """Measure up to `limit` groups, every so many in the order of the store, and the judged pairs in them.

    `auc`: in groups of unequal rewards, how often log π/π_ref (without a reference log π) ranks the better of
    two responses higher, where equal ones count one half. `ranked_share`: of judged pairs those whose winner
    has at least the log π of the loser (ranking accuracy, arXiv 2405.19534). `policy_coverage`: π of all
    distinct responses to a prompt together. `ess`: (Σw)² / Σw² over the number of responses with known log μ,
    w = π/μ. `beta`: at which β times the log-ratio differs as much as the rewards, by group; without a
    reference the optimum's log-ratios then differ as much as the model's log-probs do now.

    Raises `Refused` where the two models have different tokenizers.
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
    log = RescoredLog.of(samples, policy)
    logp, rewards, lengths = log.totals, log.rewards, log.lengths
    number = {prompt: i for i, prompt in enumerate(prompts)}
    prompt_of = np.array([number[of[0].prompt_id] for of in log.responses], np.int64)
    groups = [np.flatnonzero(prompt_of == i) for i in np.unique(prompt_of)]
    scored = [of[~np.isnan(rewards[of])] for of in groups]
    unequal = [of for of in scored if len(of) and np.ptp(rewards[of])]
    ref_logp, score, name = np.full(len(logp), np.nan), logp, "log π"
    if reference is not None:
        ref_logp = RescoredLog.of(samples, reference).totals
        score, name = logp - ref_logp, "log π/π_ref"

    per_token = logp / lengths
    auc, best, worst, balance = _by_group(unequal, rewards, score, per_token)
    ranked = summary("auc", auc)
    low, middle, high = np.quantile(balance, (0.25, 0.5, 0.75)).tolist() if len(balance) else [None] * 3
    texts = ["".join(sample.response for sample in of) for of in log.responses]
    repeats = are_repeats(f"{i} {text}" for i, text in zip(prompt_of, texts, strict=True))
    mass = np.where(np.array(repeats, bool), 0.0, np.exp(logp))
    log_w = logp - log.behavior
    log_w = log_w[np.isfinite(log_w)]
    ess = Weights.of(log_w).ess / len(log_w) if len(log_w) else None
    place = {sample.id: i for i, of in enumerate(log.responses) for sample in of}
    pairs = [(place.get(p.winner), place.get(p.loser)) for p in store.pairs() if not p.is_tie]
    winner, loser = np.array([pair for pair in pairs if None not in pair], np.int64).reshape(-1, 2).T
    # Stored responses to the prompts of unequal groups, of which some can't be read or have no reward.
    ids = {(number[s.prompt_id], s.id if s.episode is None else s.episode) for s in samples}
    stored = np.bincount([i for i, _ in ids], minlength=len(prompts))
    values = {
        "auc_of": name,
        "auc": ranked.get("auc"),
        "auc_se": ranked["auc_se"] if len(auc) > 1 else None,
        "auc_groups": len(auc),
        "auc_dropped": sum(int(stored[prompt_of[of[0]]]) - len(of) for of in unequal),
        "invalid": dict(log.dropped),
        "template": (policy.chat.template.abilities() if policy.tokenizer.chat_template else {}) or None,
        "ranked_share": _mean(logp[winner] >= logp[loser]),
        "ranked_share_per_token": _mean(per_token[winner] >= per_token[loser]),
        "ranked_pairs": len(winner),
        "measured_groups": len(groups),
        "logp": _mean(logp),
        "logp_per_token": _mean(per_token),
        "ref_logp": _mean(ref_logp),
        "ref_logp_per_token": _mean(ref_logp / lengths),
        "best_logp_per_token": _mean(best),
        "worst_logp_per_token": _mean(worst),
        "policy_coverage": _mean(np.array([mass[of].sum() for of in groups]).clip(max=1.0)),
        "ess": ess,
        "concentrability": None if ess is None else 1 / ess,
        "ess_responses": len(log_w),
        "beta": {"low": low, "middle": middle, "high": high, "groups": len(balance), "of": name},
    }
    return Measurements(values, total, log.examples)


def _by_group(
    unequal: Sequence[NDArray[np.int64]], rewards: Values, score: Values, per_token: Values
) -> tuple[Values, Values, Values, Values]:
    """The AUC of each group of unequal rewards, the log π of a token of all best and of all worst responses,
    and the β of each group."""
    auc, best, worst, balance = [], [np.empty(0)], [np.empty(0)], []
    for of in unequal:
        lead = (score[of, None] - score[of])[rewards[of, None] > rewards[of]]
        auc.append(np.where(lead == 0, 0.5, lead > 0).mean())
        best.append(per_token[of[rewards[of] == rewards[of].max()]])
        worst.append(per_token[of[rewards[of] == rewards[of].min()]])
        if score[of].std() > 0:
            balance.append(rewards[of].std() / score[of].std())
    return np.array(auc, np.float64), np.concatenate(best), np.concatenate(worst), np.array(balance)


def _mean(values: NDArray[Any]) -> float | None:
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
