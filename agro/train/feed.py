"""Each step's samples and batch: stored groups that rules pick, and the fresh groups that a source added
to the store, all or only those with unequal rewards. The batch has all that the objective needs, except the
policy's own streams (log-probs, values and others)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch

from agro.config import DataConfig
from agro.errors import Refused
from agro.models.encoding import Encoder, InvalidSample
from agro.objectives import least_responses
from agro.objectives.needs import BEHAVIOR_LOGP, OBSERVED_LOGP, PAIRS, REWARD, REWARD_PARTS, Need
from agro.objectives.reduce import Groups
from agro.rewards.shaping import by_token, shaped
from agro.rollout import Activity, CollectResult
from agro.store import At, DamagedSample, DrawnGroups, Pair, Selection, Store
from agro.store.draw_rules import DrawRule, pick_likely
from agro.store.drawing import Draws, wait_for_groups
from agro.train.collate import (
    ReferenceCache,
    StoredValues,
    TrackedValues,
    collate,
    has_ratios,
    staleness,
    total_reward,
    with_reward_parts,
)
from agro.train.learner import Learner
from agro.train.phases import Phase, Position, scored_roles
from agro.train.source import FillRequest, Source, joined, stored_prompt
from agro.train.trainable import check_drawn, named, rescaled
from agro.types import Batch, Prompt, Sample, truncation


def per_token(learner: Learner, samples: Sequence[Sample], of: str) -> list[float]:
    """[B] per encoded sample, its response's closeness in nats per token; NaN if unknown. One forward pass.

    of: "likelihood", log π / T; "behavior", −|log π − log μ| / T with the recorded log-probs.
    """
    if not samples:
        return []
    batch = collate(samples, learner.version)
    groups, logp_BT = Groups.of(batch), learner.logp(batch)
    if of == "likelihood":
        mean_N = groups.mean_tokens(logp_BT)
    elif batch.behavior_logp is None:
        return [math.nan] * len(samples)
    else:
        mean_N = -groups.mean_tokens(logp_BT - batch.behavior_logp).abs()
    return [float(x) for x in mean_N[batch.response]]


def priorities(samples: Sequence[Sample], power: float) -> dict[str, float]:
    """By prompt_id, the log of the mean of (|reward| + 1e-6)^power over the group's scored responses."""
    powers: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if not math.isnan(reward := total_reward(sample)):
            powers[sample.prompt_id].append((abs(reward) + 1e-6) ** power)
    return {group: math.log(sum(values) / len(values)) for group, values in powers.items()}


S = TypeVar("S", bound=Sample | DamagedSample)


@dataclass
class Valid:
    """The encoded samples that can be trained on, and the number of dropped ones by reason."""

    samples: list[Sample] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # by reason, the first encoding error's message
    weights: Mapping[str, float] = field(default_factory=dict)  # of groups, by prompt_id; 1 if missing
    fresh: frozenset[int | None] = frozenset()  # ids of the samples generated for this step
    collected: CollectResult = field(default_factory=CollectResult)  # how they were generated
    prompts: int = 0  # number of prompts used for fresh groups
    missing: int = 0  # groups of data.replay that the store didn't have

    def recent(self, version: int) -> list[bool]:
        """[B] whether KL and regret are estimated on a sample: it was sampled with the weights of `version`,
        or generated for this step. Experts' samples and those generated with a hint are excluded.

        Other processes may have generated a step's samples with earlier weights; π/μ corrects for that.
        """
        return [
            (staleness(s, version) == 0 or s.id in self.fresh)
            and s.role != "expert"
            and s.meta.get("hint") is None
            for s in self.samples
        ]

    def select(self, samples: list[Sample], reason: str) -> None:
        """Retain only these samples; `reason`: why the others are dropped."""
        dropped = len(self.samples) - len(samples)
        if dropped:
            self.dropped[reason] = dropped
        self.samples = samples


