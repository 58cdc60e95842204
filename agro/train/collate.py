"""Collates encoded samples into the tensors of one step, with what the store has for them: log-probs of the
reference, kept sets, and values of prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from agro.config import RewardPart, RunConfig
from agro.errors import Refused
from agro.objectives.needs import BEHAVIOR_LOGP, OLD_LOGP
from agro.rewards.shaping import counted, labeled, unrecorded
from agro.rollout.engines import capabilities
from agro.store import Pair, Store
from agro.train.phases import Phase
from agro.types import Batch, KeptSets, Sample, Text

if TYPE_CHECKING:
    from torch import Tensor

    from agro.train.learner import Learner


def collate(
    samples: Sequence[Sample],
    version: int,
    pairs: Sequence[Pair] = (),
    *,
    over_kept: bool = False,
    observed: bool = False,
) -> Batch:
    """Collate encoded samples into a batch, padded on the right.

    The reward of a response includes its token rewards. Raises `Refused` for what `Batch.of` and `Sample`
    refuse.

    Args:
        version: the learner's, to which staleness is relative.
        pairs: judgments of these samples.
        over_kept: whether log-probs are over the kept sets of the samples that have them.
        observed: whether `extra["observed"]` [B,T] marks the tokens of environments' replies.
    """
    row = {s.id: i for i, s in enumerate(samples)}
    lengths = [len(s.tokens) for s in samples if s.tokens is not None]
    T = max(lengths)
    mask = _padded([s.mask for s in samples], T, 0, torch.bool)
    hinted = [s.meta.get("hint") is not None for s in samples]
    extra = {"hinted": torch.tensor(hinted, dtype=torch.float64)}
    if any(s.token_reward is not None for s in samples):
        extra["token_reward"] = _padded([s.token_reward for s in samples], T, math.nan, torch.float64)
    meanings = [s.meta.get("meaning") for s in samples]
    if any("meaning" in s.meta for s in samples):
        values = [math.nan if meaning is None else meaning for meaning in meanings]
        extra["meaning"] = torch.tensor(values, dtype=torch.float64)
    if observed:
        extra["observed"] = _padded([s.observed for s in samples], T, 0, torch.bool)
    behavior = None
    if any(s.behavior_logp is not None for s in samples):
        behavior = _padded([s.behavior_logp for s in samples], T, math.nan, torch.float32)
    kept_sets = None
    if over_kept:
        sets = [None if s.kept is None or s.kept_count is None else (s.kept, s.kept_count) for s in samples]
        kept_sets = KeptSets.of(sets, mask)
    batch = Batch.of(
        mask=mask,
        reward=[total_reward(s) for s in samples],
        group=[s.prompt_id for s in samples],
        response=[i if s.episode is None else (s.prompt_id, s.episode) for i, s in enumerate(samples)],
        behavior_logp=behavior,
        staleness=[staleness(s, version) for s in samples],
        role=[s.role for s in samples],
        extra=extra,
        pairs=[(row[p.winner], row[p.loser]) for p in pairs] or None,
        votes=[(p.votes_winner, p.votes_loser) for p in pairs] or None,
        tokens=_padded([s.tokens for s in samples], T, 0, torch.long),
        lengths=lengths,
        ids=[f"sample {s.id} (prompt {s.prompt_id})" for s in samples],
    )
    return batch.replace(kept=kept_sets) if over_kept else batch


def with_reward_parts(batch: Batch, samples: Sequence[Sample], functions: Sequence[RewardPart]) -> Batch:
    """Add `extra["reward_parts"]` and `extra["part_weights"]` to the batch of `samples`: [B,K] for the K
    functions with a weight, after caps and gates; NaN if a part that counts is unknown."""
    named = labeled(functions)
    weights = [part.weight for part in functions if part.weight]
    parts = [
        [math.nan] * len(weights)
        if unrecorded(sample, named)
        else list(counted(sample.meta.get("reward_parts", {}), named).values())
        for sample in samples
    ]
    return _with_columns(batch, {"reward_parts": parts, "part_weights": [weights] * len(samples)})


def _with_columns(batch: Batch, columns: Mapping[str, Sequence[Any]]) -> Batch:
    """Add columns to `extra`, with a value or a list of values for each row."""
    device = batch.mask.device
    added = {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in columns.items()}
    return batch.replace(extra={**batch.extra, **added})


def staleness(sample: Sample, version: int) -> int | None:
    """Optimizer steps that the sample is behind `version`; None if its own version is unknown."""
    if sample.oldest_version < 0:
        return None
    return version - sample.oldest_version


def total_reward(sample: Sample) -> float:
    """The reward of the response plus those of its tokens; NaN if neither is known."""
    if sample.token_reward is None:
        return math.nan if sample.reward is None else sample.reward
    token_rewards = sample.token_reward[~np.isnan(sample.token_reward)]
    if sample.reward is None and not len(token_rewards):
        return math.nan
    return (sample.reward or 0.0) + float(token_rewards.sum(dtype="float64"))


def _padded(values: Sequence[Any], T: int, fill: float, dtype: torch.dtype) -> Tensor:
    """[B,T] one row per sample, padded on the right with `fill`; a value of None gives a row of `fill`."""
    rows = torch.full((len(values), T), fill, dtype=dtype)
    for padded, value in zip(rows, values, strict=True):
        if value is not None:
            padded[: len(value)] = torch.as_tensor(value.copy())
    return rows


OVER_KEPT = ", over kept sets"  # the end of the key if log-probs are over kept sets


class ReferenceCache:
    """Stored log-probs of the reference, computed by this run or another, keyed by sample, tokenizer,
    reference (weights and temperature), and whether they are over kept sets.

    The last bits of a log-prob depend on the rows of its batch, so a resumed run must use the same entries
    again: those of its own committed steps, and those of other runs that existed when it began (`until`).
    """

    def __init__(self, store: Store, run: str, learner: Learner, until: int) -> None:
        assert learner.reference_key is not None
        self.store, self.run, self.learner, self.until = store, run, learner, until
        self.key = learner.reference_key

    def fill(self, batch: Batch, samples: Sequence[Sample], step: int) -> Batch:
        """Add `ref_logp` to the batch of `samples`. Missing log-probs are computed and stored."""
        key = self.key if batch.kept is None else self.key + OVER_KEPT
        ids = [s.id for s in samples if s.id is not None]
        assert len(ids) == len(samples)
        cached = self.store.ledger.reference_logp(self.run, key, ids, until=self.until)
        sizes, times, device = batch.mask.sum(1).tolist(), Counter(ids), batch.mask.device
        ref_logp = torch.zeros(batch.mask.shape, dtype=torch.float64, device=device)
        missing = []
        for row, i in enumerate(ids):
            # Several rows of one sample are never stored.
            if times[i] == 1 and i in cached and len(cached[i]) == sizes[row]:
                values = torch.tensor(cached[i], dtype=torch.float64, device=device)
                ref_logp[row, batch.mask[row]] = values
            else:
                missing.append(row)
        if missing:
            rows = torch.tensor(missing, device=device)
            ref_logp[rows] = self.learner.logp(batch.rows(rows), "reference").to(device)
            single = [row for row in missing if times[ids[row]] == 1]
            new = {ids[row]: ref_logp[row][batch.mask[row]].float().cpu().numpy() for row in single}
            self.store.ledger.keep_reference_logp(self.run, step, key, new)
        return batch.replace(ref_logp=ref_logp)


def has_ratios(needs: Collection[str]) -> bool:
    """Whether an objective uses ratios of the policy to the distribution that its samples were drawn from.

    If so, all log-probs of samples with kept sets are over those sets; else they are over the vocabulary.
    """
    return BEHAVIOR_LOGP in needs or OLD_LOGP in needs


def recording(phases: Sequence[Phase], phase: Phase) -> RunConfig:
    """The configuration of a phase with `sampler.keep_sets` decided.

    A phase also records them for other phases of the run, which may draw its samples.
    """
    config = phase.config
    keep = config.sampler.keep_sets
    if keep is None:
        have_ratios = any(has_ratios(other.needs) for other in phases)
        keep = have_ratios and "reports_kept_sets" in capabilities(config.engine.kind)
    return config.model_copy(update={"sampler": config.sampler.model_copy(update={"keep_sets": keep})})


def _rewards_of(samples: Iterable[Sample]) -> dict[str, dict[str | int | None, float]]:
    """By prompt_id, the known rewards of its responses; an episode is one response."""
    rewards: dict[str, dict[str | int | None, float]] = {}
    for s in samples:
        reward = total_reward(s)
        if not math.isnan(reward):
            rewards.setdefault(s.prompt_id, {})[s.id if s.episode is None else s.episode] = reward
    return rewards


class StoredValues:
    """The rewards of a store's responses by prompt. β log mean exp(r/β) of them estimates V*(x) of the
    reference (A*PO, arXiv 2505.20686).

    The estimate is biased low, more so with fewer responses. It assumes that the responses are samples of the
    reference, which can't be checked here.
    """

    def __init__(self, rewards: Mapping[str, NDArray[np.float64]]) -> None:
        """`rewards`: prompt_id -> [n]"""
        self.rewards = rewards

    @classmethod
    def load(cls, path: str | Path, prompts: Mapping[str, Text]) -> StoredValues:
        """The rewards of all scored responses.

        `prompts`: by id. Raises `Refused` if one of them has none, or is another prompt in the store.
        """
        with Store.open(path, read_only=True, create=False) as store:
            store.experience.check_prompts(prompts.items())
            rewards_of = _rewards_of(store.samples(scored=True))
        missing = sorted(prompts.keys() - rewards_of.keys())
        if missing:
            raise Refused(
                f"data.value_store: {path}: expected scored samples of the reference for all {len(prompts)} "
                f"prompts that are trained on with stored values, but {len(missing)} have none (for example: "
                f"{', '.join(missing[:3])}). What to do: agro sample --model REFERENCE --prompts FILE --out "
                "STORE -n 8, then agro score"
            )
        return cls({prompt: np.array(list(rewards.values())) for prompt, rewards in rewards_of.items()})

    def value(self, prompt_id: str, beta: float) -> float:
        """The estimate, in units of reward; NaN for an unknown prompt, which the objective refuses."""
        if prompt_id not in self.rewards:  # added to the training store after the run began
            return math.nan
        r = self.rewards[prompt_id]
        return float(beta * (np.logaddexp.reduce(r / beta) - math.log(len(r))))

    def quantile(self, prompt_id: str, reward: float) -> float:
        """The share of the prompt's stored rewards that are at most `reward`; NaN if either is unknown."""
        if prompt_id not in self.rewards or math.isnan(reward):
            return math.nan
        return float((self.rewards[prompt_id] <= reward).mean())

    def fill(self, batch: Batch, samples: Sequence[Sample], options: Mapping[str, Any]) -> Batch:
        """Add `extra["stored_value"]` [B], at β = the option value_beta or else beta, and
        `extra["stored_quantile"]` [B] to the batch of `samples`."""
        beta = options.get("value_beta") or options["beta"]
        values = {name: self.value(name, beta) for name in {s.prompt_id for s in samples}}
        stored = [values[s.prompt_id] for s in samples]
        quantiles = [self.quantile(s.prompt_id, total_reward(s)) for s in samples]
        return _with_columns(batch, {"stored_value": stored, "stored_quantile": quantiles})


