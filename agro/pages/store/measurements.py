"""What a model, and a reference, say of stored responses: log-probs, ranking, coverage, weights, β; and the
mean reward of a log beside that of the policy's own responses to its prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agro.config import RunConfig
from agro.errors import Refused
from agro.models.encoding import InvalidSample
from agro.models.policy import Policy
from agro.objectives.needs import PAIRS
from agro.objectives.reduce import Groups, Pairs
from agro.rewards import Reward
from agro.rollout.evaluate import heldout, standard_error
from agro.rollout.rollout import EpisodeReward, embedded, load_rollout
from agro.store import DrawnGroups, Store
from agro.store.draw_rules import noise
from agro.store.records import are_repeats
from agro.train.collate import collate, total_reward
from agro.train.feed import Valid, select_valid
from agro.train.measure import ranking, summary
from agro.train.micro import TOKENS, MicroBatch
from agro.train.phases import derive
from agro.train.source import stored_prompt
from agro.train.step import Passes, streams_of
from agro.train.trainable import pairs_among
from agro.types import Batch, Prompt

LIMIT = 1000  # prompts that are measured, unless more are asked for
PASSES = Passes(MicroBatch(tokens=TOKENS))
Values = NDArray[np.float64]


@dataclass(frozen=True)
class GroupValues:
    """The responses to one prompt, [N]; NaN where unknown. Log-probs are sums over tokens, in nats."""

    reward: Values
    tokens: Values
    logp: Values
    ref_logp: Values
    behavior_logp: Values
    repeats: NDArray[np.bool_]  # whether an earlier response of the group has the same text


@dataclass
class Measurements:
    """What a model says of the valid responses of some groups."""

    against_reference: bool
    total: int  # groups of the store
    groups: list[GroupValues] = field(default_factory=list)
    auc: Values = field(default_factory=lambda: np.empty(0))  # of groups with unequal rewards
    dropped: int = 0  # of their responses
    invalid: Counter[str] = field(default_factory=Counter)  # responses that can't be encoded, by reason
    examples: dict[str, str] = field(default_factory=dict)  # of each reason the first, in words
    template: dict[str, str] = field(default_factory=dict)  # what the chat template shows, by kind of content
    pairs: dict[str, Any] = field(default_factory=dict)

    def of(self, name: str) -> Values:
        """A value of all responses."""
        return np.concatenate([np.empty(0), *(getattr(group, name) for group in self.groups)])

    @property
    def per_token(self) -> dict[str, Values]:
        """Mean log π of a token, of the best and of the worst responses of groups with unequal rewards."""
        best, worst = [np.empty(0)], [np.empty(0)]
        for group in self._unequal():
            mean = group.logp / group.tokens
            best.append(mean[group.reward == np.nanmax(group.reward)])
            worst.append(mean[group.reward == np.nanmin(group.reward)])
        return {"best": np.concatenate(best), "worst": np.concatenate(worst)}

    @property
    def coverage(self) -> Values:
        """[G] π of all distinct responses to a prompt together: the share of π that the data show."""
        masses = [np.exp(group.logp[~group.repeats]).sum() for group in self.groups]
        return np.array(masses, np.float64).clip(max=1.0)

    @property
    def ess(self) -> tuple[float | None, int]:
        """(Σw)² / Σw² over the number n of responses with known log μ, w = π/μ; and n."""
        log_w = self.of("logp") - self.of("behavior_logp")
        log_w = log_w[np.isfinite(log_w)]
        if not len(log_w):
            return None, 0
        w = np.exp(log_w - log_w.max())
        return float(w.sum() ** 2 / (w @ w) / len(w)), len(w)

    @property
    def balance(self) -> Values:
        """[G] the β at which βρ differs as much as the rewards, in groups where both differ.

        ρ is log π/π_ref. Without a reference it is log π: at this β the optimum's log-ratios differ as much
        as the model's log-probs do now.
        """
        betas = []
        for group in self._unequal():
            rho = group.logp - group.ref_logp if self.against_reference else group.logp
            spread = rho[~np.isnan(group.reward)].std()
            if spread > 0:
                betas.append(float(np.nanstd(group.reward)) / spread)
        return np.array(betas)

    def _unequal(self) -> Iterator[GroupValues]:
        for group in self.groups:
            rewards = group.reward[~np.isnan(group.reward)]
            if len(rewards) and rewards.min() < rewards.max():
                yield group

    def to_json(self) -> dict[str, Any]:
        """Shares, nats and β; None where unknown."""
        ranked = summary("auc", self.auc)
        ess, weighted = self.ess
        of = "log π/π_ref" if self.against_reference else "log π"
        return {
            "auc_of": of,
            "auc": ranked.get("auc"),
            "auc_se": ranked["auc_se"] if len(self.auc) > 1 else None,
            "auc_groups": len(self.auc),
            "auc_dropped": self.dropped,
            "invalid": dict(self.invalid),
            "template": self.template or None,
            **self.pairs,
            "measured_groups": len(self.groups),
            "logp": _mean(self.of("logp")),
            "logp_per_token": _mean(self.of("logp") / self.of("tokens")),
            "ref_logp": _mean(self.of("ref_logp")),
            "ref_logp_per_token": _mean(self.of("ref_logp") / self.of("tokens")),
            "best_logp_per_token": _mean(self.per_token["best"]),
            "worst_logp_per_token": _mean(self.per_token["worst"]),
            "policy_coverage": _mean(self.coverage),
            "ess": ess,
            "concentrability": None if ess is None else 1 / ess,
            "ess_responses": weighted,
            "beta": quartiles(self.balance) | {"of": of},
        }


def quartiles(values: Values) -> dict[str, Any]:
    """The middle half of values, their median, and how many they are."""
    if not len(values):
        return {"low": None, "middle": None, "high": None, "groups": 0}
    low, middle, high = (float(x) for x in np.quantile(values, (0.25, 0.5, 0.75)))
    return {"low": low, "middle": middle, "high": high, "groups": len(values)}


def measure(
    store: Store, policy: Policy, reference: Policy | None = None, limit: int | None = LIMIT
) -> Measurements:
    """Measure up to `limit` groups, every so many in the order of the store, and all judged pairs.

    The ranking is the within-prompt AUC of log π/π_ref, or of log π without a reference (see
    `diagnostics.ranking`), and the share of the pairs whose winner has at least the log π of the loser
    (ranking accuracy, arXiv 2405.19534). Raises `Refused` where the two models have different tokenizers.
    """
    if reference is not None and reference.fingerprint != policy.fingerprint:
        raise Refused(
            f"expected a reference with the tokenizer of the model, got another ({reference.name}); use the "
            "model that training started from"
        )
    total = store.counts().groups
    stride = 1 if limit is None else max(1, -(-total // limit))
    measurements = Measurements(reference is not None, total)
    if policy.tokenizer.chat_template:
        measurements.template = policy.chat.template.abilities()
    auc = [np.empty(0)]
    for i, group in enumerate(store.groups()):
        if i % stride:
            continue
        samples = list(store.samples(prompt_id=group.prompt_id))
        valid = select_valid(DrawnGroups(samples), policy.encoder, None, set())
        measurements.invalid += valid.dropped
        measurements.examples = valid.examples | measurements.examples
        if not valid.samples:
            continue
        batch = collate(valid.samples, 0)
        logp_BT = streams_of(policy, batch, ["logp"], PASSES)["logp"]
        ref_logp_BT = torch.zeros_like(logp_BT)
        if reference is not None:
            ref_logp_BT = streams_of(reference, batch, ["logp"], PASSES)["logp"]
        measurements.groups.append(_group(valid, batch, logp_BT, ref_logp_BT if reference else None))
        rewards = {s.id: total_reward(s) for s in valid.samples}  # several rows may be of one sample
        if len({r for r in rewards.values() if r == r}) > 1:
            measurements.dropped += len(samples) - sum(r == r for r in rewards.values())
            auc.append(ranking(batch.replace(ref_logp=ref_logp_BT), logp_BT))
    measurements.auc = np.concatenate(auc)
    measurements.pairs = _measure_pairs(store, policy)
    return measurements


def _group(valid: Valid, batch: Batch, logp_BT: Tensor, ref_logp_BT: Tensor | None) -> GroupValues:
    groups = Groups.of(batch)
    unknown_BT = torch.full_like(logp_BT, torch.nan)
    behavior_BT = unknown_BT if batch.behavior_logp is None else batch.behavior_logp.double()
    # Those of truncated samples are over the tokens that were left, the model's over all.
    excluded = torch.tensor([bool(s.truncation) or s.kept is not None for s in valid.samples])
    behavior_BT = behavior_BT.masked_fill(excluded.to(behavior_BT.device)[:, None], torch.nan)
    texts: dict[int, str] = {}
    for number, sample in zip(batch.response.tolist(), valid.samples, strict=True):
        texts[number] = texts.get(number, "") + sample.response
    in_order = [texts[number] for number in range(len(texts))]
    return GroupValues(
        reward=_numpy(groups.reward),
        tokens=_numpy(groups.sum_tokens(torch.ones_like(logp_BT))),
        logp=_numpy(groups.sum_tokens(logp_BT)),
        ref_logp=_numpy(groups.sum_tokens(unknown_BT if ref_logp_BT is None else ref_logp_BT)),
        behavior_logp=_numpy(groups.sum_tokens(behavior_BT)),
        repeats=np.array(are_repeats(in_order)),
    )


def _numpy(values: Tensor) -> Values:
    return values.double().cpu().numpy()


def _mean(values: Values) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _measure_pairs(store: Store, policy: Policy) -> dict[str, Any]:
    """Of all judged pairs whose two responses are valid, which weigh equally."""
    gaps = [np.empty((0, 2))]
    for prompt_id, pairs in pairs_among(store.survey.each_summary(), {PAIRS}, store).items():
        groups = DrawnGroups(list(store.samples(prompt_id=prompt_id)), pairs)
        valid = select_valid(groups, policy.encoder, None, {PAIRS})
        if valid.pairs:
            batch = collate(valid.samples, 0, valid.pairs)
            logp_BT = streams_of(policy, batch, ["logp"], PASSES)["logp"]
            gaps.append(_gaps(Pairs.of(batch), logp_BT))
    right = np.concatenate(gaps) >= 0
    shares = right.mean(0).tolist() if len(right) else [None, None]
    return {
        "ranked_share": shares[0],
        "ranked_share_per_token": shares[1],
        "ranked_pairs": len(right),
    }


def _gaps(pairs: Pairs, logp_BT: Tensor) -> Values:
    """[P,2] log π of the winner minus that of the loser: in all, and per token."""
    total = pairs.gap(pairs.groups.sum_tokens(logp_BT))
    per_token = pairs.gap(pairs.groups.mean_tokens(logp_BT))
    return torch.stack([total, per_token], 1).cpu().numpy()


PROMPTS = 256  # that are asked, at most
RESPONSES = 4  # of the policy to each, at most; together about as many as PROMPTS
LOGGED = 64  # of the log to each, at most


@dataclass(frozen=True)
class OwnReward:
    """Means over the same prompts of the mean reward of their responses, with standard errors over prompts.

    `spread`: the standard deviation of the rewards of all responses, of the log's and the policy's.
    """

    log: float
    log_se: float
    own: float
    own_se: float
    difference_se: float
    spread: float
    prompts: int

    @property
    def lead(self) -> float:
        """How far the log is above the policy, in the rewards' spread; 0 where all rewards are equal."""
        return (self.log - self.own) / self.spread if self.spread else 0.0

    def to_json(self) -> dict[str, Any]:
        values = asdict(self) | {"lead": self.lead}
        return {name: None if math.isnan(value) else value for name, value in values.items()}