def select_valid(
    draw: DrawnGroups,
    encoder: Encoder,
    max_length: int | None,
    needs: Collection[Need],
    guard: Callable[[list[Sample]], list[Sample]] | None = None,
) -> Valid:
    """Encode the drawn samples that meet the needs; count the others and the damaged ones.

    If the chat template changes earlier turns, a conversation becomes several rows of one episode.

    An episode that loses a sample is dropped, and so is a group that becomes too small. A pair that loses a
    response is dropped, and so is its other response unless another pair has it.

    Args:
        guard: returns the encoded samples that may be trained on, as complete episodes.
    """
    valid = Valid(pairs=list(draw.pairs))
    scored = scored_roles(needs)
    broken = {(d.prompt_id, d.episode) for d in draw.damaged}
    for sample in draw.samples:
        try:
            rows = encoder.rows(sample, max_length)
        except InvalidSample as error:
            valid.dropped[error.reason] += 1
            valid.examples.setdefault(error.reason, str(error))
            broken.add((sample.prompt_id, sample.episode))
            continue
        is_scored = sample.reward is not None or rows[0].token_reward is not None
        if is_scored or sample.role not in scored:
            valid.samples += rows
        else:
            valid.dropped["no reward"] += 1
    valid.dropped += Counter(damaged=len(draw.damaged))
    if broken:
        intact = [s for s in valid.samples if s.episode is None or (s.prompt_id, s.episode) not in broken]
        valid.select(intact, "another row of its episode was dropped")
    if guard is not None:
        valid.select(guard(valid.samples), "the policy has moved too far from it")
    if "pairs" in needs:
        valid.pairs, paired = _complete_pairs(valid)
        valid.select(paired, "the other response of its pair was dropped")
    if valid.dropped:
        minimum = least_responses(needs, "expert")
        had, has = count_responses([*draw.samples, *draw.damaged]), count_responses(valid.samples)
        large = [s for s in valid.samples if has[s.prompt_id] >= minimum or had[s.prompt_id] < minimum]
        valid.select(large, "group too small after others were dropped")
    return valid


def _complete_pairs(valid: Valid) -> tuple[list[Pair], list[Sample]]:
    """The pairs with both responses among the valid samples, and the samples of these responses."""
    response = {s.id: (s.prompt_id, s.id if s.episode is None else s.episode) for s in valid.samples}
    pairs, paired = [], set()
    for pair in valid.pairs:
        winner, loser = response.get(pair.winner), response.get(pair.loser)
        if winner is None or loser is None or winner == loser:  # two rows of one episode aren't a pair
            continue
        if winner[0] == loser[0]:  # a step may draw both prompts of a pair across prompts
            pairs.append(pair)
            paired |= {winner, loser}
    return pairs, [s for s in valid.samples if response[s.id] in paired]


def one_each(samples: Sequence[S]) -> list[S]:
    """One sample per response; all samples of an episode are one response."""
    samples_of: dict[Any, S] = {}
    for i, sample in enumerate(samples):
        key = i if sample.episode is None else sample.episode
        samples_of[sample.prompt_id, key] = sample
    return list(samples_of.values())


def count_responses(samples: Sequence[Sample | DamagedSample]) -> Counter[str]:
    return Counter(s.prompt_id for s in one_each(samples))


def draws_from(sample: Sample, temperature: float, *, over_kept: bool) -> bool:
    """Whether a sample was drawn from the distribution of the trainer's log-probs; False if unknown.

    That is the policy at its `temperature`, in the same context, with all of its layers, and without
    truncation, or (`over_kept`) with kept sets that the log-probs are over too.
    """
    sampling, context = sample.sampling, sample.context_tokens
    if not isinstance(sampling, dict) or sampling.get("temperature") != temperature:
        return False
    if sampling.get("skipped_layers") or sampling.get("adapted") or sample.meta.get("hint") is not None:
        return False
    if context is not None:
        assert sample.tokens is not None
        if not np.array_equal(context, sample.tokens[: len(context)]):
            return False
    return not truncation(sampling, recorded=over_kept and sample.kept is not None)


ROUNDS = 10  # largest number of sampling rounds per step


