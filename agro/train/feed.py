"""From drawn samples to a batch: which are valid, and what the objective needs besides the policy's own streams."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from agro.encoding import Encoder, Unusable
from agro.objectives import get, least_responses
from agro.store import Damaged, Drawn, Pair, Store
from agro.train.cache import ReferenceCache
from agro.train.collate import collate, staleness
from agro.train.learner import Learner
from agro.train.phases import Phase
from agro.train.state import Position
from agro.train.values import StoredValues
from agro.types import Batch, Sample

S = TypeVar("S", bound=Sample | Damaged)


@dataclass
class Valid:
    """The samples that can be trained on, encoded, and how many were dropped, by reason."""

    samples: list[Sample] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    made: frozenset[int | None] = frozenset()  # ids of what was made for this step

    def fresh(self, version: int) -> list[bool]:
        """[B] whether each sample was made by the weights of `version`, whoever made it."""
        return [staleness(s, version) == 0 for s in self.samples]

    def recent(self, version: int) -> list[bool]:
        """[B] the samples that KL and regret are estimated on: fresh ones, and those made for this step.

        Other processes may have made these some versions ago; then they are weighted by π/μ.
        """
        fresh = self.fresh(version)
        return [is_fresh or s.id in self.made for s, is_fresh in zip(self.samples, fresh, strict=True)]


def select_valid(drawn: Drawn, encoder: Encoder, max_length: int | None, needs: Collection[str]) -> Valid:
    """The drawn samples that have what is needed of them, encoded. The others are counted, and so are damaged ones.

    An episode that loses a sample is dropped as a whole, and so is a group that becomes too small. A pair
    that loses a response is dropped, and the other response with it where no pair remains for it.
    """
    valid = Valid(pairs=list(drawn.pairs))
    encoded: list[Sample] = []
    broken = {(d.prompt_id, d.episode) for d in drawn.damaged}
    for sample in drawn.samples:
        try:
            known = encoder.encode(sample, max_length)
        except Unusable as error:
            valid.dropped[error.reason] += 1
            broken.add((sample.prompt_id, sample.episode))
            continue
        if "reward" in needs and known.reward is None and known.token_reward is None:
            valid.dropped["no reward"] += 1
        else:
            encoded.append(known)
    if drawn.damaged:
        valid.dropped["damaged"] = len(drawn.damaged)
    kept = [s for s in encoded if s.episode is None or (s.prompt_id, s.episode) not in broken]
    if len(kept) < len(encoded):
        valid.dropped["another row of its episode was dropped"] = len(encoded) - len(kept)
    if "pairs" in needs:
        kept = _in_pairs(kept, valid)
    least = least_responses(set(needs))  # type: ignore[arg-type]
    before, after = count_responses([*drawn.samples, *drawn.damaged]), count_responses(kept)
    for sample in kept:
        if after[sample.prompt_id] < least <= before[sample.prompt_id]:
            valid.dropped["group too small after others were dropped"] += 1
        else:
            valid.samples.append(sample)
    return valid


def _in_pairs(samples: list[Sample], valid: Valid) -> list[Sample]:
    """The samples whose responses are in a pair, both of which are among `samples`; other pairs are removed."""
    response = {s.id: (s.prompt_id, s.id if s.episode is None else s.episode) for s in samples}

    def is_complete(pair: Pair) -> bool:
        if pair.winner not in response or pair.loser not in response:
            return False
        winner, loser = response[pair.winner], response[pair.loser]
        # Two rows of one episode aren't a pair; a step may draw both prompts of a pair across prompts.
        return winner != loser and winner[0] == loser[0]

    valid.pairs = [p for p in valid.pairs if is_complete(p)]
    joined = {response[i] for p in valid.pairs for i in (p.winner, p.loser)}
    kept = [s for s in samples if response[s.id] in joined]
    if len(kept) < len(samples):
        valid.dropped["the other response of its pair was dropped"] = len(samples) - len(kept)
    return kept


def one_each(samples: Sequence[S]) -> list[S]:
    """One sample of each response: those of one episode are one response."""
    by_response: dict[Any, S] = {}
    for i, sample in enumerate(samples):
        key = i if sample.episode is None else sample.episode
        by_response[sample.prompt_id, key] = sample
    return list(by_response.values())


def count_responses(samples: Sequence[Sample | Damaged]) -> Counter[str]:
    """Responses of each prompt."""
    return Counter(s.prompt_id for s in one_each(samples))


class Feed:
    """Makes the batches of one phase."""

    def __init__(
        self, phase: Phase, learner: Learner, values: StoredValues | None, cache: ReferenceCache | None
    ) -> None:
        self.phase, self.learner, self.values, self.cache = phase, learner, values, cache
        self.objective = get(phase.config.objective.name)
        self.needs = self.objective.needed(phase.config.objective.options)

    @classmethod
    def of(
        cls, phase: Phase, learner: Learner, values: StoredValues | None, store: Store, run: str, cached: int
    ) -> Feed:
        """`cached`: the last entry of other runs in the cache of reference log-probs that this run may use."""
        cache = None
        if phase.config.policy.cache_reference and learner.reference_key is not None:
            cache = ReferenceCache(store, run, learner, cached)
        return cls(phase, learner, values, cache)

    def valid(self, drawn: Drawn, made: Iterable[int]) -> Valid:
        """What of a draw can be trained on. `made`: ids of what was made for this step."""
        valid = select_valid(drawn, self.learner.encoder, self.phase.config.train.max_length, self.needs)
        valid.made = frozenset(made)
        return valid

    def batch(self, valid: Valid, position: Position) -> Batch | None:
        """The tensors of a step, with all that the objective and the diagnostics read; None where nothing is valid."""
        if not valid.samples:
            return None
        options = self.phase.options(position)
        batch = collate(valid.samples, self.learner.version, valid.pairs)
        if "old_logp" in self.needs:
            batch = batch.replace(old_logp=self.learner.logp(batch))
        if "stored_value" in self.needs:
            assert self.values is not None
            batch = self.values.fill(batch, valid.samples, options)
        return self._with_reference(batch, valid, options, position)

    def _with_reference(
        self, batch: Batch, valid: Valid, options: dict[str, Any], position: Position
    ) -> Batch:
        if "ref_logp" in self.needs and self.cache is not None:
            return self.cache.fill(batch, valid.samples, position.step + 1)
        if "ref_logp" in self.objective.needed(options):
            return batch.replace(ref_logp=self.learner.logp(batch, "reference"))
        # A schedule may have brought β to 0, or the objective never needs it: then diagnostics alone do, on fresh samples.
        if "ref_logp" in self.needs or self.phase.config.evaluate.beta is not None:
            return self._reference_of_recent(batch, valid)
        return batch

    def _reference_of_recent(self, batch: Batch, valid: Valid) -> Batch:
        rows = torch.tensor(valid.recent(self.learner.version)).nonzero()[:, 0]
        if not len(rows):
            return batch
        ref_logp = torch.full(batch.mask.shape, math.nan, dtype=torch.float64)
        ref_logp[rows] = self.learner.logp(batch.rows(rows), "reference").cpu()
        return batch.replace(ref_logp=ref_logp)
