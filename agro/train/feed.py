"""From drawn samples to a batch, with what the objective needs besides the policy's own streams."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from agro.config import DataConfig
from agro.errors import Refused
from agro.models.encoding import Encoder, InvalidSample
from agro.objectives import least_responses
from agro.objectives.needs import BEHAVIOR_LOGP, OBSERVED_LOGP, REWARD, REWARD_PARTS, Need
from agro.objectives.reduce import Groups
from agro.rewards.shaping import by_token, shaped
from agro.store import At, DamagedSample, DrawnGroups, Pair, Selection, Store
from agro.store.draw_rules import pick_likely
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
from agro.train.phases import Phase
from agro.train.trainable import check_drawn, named, rescaled
from agro.types import Batch, Sample, truncation
from agro.types.sample import ROLES


def per_token(learner: Learner, samples: Sequence[Sample], of: str) -> list[float]:
    """[B] of each encoded sample's response, in nats per token; NaN where it isn't known.

    of: "likelihood", log π / T; "behavior", −|log π − log μ| / T with the recorded log-probs. One forward
    pass.
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


def by_reward(samples: Sequence[Sample], power: float) -> dict[str, float]:
    """By prompt_id, the log of the mean of (|reward| + 1e-6)^power over the group's scored responses."""
    priorities: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if not math.isnan(reward := total_reward(sample)):
            priorities[sample.prompt_id].append((abs(reward) + 1e-6) ** power)
    return {group: math.log(sum(values) / len(values)) for group, values in priorities.items()}


S = TypeVar("S", bound=Sample | DamagedSample)


@dataclass
class Valid:
    """The encoded samples that can be trained on, and how many were dropped, by reason."""

    samples: list[Sample] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # of reasons in an encoding, the first in words
    weights: Mapping[str, float] = field(default_factory=dict)  # by prompt_id, of a group; 1 where not named
    made: frozenset[int | None] = frozenset()  # ids of the samples generated for this step

    def recent(self, version: int) -> list[bool]:
        """[B] the samples that KL and regret are estimated on: those of the weights of `version`, and those
        generated for this step. Not an expert's, nor those that were written with a hint.

        Other processes may have generated the latter with earlier weights; then they are weighted by π/μ.
        """
        return [
            (staleness(s, version) == 0 or s.id in self.made)
            and s.role != "expert"
            and s.meta.get("hint") is None
            for s in self.samples
        ]

    def select(self, samples: list[Sample], reason: str) -> None:
        """Go on with these samples alone; `reason`: why the others are dropped."""
        dropped = len(self.samples) - len(samples)
        if dropped:
            self.dropped[reason] = dropped
        self.samples = samples


def select_valid(
    drawn: DrawnGroups,
    encoder: Encoder,
    max_length: int | None,
    needs: Collection[Need],
    guard: Callable[[list[Sample]], list[Sample]] | None = None,
) -> Valid:
    """Encode the drawn samples that have what is needed. The others are counted, and so are damaged ones.

    A conversation whose earlier turns the chat template changes is several rows of one episode.

    An episode that loses a sample is dropped, and so is a group that becomes too small. A pair that loses a
    response is dropped, and so is its other response where it is in no other pair.

    Args:
        guard: returns those of the encoded samples that may be trained on; complete episodes.
    """
    valid = Valid(pairs=list(drawn.pairs))
    scored_roles = {role for role in ROLES for need in needs if need.optional and need.applies_to(role)}
    broken = {(d.prompt_id, d.episode) for d in drawn.damaged}
    for sample in drawn.samples:
        try:
            rows = encoder.rows(sample, max_length)
        except InvalidSample as error:
            valid.dropped[error.reason] += 1
            valid.examples.setdefault(error.reason, str(error))
            broken.add((sample.prompt_id, sample.episode))
            continue
        is_scored = sample.reward is not None or rows[0].token_reward is not None
        if is_scored or sample.role not in scored_roles:
            valid.samples += rows
        else:
            valid.dropped["no reward"] += 1
    valid.dropped += Counter(damaged=len(drawn.damaged))
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
        had, has = count_responses([*drawn.samples, *drawn.damaged]), count_responses(valid.samples)
        large = [s for s in valid.samples if has[s.prompt_id] >= minimum or had[s.prompt_id] < minimum]
        valid.select(large, "group too small after others were dropped")
    return valid


def _complete_pairs(valid: Valid) -> tuple[list[Pair], list[Sample]]:
    """The pairs of which both responses are there, and the samples of these responses."""
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
    """One sample of each response: those of one episode are one response."""
    samples_of: dict[Any, S] = {}
    for i, sample in enumerate(samples):
        key = i if sample.episode is None else sample.episode
        samples_of[sample.prompt_id, key] = sample
    return list(samples_of.values())


def count_responses(samples: Sequence[Sample | DamagedSample]) -> Counter[str]:
    return Counter(s.prompt_id for s in one_each(samples))