def fill(
    source: Source, store: Store, wanted: FillRequest, *, spread: bool
) -> tuple[CollectResult, int, int]:
    """Sample a step's fresh groups; with `spread`, sample again to replace groups with equal rewards.

    All of them stay in the store. After `ROUNDS` rounds the step has the groups obtained so far. Returns what
    was sampled, the number of prompts, and the number of responses in groups with equal rewards.
    """
    parts, prompts = [source.fill(wanted)], wanted.groups
    if not spread:
        return parts[0], prompts, 0
    groups = with_spread(store, parts[0].ids)
    while len(groups) < wanted.groups and len(parts) < ROUNDS:
        more, start = wanted.groups - len(groups), wanted.first + prompts
        parts.append(source.fill(FillRequest(wanted.step, more, start, before=prompts)))
        groups += with_spread(store, parts[-1].ids)
        prompts += more
    chosen = tuple(chain.from_iterable(groups))
    return joined(parts, chosen), prompts, sum(len(part.ids) for part in parts) - len(chosen)


def with_spread(store: Store, ids: Sequence[int]) -> list[list[int]]:
    """The ids of each group whose known rewards differ, in the order of `ids`."""
    groups: dict[str, list[Sample]] = {}
    samples = {sample.id: sample for sample in store.samples(ids=ids, skip_damaged=True)}
    for sample in (samples[i] for i in ids if i in samples):
        groups.setdefault(sample.prompt_id, []).append(sample)
    spread = []
    for group in groups.values():
        rewards = {reward for sample in group if not math.isnan(reward := total_reward(sample))}
        if len(rewards) > 1:
            spread.append([sample.id for sample in group if sample.id is not None])
    return spread


