"""Log-probs of a log's responses under a model that may not have written them, and the measurements that
follow from these and a reference's: ranking, coverage, weights, β."""

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

LIMIT = 1000  # default number of prompts to measure


@dataclass(frozen=True)
class Measurements:
    """A model's measurements of some groups, by the keys of `agro check --json`: shares, nats and β; None
    where unknown. `total`: number of groups in the store; `examples`: one dropped sample per reason."""

    values: dict[str, Any]
    total: int
    examples: Mapping[str, str]


def measure(
    store: Store, policy: Policy, reference: Policy | None = None, limit: int | None = LIMIT
) -> Measurements:
    """Measure up to `limit` groups, evenly spaced in the order of the store, and the judged pairs in them.

    `auc`: in groups of unequal rewards, how often log π/π_ref (log π without a reference) ranks the better of
    two responses higher, with ties counted as one half. `ranked_share`: share of judged pairs whose winner
    has at least the loser's log π (ranking accuracy, arXiv 2405.19534). `policy_coverage`: total π of all
    distinct responses to a prompt. `ess`: (Σw)² / Σw² over the number of responses with known log μ, w = π/μ.
    `beta`: the β at which β times the log-ratio varies as much as the rewards, by group; without a reference,
    at which the optimum's log-ratios vary as much as the model's log-probs do now.

    Raises `Refused` if the two models have different tokenizers.
    """
    if reference is not None and reference.fingerprint != policy.fingerprint:
        raise Refused(
            f"expected a reference with the model's tokenizer, got another one ({reference.name}); use the "
            "model that training started from"
        )
    total = store.counts().groups
    stride = 1 if limit is None else max(1, -(-total // limit))
    prompts = [group.prompt_id for group in islice(store.groups(), 0, None, stride)]
    samples = [sample for prompt in prompts for sample in store.samples(prompt_id=prompt)]
    log = RescoredLog.of(samples, policy)
    logp, rewards, lengths = log.totals, log.rewards, log.lengths
    number = {prompt: i for i, prompt in enumerate(prompts)}
    prompt_of = np.array([number[rows[0].prompt_id] for rows in log.responses], np.int64)
    groups = [np.flatnonzero(prompt_of == i) for i in np.unique(prompt_of)]
    scored = [rows[~np.isnan(rewards[rows])] for rows in groups]
    unequal = [rows for rows in scored if len(rows) and np.ptp(rewards[rows])]
    ref_logp, score, name = np.full(len(logp), np.nan), logp, "log π"
    if reference is not None:
        ref_logp = RescoredLog.of(samples, reference).totals
        score, name = logp - ref_logp, "log π/π_ref"

    per_token = logp / lengths
    auc, best, worst, balance = _by_group(unequal, rewards, score, per_token)
    ranked = summary("auc", auc)
    low, middle, high = np.quantile(balance, (0.25, 0.5, 0.75)).tolist() if len(balance) else [None] * 3
    texts = ["".join(sample.response for sample in rows) for rows in log.responses]
    repeats = are_repeats(f"{i} {text}" for i, text in zip(prompt_of, texts, strict=True))
    mass = np.where(np.array(repeats, bool), 0.0, np.exp(logp))
    log_w = logp - log.behavior
    log_w = log_w[np.isfinite(log_w)]
    ess = Weights.of(log_w).ess / len(log_w) if len(log_w) else None
    position = {sample.id: i for i, rows in enumerate(log.responses) for sample in rows}
    pairs = [(position.get(p.winner), position.get(p.loser)) for p in store.pairs() if not p.is_tie]
    winner, loser = np.array([pair for pair in pairs if None not in pair], np.int64).reshape(-1, 2).T
    # Count all stored responses, including those that are unreadable or unscored.
    ids = {(number[s.prompt_id], s.id if s.episode is None else s.episode) for s in samples}
    stored = np.bincount([i for i, _ in ids], minlength=len(prompts))
    values = {
        "auc_of": name,
        "auc": ranked.get("auc"),
        "auc_se": ranked["auc_se"] if len(auc) > 1 else None,
        "auc_groups": len(auc),
        "auc_dropped": sum(int(stored[prompt_of[rows[0]]]) - len(rows) for rows in unequal),
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
        "policy_coverage": _mean(np.array([mass[rows].sum() for rows in groups]).clip(max=1.0)),
        "ess": ess,
        "concentrability": None if ess is None else 1 / ess,
        "ess_responses": len(log_w),
        "beta": {"low": low, "middle": middle, "high": high, "groups": len(balance), "of": name},
    }
    return Measurements(values, total, log.examples)


def _by_group(
    unequal: Sequence[NDArray[np.int64]], rewards: Values, score: Values, per_token: Values
) -> tuple[Values, Values, Values, Values]:
    """Return the AUC of each group of unequal rewards, log π per token of all best and of all worst
    responses, and the β of each group."""
    auc, best, worst, balance = [], [np.empty(0)], [np.empty(0)], []
    for rows in unequal:
        lead = (score[rows, None] - score[rows])[rewards[rows, None] > rewards[rows]]
        auc.append(np.where(lead == 0, 0.5, lead > 0).mean())
        best.append(per_token[rows[rewards[rows] == rewards[rows].max()]])
        worst.append(per_token[rows[rewards[rows] == rewards[rows].min()]])
        if score[rows].std() > 0:
            balance.append(rewards[rows].std() / score[rows].std())
    return np.array(auc, np.float64), np.concatenate(best), np.concatenate(worst), np.array(balance)


def _mean(values: NDArray[Any]) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


BATCH = 64  # samples


def streams_along(
    policy: Policy, samples: Sequence[Sample], want: Sequence[str], reference: Policy | None = None
) -> dict[str, list[NDArray[np.float64]]]:
    """Compute streams at the tokens that each sample's author chose, as arrays [A] by stream and sample.

    `samples`: encoded. `want`: as for `Policy.streams`; "kl" is exact, with respect to `reference`.
    """
    passes = Passes(MicroBatch(tokens=TOKENS))
    values: dict[str, list[NDArray[np.float64]]] = {name: [] for name in want}
    for start in range(0, len(samples), BATCH):
        batch = collate(samples[start : start + BATCH], 0).to(policy.device)
        streams = streams_of(policy, batch, want, passes, reference)
        for name in want:
            rows = zip(streams[name], batch.mask, strict=True)
            values[name] += [row[chosen].double().cpu().numpy() for row, chosen in rows]
    return values


@dataclass(frozen=True)
class RescoredLog:
    """N responses that the model can read; the rows of an episode are one response.

    `logp`: log-probs of the tokens that the author chose, by response. `clusters`: [N] labels of the prompts'
    clusters of near-copies. `dropped`: numbers of unreadable samples, by reason; `examples`: the first
    message of each reason.
    """

    responses: Sequence[Sequence[Sample]]
    logp: Sequence[NDArray[np.float64]]
    clusters: NDArray[np.int64]
    dropped: Counter[str]
    examples: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, log: Sequence[Sample], policy: Policy) -> RescoredLog:
        """Score a log. The result is empty if the model can read no sample."""
        valid = select_valid(DrawnGroups(list(log)), policy.encoder, None, ())
        samples = [sample.replace(learn=None) for sample in valid.samples]  # all that the author chose
        token_logp = streams_along(policy, samples, ["logp"])["logp"]
        rows: dict[Any, list[int]] = {}
        for i, s in enumerate(samples):
            rows.setdefault((s.prompt_id, i if s.episode is None else s.episode), []).append(i)
        logp = [np.concatenate([token_logp[i] for i in members]) for members in rows.values()]
        responses = [[samples[i] for i in members] for members in rows.values()]
        texts = {members[0].prompt_id: plain(members[0].prompt) for members in responses}
        labels = clusters(list(texts.values()), DataConfig().near_copies).tolist()
        number = dict(zip(texts, labels, strict=True))
        response_labels = np.array([number[members[0].prompt_id] for members in responses], np.int64)
        return cls(responses, logp, response_labels, valid.dropped, valid.examples)

    @property
    def totals(self) -> NDArray[np.float64]:
        """Log-probs of complete responses, [N]."""
        return np.array([logp.sum() for logp in self.logp], np.float64)

    @property
    def behavior(self) -> NDArray[np.float64]:
        """Log-probs under the behavior policy, [N]; NaN if unknown, or if its distribution was truncated."""
        totals = []
        for rows in self.responses:
            is_truncated = any(s.truncation or s.kept is not None for s in rows)
            totals.append(math.nan if is_truncated else sum(_chosen(s, s.behavior_logp).sum() for s in rows))
        return np.array(totals, np.float64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Lengths in tokens, [N]."""
        return np.array([len(logp) for logp in self.logp], np.int64)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Rewards, [N], NaN where unknown."""
        return np.array([total_reward(rows[0]) for rows in self.responses], np.float64)

    def scored(self) -> RescoredLog:
        """Keep the responses with a reward."""
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
        """Say why these scored responses allow no off-policy estimate; empty if they may."""
        if not self.responses:
            return "the log has no scored responses"
        unknown = sum(any(not s.knows_behavior or s.truncation for s in rows) for rows in self.responses)
        if unknown:
            rows = f"{unknown} of its {len(self.responses)} responses"
            return f"the log has no log-probs of what wrote it for {rows}"
        return ""

    def logged(self) -> LoggedResponses:
        """Return log-ratios and rewards per token. A response's other reward comes with its last token."""
        lengths = self.lengths
        ratios, rewards = np.zeros((2, len(lengths), lengths.max()))
        for i, (rows, logp) in enumerate(zip(self.responses, self.logp, strict=True)):
            ratios[i, : lengths[i]] = logp - np.concatenate([_chosen(s, s.behavior_logp) for s in rows])
            token_rewards = np.concatenate([_chosen(s, s.token_reward) for s in rows])
            rewards[i, : lengths[i]] = np.nan_to_num(token_rewards)
            rewards[i, lengths[i] - 1] += rows[0].reward or 0.0
        return LoggedResponses(ratios, rewards, lengths, self.clusters)


def _chosen(sample: Sample, values: NDArray[Any] | None) -> NDArray[np.float64]:
    """Select values at the tokens that the author chose; NaN where unknown."""
    assert sample.action is not None
    if values is None:
        return np.full(int(sample.action.sum()), np.nan)
    return np.asarray(values[sample.action], np.float64)