class TrackedValues:
    """The mean reward of a run's responses to a prompt, weighted by recency (SPO, arXiv 2509.13232).

    V̂(x) = (m + Σ_j w_j r_j) / (1 + Σ_j w_j), w_j = 2^(−staleness / half_life), over the scored responses of
    the run to x that aren't in the batch; m, the mean reward of the batch's other prompts, counts as one
    response. SPO's tracker is such a mean with a Beta prior, whose forgetting follows the KL between policies
    (abstract; its update rule is reconstructed). Here staleness replaces that KL, and rewards needn't be from
    0 to 1. The samples are its only state, so a resumed run has the same values.

    V̂(x) doesn't depend on the row's own response. So on fresh samples it shifts no expected gradient,
    whatever its value. A replayed response was seen by the policies that made later ones, so there it isn't
    independent, and a squared loss is pulled to V̂ in place of V*.
    """

    def __init__(self, store: Store, run: str, learner: Learner, half_life: float) -> None:
        """`learner`: staleness is relative to its version; `half_life`: in optimizer steps."""
        self.store, self.run, self.learner, self.half_life = store, run, learner, half_life

    def value(self, rewards: Sequence[tuple[int, float]], one_more: float | None) -> float:
        """V̂ of a prompt from its (version, reward) pairs and the reward `one_more` (None: unknown); NaN
        without any."""
        weights = [2 ** (-(self.learner.version - version) / self.half_life) for version, _ in rewards]
        total = math.fsum(w * reward for w, (_, reward) in zip(weights, rewards, strict=True))
        count = math.fsum(weights)
        if one_more is not None:
            total, count = total + one_more, count + 1
        return total / count if count else math.nan

    def fill(self, batch: Batch, samples: Sequence[Sample], options: Mapping[str, Any]) -> Batch:
        """Add `extra["stored_value"]` [B]; NaN without earlier responses and other prompts in the batch."""
        ids = {s.id for s in samples if s.id is not None}
        names = list(dict.fromkeys(s.prompt_id for s in samples))
        rewards = self.store.experience.rewards(self.run, names, without=ids)
        means = {name: math.fsum(of.values()) / len(of) for name, of in _rewards_of(samples).items()}
        values = {}
        for name in names:
            other_means = [mean for other, mean in means.items() if other != name]
            prior = math.fsum(other_means) / len(other_means) if other_means else None
            values[name] = self.value(rewards[name], prior)
        return _with_columns(batch, {"stored_value": [values[s.prompt_id] for s in samples]})