def own_reward(store: Store, policy: Policy, reward: Reward, config: RunConfig) -> OwnReward:
    """Score some of the log's responses, and the policy's to the same prompts, by one reward.

    The prompts have the columns of their first record. Responses are of the policy at its own temperature, of
    `config.sampler.max_new` tokens at most. Raises `Refused` where nothing can be asked or scored.
    """
    seed, scorer = config.train.seed, EpisodeReward(reward)
    names = sorted((group.prompt_id for group in store.survey.each_group()), key=lambda i: noise(seed, 0, i))
    asked = (prompt for name in names if (prompt := _askable(store, name, policy)) is not None)
    prompts = list(islice(asked, PROMPTS))
    if not prompts:
        raise Refused(
            f"--reward: {store.path}: expected prompts that leave room for a response, got none among "
            f"{len(names)}. What to do: leave --reward out"
        )
    n = max(1, min(RESPONSES, PROMPTS // len(prompts)))
    sampler = config.sampler.of_policy(config.policy.temperature, n)
    rollout = load_rollout(policy.encoder, embedded(policy), config.environment)
    result = heldout(rollout, scorer, prompts, sampler, derive(seed, "own reward"))
    logged = [_scores(store, prompt, scorer, keep=config.environment is not None) for prompt in prompts]
    known = [i for i, own in enumerate(result.rewards) if _known(own).size and logged[i].size]
    if not known:
        why = f", such as by: {result.errors[0]}" if result.errors else ""
        raise Refused(f"--reward: no prompt has a scored response of both log and policy{why}")
    log = np.array([logged[i].mean() for i in known])
    own = np.array([_known(result.rewards[i]).mean() for i in known])
    every = np.concatenate([np.concatenate([logged[i], _known(result.rewards[i])]) for i in known])
    errors = [standard_error(values) for values in (log, own, log - own)]
    return OwnReward(
        float(log.mean()), errors[0], float(own.mean()), errors[1], errors[2], float(every.std()), len(known)
    )


def _askable(store: Store, prompt_id: str, policy: Policy) -> Prompt | None:
    """A stored prompt; None where it leaves no room for a response, or no record of it is intact."""
    prompt = stored_prompt(store, prompt_id)
    try:
        if prompt is not None:
            policy.encoder.checked_prompt(prompt)
    except InvalidSample:
        return None
    return prompt


def _scores(store: Store, prompt: Prompt, scorer: EpisodeReward, *, keep: bool) -> Values:
    """Known rewards of the log's responses to a prompt. `keep`: an environment gave them, so that they are
    as stored."""
    rows = list(islice(store.samples(prompt_id=prompt.id, skip_damaged=True), LOGGED))
    samples = rows if keep else [row.replace(reward=None) for row in rows]
    of_response = {}
    for sample, score in zip(samples, scorer.score(samples), strict=True):
        of_response[sample.episode or sample.id] = math.nan if score.value is None else score.value
    return _known(np.array(list(of_response.values()), np.float64))


def _known(values: Values) -> Values:
    return values[~np.isnan(values)]