def draws_from(sample: Sample, temperature: float, *, over_kept: bool) -> bool:
    """Whether a sample was drawn from the distribution that the trainer's log-probs are of.

    That is the policy at its `temperature`, in the same context, with all of its layers, and without
    truncation, or (`over_kept`) with kept sets that the log-probs are over too. Not where it isn't known.
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


@dataclass(frozen=True)
class StepBatch:
    """The tensors of a step, and the rows that show what the policy itself does."""

    batch: Batch
    recent: Sequence[bool]  # [B] see `Valid.recent`
    comparable: Sequence[bool]  # [B] recent, and drawn as the trainer computes log-probs (`draws_from`)


class Feed:
    """Makes the batches of one phase."""

    def __init__(
        self, phase: Phase, learner: Learner, values: StoredValues | None, store: Store, run: str, cached: int
    ) -> None:
        """`cached`: the last entry of other runs that may be used from the cache of reference log-probs."""
        self.phase, self.learner, self.needs = phase, learner, phase.needs
        self.values: StoredValues | TrackedValues | None = values
        if (half_life := phase.config.data.value_half_life) is not None:
            self.values = TrackedValues(store, run, learner, half_life)
        self.cache: ReferenceCache | None = None
        if phase.config.policy.cache_reference and learner.reference_key is not None:
            self.cache = ReferenceCache(store, run, learner, cached)

    def valid(self, drawn: DrawnGroups, made: Iterable[int]) -> Valid:
        """The samples of a draw that can be trained on, with rewards as data.reward_scale maps them.

        `made`: ids of those generated for this step. Raises `Refused` where rewards of different scales meet.
        """
        config, data = self.phase.config, self.phase.config.data
        fresh = frozenset(made)
        if data.reward_scale:
            drawn = replace(drawn, samples=rescaled(drawn.samples, data))
        if REWARD in self.needs and len({sample.source for sample in drawn.samples}) > 1:
            check_drawn(drawn.samples, data)
        for need in [need for need in self.needs if need == BEHAVIOR_LOGP]:  # over known tokens
            anchored = [sample for sample in drawn.samples if need.applies_to(sample.role)]
            if missing := [named(sample) for sample in anchored if sample.truncation]:
                raise BEHAVIOR_LOGP.refusal(config.objective.name, missing, len(anchored))
        limit = data.max_drift
        guard = None if limit is None else partial(self._not_drifted, fresh=fresh, max_drift=limit)
        valid = select_valid(drawn, self.learner.encoder, config.train.max_length, self.needs, guard)
        valid.made = fresh
        return valid

    def _not_drifted(
        self, samples: list[Sample], *, fresh: frozenset[int | None], max_drift: float
    ) -> list[Sample]:
        """Those that were made for this step, or that fit data.max_drift."""
        stored = [s for s in samples if s.id not in fresh]
        close = per_token(self.learner, stored, "behavior")
        valid_ids = {s.id for s, value in zip(stored, close, strict=True) if value >= -max_drift} | fresh
        return [s for s in samples if s.id in valid_ids]

    def choose(self, store: Store, picked: Selection, at: At) -> Selection:
        """Of the groups that were picked as candidates those to train on; else all."""
        rule, data = picked.rule, picked.rule.data
        if not data.draws_candidates or len(picked.groups) <= rule.groups:
            return picked
        samples = store.draws.look(picked, at)
        if data.reward_power is not None:
            weights = by_reward(samples, data.reward_power)
        else:
            weights = self._closeness(samples, data)
        every = dict.fromkeys(picked.groups, -math.inf) | weights  # without a valid sample they come last
        return Selection(rule, pick_likely(every, rule.groups, at))

    def _closeness(self, samples: Sequence[Sample], data: DataConfig) -> dict[str, float]:
        """By prompt_id the mean of data.closeness over a group's valid samples, in units of data.temperature.

        Raises `Refused` where it isn't known.
        """
        encoded: list[Sample] = []
        for sample in samples:
            with suppress(InvalidSample):  # it would be dropped from the step
                encoded += self.learner.encoder.rows(sample, self.phase.config.train.max_length)
        values: dict[str, list[float]] = defaultdict(list)
        known = per_token(self.learner, encoded, data.closeness)
        for sample, value in zip(encoded, known, strict=True):
            if math.isnan(value):
                raise Refused(
                    f'data.order = "closest" with data.closeness = "{data.closeness}" needs the recorded '
                    f"log-probs of all tokens, but sample {sample.id} (prompt {sample.prompt_id}) doesn't "
                    'have them. What to do: data.roles = ["policy"], or data.closeness = "likelihood"'
                )
            values[sample.prompt_id].append(value)
        return {group: sum(of) / len(of) / data.temperature for group, of in values.items()}

    def batch(self, valid: Valid, step: int, options: dict[str, Any]) -> StepBatch | None:
        """The tensors of a step, with all that objective and diagnostics use; None without valid samples.

        Args:
            step: of the run, from 1.
            options: the objective's, at this step.
        """
        if not valid.samples:
            return None
        config, samples, version = self.phase.config, valid.samples, self.learner.version
        if config.reward.whiten != "none" or config.reward.clip is not None:
            samples = shaped(samples, config.reward)
        if config.reward.per_token or config.reward.per_step:
            samples = by_token(samples, config.reward.per_step, self.learner.encoder.decode)
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
        """With log-probs of the reference: of all rows where the objective needs them at this step.

        Where a schedule has reached β = 0, or the objective never needs the reference, only diagnostics use
        it, on recent rows.
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