def weighted(rules: Iterable[DrawRule], draws: Draws, point: At) -> Iterator[tuple[DrawRule, float]]:
    """Yield each rule with the weight of its groups.

    If `data.spread` is a share, a rule becomes two: for groups with different and with equal rewards. Each
    kind weighs as much as its share of the store, so that choosing groups by their noisy rewards doesn't
    bias the expectation. A rule for a single group draws either kind.
    """
    for rule in rules:
        if isinstance(rule.data.spread, bool):
            yield rule, 1.0
            continue
        if rule.groups == 1:  # a mean over one group needs no weight
            yield replace(rule, data=rule.data.model_copy(update={"spread": False})), 1.0
            continue
        differing, equal = counts = [draws.count(kind, point) for kind in rule.kinds]
        total = sum(counts)
        if not all(counts) or (total < rule.groups and not rule.fewer):
            yield rule.kinds[equal > 0 and not differing], 1.0
            continue
        n = min(rule.groups, total)
        scaled = rule.data.spread * equal
        few = min(round(n * scaled / (scaled + differing)), n // 2)
        few = min(max(1, few, n - differing), n - 1, equal)
        for kind, groups, available in zip(rule.kinds, (n - few, few), counts, strict=True):
            yield replace(kind, groups=groups), available / total * n / groups


@dataclass(frozen=True)
class StepBatch:
    """The tensors of a step, and the rows that measure the current policy."""

    batch: Batch
    recent: Sequence[bool]  # [B] see `Valid.recent`
    comparable: Sequence[bool]  # [B] recent, and drawn as the trainer computes log-probs (`draws_from`)


@dataclass
class Feed:
    """Draws the samples of each step of one phase and builds their batch."""

    phase: Phase
    source: Source
    learner: Learner
    store: Store
    run: str  # its id
    activity: Activity
    values: StoredValues | TrackedValues | None = None  # of prompts, if the objective reads stored ones
    cached: int = -1  # the last entry of other runs in the cache of reference log-probs that this run may use

    def __post_init__(self) -> None:
        self.needs = self.phase.needs
        self.cache: ReferenceCache | None = None
        if self.phase.config.policy.cache_reference and self.learner.reference_key is not None:
            self.cache = ReferenceCache(self.store, self.run, self.learner, self.cached)

    def take(self, position: Position) -> Valid:
        """The samples of the step after `position`: groups picked in the store, and fresh groups."""
        phase, data, source = self.phase, self.phase.config.data, self.source
        point = At(self.run, position.step + 1, phase.config.train.seed, self.learner.version)
        picks: list[Selection] = []
        weights: dict[str, float] = {}  # of the picked groups, by prompt id
        for rule, weight in weighted(phase.rules(phase.at(position)), self.store.draws, point):
            self.activity.stage("waiting for the store")
            groups = wait_for_groups(self.store.draws, rule, point, set(weights), self.activity.check)
            picks.append(self.choose(Selection(rule, groups), point))
            weights |= dict.fromkeys(picks[-1].groups, weight)
        if PAIRS in self.needs:  # a source's judgments are drawn together with its samples
            picks.append(Selection(phase.rule(1), []))
        request = FillRequest(point.step, phase.config.train.groups - len(weights), position.prompts)
        filled, prompts, equal = fill(source, self.store, request, spread=data.spread is True)
        if data.complete_groups:
            completable = [self._completable(picked) for picked in picks]
            picks = [
                Selection(picked.rule, [prompt.id for prompt in group_prompts])
                for picked, group_prompts in zip(picks, completable, strict=True)
            ]
            if joining := list(chain.from_iterable(completable)):
                n = data.complete_groups
                completed = source.fill(FillRequest(point.step, 0, position.prompts, joining=joining, n=n))
                filled = joined([filled, completed], (*filled.ids, *completed.ids))
        draw = self.store.draws.draw_picked(picks, point, filled.ids, phase.joining())
        for sample in draw.damaged:
            self.activity.say(
                f"damaged: sample {sample.id} of {self.store.path}; dropped from step {point.step}"
            )
        valid = self.valid(draw, filled.ids)
        valid.weights, valid.collected, valid.prompts = weights, filled, prompts
        valid.missing = phase.stored_groups(phase.at(position)) - len(weights)
        valid.dropped += Counter({"too stale": filled.too_stale, "equal rewards in its group": equal})
        return valid

    def _completable(self, picked: Selection) -> list[Prompt]:
        """The stored prompts of picked groups; those that the model can't encode are dropped or refused."""
        prompts = []
        for prompt_id in picked.groups:
            prompt = stored_prompt(self.store, prompt_id)
            if prompt is None:
                continue
            try:
                self.learner.encoder.checked_prompt(prompt)
                prompts.append(prompt)
            except InvalidSample as error:
                if picked.rule.data.invalid_prompts == "refuse":
                    raise Refused(
                        f"data.complete_groups: stored prompt {prompt.id} can't be sampled to: {error}. What "
                        'to do: delete it (agro forget --prompt-id), or set data.invalid_prompts = "drop"'
                    ) from None
        return prompts

    def valid(self, draw: DrawnGroups, ids: Iterable[int]) -> Valid:
        """The samples of a draw that can be trained on, with rewards as data.reward_scale maps them.

        `ids`: the samples generated for this step. Raises `Refused` for mixed reward scales or truncation.
        """
        config, data = self.phase.config, self.phase.config.data
        fresh = frozenset(ids)
        if data.reward_scale:
            draw = replace(draw, samples=rescaled(draw.samples, data))
        if REWARD in self.needs and len({sample.source for sample in draw.samples}) > 1:
            check_drawn(draw.samples, data)
        for need in [need for need in self.needs if need == BEHAVIOR_LOGP]:  # which truncation invalidates
            anchored = [sample for sample in draw.samples if need.applies_to(sample.role)]
            if missing := [named(sample) for sample in anchored if sample.truncation]:
                raise BEHAVIOR_LOGP.refusal(config.objective.name, missing, len(anchored))
        limit = data.max_drift
        guard = None if limit is None else partial(self._not_drifted, fresh=fresh, max_drift=limit)
        valid = select_valid(draw, self.learner.encoder, config.train.max_length, self.needs, guard)
        valid.fresh = fresh
        return valid

    def _not_drifted(
        self, samples: list[Sample], *, fresh: frozenset[int | None], max_drift: float
    ) -> list[Sample]:
        """The samples that were generated for this step or are known to be within data.max_drift."""
        stored = [s for s in samples if s.id not in fresh]
        closeness = per_token(self.learner, stored, "behavior")
        valid_ids = {s.id for s, value in zip(stored, closeness, strict=True) if value >= -max_drift} | fresh
        return [s for s in samples if s.id in valid_ids]

    def choose(self, picked: Selection, point: At) -> Selection:
        """Select the groups to train on if the picked ones are candidates; else return all."""
        rule, data = picked.rule, picked.rule.data
        if not data.draws_candidates or len(picked.groups) <= rule.groups:
            return picked
        samples = self.store.draws.look(picked, point)
        if data.reward_power is not None:
            log_weights = priorities(samples, data.reward_power)
        else:
            log_weights = self._closeness(samples, data)
        every = dict.fromkeys(picked.groups, -math.inf) | log_weights  # without a valid sample: last
        return Selection(rule, pick_likely(every, rule.groups, point))

    def _closeness(self, samples: Sequence[Sample], data: DataConfig) -> dict[str, float]:
        """By prompt_id, the mean data.closeness of a group's valid samples, in units of data.temperature.

        Raises `Refused` if it is unknown.
        """
        encoded: list[Sample] = []
        for sample in samples:
            with suppress(InvalidSample):  # it would be dropped from the step
                encoded += self.learner.encoder.rows(sample, self.phase.config.train.max_length)
        values: dict[str, list[float]] = defaultdict(list)
        closeness = per_token(self.learner, encoded, data.closeness)
        for sample, value in zip(encoded, closeness, strict=True):
            if math.isnan(value):
                raise Refused(
                    f'data.order = "closest" with data.closeness = "{data.closeness}" needs the recorded '
                    f"log-probs of all tokens, but sample {sample.id} (prompt {sample.prompt_id}) doesn't "
                    'have them. What to do: data.roles = ["policy"], or data.closeness = "likelihood"'
                )
            values[sample.prompt_id].append(value)
        return {group: sum(each) / len(each) / data.temperature for group, each in values.items()}

    def batch(self, valid: Valid, step: int, options: dict[str, Any]) -> StepBatch | None:
        """Build the tensors that the objective and the diagnostics use; None without valid samples.

        Args:
            step: the run's step, from 1.
            options: the objective's, at this step.
        """
        if not valid.samples:
            return None
        config, samples, version = self.phase.config, valid.samples, self.learner.version
        if config.reward.whiten != "none" or config.reward.clip is not None:
            samples = shaped(samples, config.reward)
        if config.reward.places is not None:
            samples = by_token(samples, config.reward.places, self.learner.encoder.decode)
        over_kept = has_ratios(self.needs)
        observed = OBSERVED_LOGP in self.needs
        batch = collate(samples, version, valid.pairs, over_kept=over_kept, observed=observed)
        weights = [valid.weights.get(s.prompt_id, 1.0) for s in samples]
        batch = batch.replace(weight=torch.tensor(weights).double())
        if "old_logp" in self.needs:
            batch = batch.replace(old_logp=self.learner.logp(batch))
        if "old_value" in self.needs:
            batch = batch.replace(old_value=self.learner.values(batch))
        if REWARD_PARTS in self.needs:
            batch = with_reward_parts(batch, samples, config.reward.functions)
        if self.phase.takes_stored_value:
            assert self.values is not None
            batch = self.values.fill(batch, samples, options)
        recent = valid.recent(version)
        if "ref_logp" in self.needs and self.cache is not None:
            batch = self.cache.fill(batch, samples, step)
        else:
            batch = self._with_reference(batch, recent, "ref_logp" in self.phase.entry.needed(options))
        temperature = config.policy.temperature
        comparable = [
            is_recent and draws_from(sample, temperature, over_kept=over_kept)
            for sample, is_recent in zip(samples, recent, strict=True)
        ]
        return StepBatch(batch, recent, comparable)

    def _with_reference(self, batch: Batch, recent: Sequence[bool], needed: bool) -> Batch:
        """Add the reference's log-probs, for all rows if the objective needs them at this step.

        If it doesn't (at all, or since a schedule reached β = 0), only diagnostics may use them, on recent
        rows.
        """
        if needed:
            return batch.replace(ref_logp=self.learner.logp(batch, "reference"))
        rows = torch.tensor(recent).nonzero()[:, 0]
        measured = "ref_logp" in self.needs or self.phase.config.evaluate.beta is not None
        if not measured or not len(rows):
            return batch
        ref_logp = torch.full(batch.mask.shape, math.nan, dtype=torch.float64)
        ref_logp[rows] = self.learner.logp(batch.rows(rows), "reference").cpu()
        return batch.replace(ref_logp=ref_logp)
