"""What objectives need of their data: where data don't have it, who provides it, and the way out.

The needs are listed at the end, each with what tells it from others of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import Any, Literal, Protocol, Self, TypeVar

import torch

from agro.errors import Refused
from agro.objectives.reduce import Groups, Pairs, by_experts, ties
from agro.types import Batch, Tensor

__all__ = ["ColumnNeed", "GroupSize", "Need", "Provider", "Stream", "except_experts"]

# Who provides it: the stored samples; a forward pass of the reference; the trainer's forward pass when the
# batch is drawn; its forward pass in the step; the value head beside the policy; the store in
# data.value_store.
Provider = Literal["record", "reference", "draw", "step", "value_head", "value_store"]


TIES_WAY_OUT = 'train on votes (votes = "mean"), or on judgments with a winner'
APART = (
    0.1  # nats a token, on average over a response, between two policies: above what engines and types round
)


class StoredFields(Protocol):
    """What is known of a stored sample before it is read."""

    @property
    def scored(self) -> bool: ...
    @property
    def knows_behavior(self) -> bool: ...
    @property
    def truncation(self) -> str: ...


class Need(str):
    """One need. It is its name, so that it prints, sorts, compares and hashes as that."""

    provider: Provider
    what: str  # as messages name it
    way_out: str
    least = 1  # responses that a group must have
    fresh_only = False  # whether a stored sample can't have it
    optional = False  # whether stored samples without it are skipped, as long as some have it
    but_experts = False  # whether rows of role "expert" needn't have it
    is_unknown: Callable[[StoredFields], bool] | None = None  # of a stored sample; None: as `fresh_only` says

    def __new__(
        cls, name: str, provider: Provider = "record", way_out: str = "", *, what: str = "", **more: Any
    ) -> Self:
        """`more`: other attributes than those of its class."""
        need = super().__new__(cls, name)
        vars(need).update(provider=provider, way_out=way_out, what=what or name, **more)
        return need

    def refusal(
        self, name: str, missing: Sequence[str], total: int, unit: str = "rows", count: int | None = None
    ) -> Refused:
        """The error for data of which `missing` don't have it: counts, three records, and ways out.

        `count`: how many they are, where `missing` has only the first of them.
        """
        count = len(missing) if count is None else count
        return Refused(
            f"objective {name} needs {self.what}: {total - count} of {total} {unit} have it, "
            f"{count} don't (for one: {'; '.join(missing[:3])}). What to do: {self.way_out}."
        )

    def check(self, name: str, batch: Batch) -> None:
        """Raise `Refused` where rows of the batch don't have it."""

    def missing_in(self, sample: StoredFields) -> bool:
        """Whether a stored sample doesn't have it."""
        return self.fresh_only if self.is_unknown is None else self.is_unknown(sample)

    def applies_to(self, role: str) -> bool:
        return not (self.but_experts and role == "expert")

    def without(self, batch: Batch) -> Batch:
        """The batch with this need withheld: what a check must notice."""
        return batch


class ColumnNeed(Need):
    """A number of each row [B], of each token in the mask [B,T], or of each part of the reward [B,K]: a field
    or an `extra` of the batch."""

    field = ""  # of the batch, where it has another name
    is_logp = False  # whether it is the log-prob of another policy
    of_parts = False
    must_be: float | None = None  # the only number that will do

    def of(self, batch: Batch) -> Tensor | None:
        value = getattr(batch, self.field or self, None)
        return batch.extra.get(self) if value is None else value

    def missing(self, batch: Batch) -> Tensor:
        """[B] rows without it, of whatever role."""
        value = self.of(batch)
        if value is None or (self.of_parts and not value.shape[1]):
            return torch.ones_like(batch.mask[:, 0])
        known = value.isfinite() if self.must_be is None else value == self.must_be
        if self.of_parts:
            return ~known.all(1)
        return (batch.mask & ~known).any(1) if value.dim() == 2 else ~known

    def check(self, name: str, batch: Batch) -> None:
        missing_B = self.missing(batch)
        if self.but_experts:
            missing_B = missing_B & ~by_experts(batch)
        if missing_B.any():
            rows = [batch.ids[row] for row in missing_B.nonzero().flatten().tolist()]
            raise self.refusal(name, rows, len(missing_B))

    def without(self, batch: Batch) -> Batch:
        value = self.of(batch)
        assert value is not None
        unknown = torch.full_like(value, math.nan)
        if self in batch.extra:
            return batch.replace(extra={**batch.extra, self: unknown})
        return batch.replace(**{self.field or self: unknown})


class OfReference(ColumnNeed):
    """Responses that the reference wrote: the recorded log-probs are its own."""

    def missing(self, batch: Batch) -> Tensor:
        assert batch.behavior_logp is not None
        assert batch.ref_logp is not None
        gap_BT = torch.where(batch.mask, batch.behavior_logp.double() - batch.ref_logp.double(), 0.0).abs()
        return ~(gap_BT.sum(1) / batch.mask.sum(1) <= APART)

    def without(self, batch: Batch) -> Batch:
        assert batch.ref_logp is not None
        return batch.replace(behavior_logp=batch.ref_logp - 2 * APART)


class GroupSize(Need):
    """So many responses in each group."""

    def too_small(self, batch: Batch) -> Tensor:
        """[G] groups that an objective with this need can't use."""
        groups = Groups.of(batch)
        if not self.but_experts:
            return groups.n < self.least
        policy_G = groups.sum(~groups.by_expert)
        return (policy_G > 0) & (policy_G < self.least)

    def without(self, batch: Batch) -> Batch:
        """The first response in a group of its own."""
        alone_B = batch.response == batch.response[0]
        group = torch.where(alone_B, batch.n_groups, batch.group)
        return batch.replace(group=group, group_names=(*batch.group_names, "alone"))


class JudgedPairs(GroupSize):
    """A judged pair in each group. One with equal votes, a tie, has no winner and is none."""

    reads_ties = False  # whether a tie is a pair as well: votes are read, or who won makes no difference

    def without_ties(self, batch: Batch) -> tuple[Batch, int]:
        """The batch with the pairs that are some to this need, and how many aren't."""
        if self.reads_ties or batch.pairs is None or batch.votes is None:
            return batch, 0
        won_P = ~ties(batch)
        return batch.replace(pairs=batch.pairs[won_P], votes=batch.votes[won_P]), int((~won_P).sum())

    def too_small(self, batch: Batch) -> Tensor:
        return Pairs.of(batch).count == 0

    def check(self, name: str, batch: Batch) -> None:
        pairs = batch.pairs
        if pairs is None or not len(pairs):
            raise self.refusal(name, batch.ids, len(batch.mask))
        group, response = batch.group[pairs], batch.response[pairs]
        wrong_P = (group[:, 0] != group[:, 1]) | (response[:, 0] == response[:, 1])
        if wrong_P.any():
            examples = "; ".join(_named(batch, wrong_P)[:3])
            raise Refused(
                f"objective {name}: pairs: expected each to join two responses to one prompt, but "
                f"{int(wrong_P.sum())} of {len(pairs)} pairs don't (for one: {examples}). What to do: remove "
                "these pairs."
            )
        if not self.reads_ties and ties(batch).all():
            raise Refused(
                f"objective {name}: pairs: expected judgments with a winner, but the votes of all "
                f"{len(pairs)} pairs are equal (for one: {_named(batch, ties(batch))[0]}). What to do: "
                f"{TIES_WAY_OUT}."
            )

    def without(self, batch: Batch) -> Batch:
        return batch.replace(pairs=None)


class Votes(Need):
    """Counts of votes for both responses of each pair."""

    def check(self, name: str, batch: Batch) -> None:
        assert batch.pairs is not None
        if batch.votes is None:
            missing_P = torch.ones_like(batch.pairs[:, 0], dtype=torch.bool)
        else:
            missing_P = ~batch.votes.isfinite().all(1)
        if missing_P.any():
            raise self.refusal(name, _named(batch, missing_P), len(missing_P), "pairs")

    def without(self, batch: Batch) -> Batch:
        return batch.replace(votes=None)


class Stream(Need):
    """Numbers [B,T] ("value": [B]) that the model gives beside the log-probs, with gradient.

    "proposal" is q of the token, q ∝ π^(1/κ), a constant, and "proposal_mean" the mean of log π(a) over q(a).
    """

    marked_by = ""  # the `extra` [B,T] of the tokens that it is at; "": those of the mask
    temperature: float  # κ
    draws: int  # tokens drawn from q in its place; 0: q itself
    seed: float  # of the draws

    def __new__(cls, name: str, provider: Provider = "step", way_out: str = "", **more: Any) -> Self:
        way_out = way_out or f'pass it: streams={{"{name}": …}}'
        return super().__new__(cls, name, provider, way_out, **{"what": f'the stream "{name}"', **more})

    def check(self, name: str, batch: Batch) -> None:
        if not self.marked_by:
            return
        marked = batch.extra.get(self.marked_by)
        if marked is None or marked.shape != batch.mask.shape:
            raise self.refusal(name, batch.ids, len(batch.mask))


N = TypeVar("N", bound=Need)


def changed(need: N, **values: object) -> N:
    """The same need with other values of its attributes."""
    other = copy(need)
    vars(other).update(values)
    return other


def except_experts(need: N) -> N:
    """The same need, which rows of role "expert" needn't fulfil: nothing of it is read of them."""
    return changed(need, but_experts=True)


def _named(batch: Batch, chosen_P: Tensor) -> list[str]:
    """Pairs of a batch as "WINNER over LOSER"."""
    assert batch.pairs is not None
    chosen = batch.pairs[chosen_P].tolist()
    return [f"{batch.ids[winner]} over {batch.ids[loser]}" for winner, loser in chosen]


def _is_unscored(sample: StoredFields) -> bool:
    return not sample.scored


def _lacks_behavior(sample: StoredFields) -> bool:
    """Recorded log-probs are over the same tokens as the trainer's: all, or kept sets that are recorded."""
    return not sample.knows_behavior or bool(sample.truncation)


_scores: dict[str, Any] = {"optional": True, "is_unknown": _is_unscored}
REWARD = ColumnNeed(
    "reward", "record", "score them (agro score STORE --reward NAME), or train on them with sft", **_scores
)
REWARD_PARTS = ColumnNeed(
    "reward_parts",
    "record",
    "score them with several rewards (reward.functions) in the run that trains on them, or choose another "
    "advantage",
    what="reward_parts (the value of each of several rewards)",
    of_parts=True,
    **_scores,
)
PART_WEIGHTS = ColumnNeed(
    "part_weights",
    "record",
    REWARD_PARTS.way_out,
    what="part_weights (the weight of each of several rewards)",
    of_parts=True,
    **_scores,
)
FRESH = ColumnNeed(
    "fresh",
    "record",
    "train on fresh samples alone (data.replay = 0, train.updates = 1), or use agro, which is right at any "
    "staleness",
    what="samples of staleness 0 (made by the present weights)",
    field="staleness",
    must_be=0.0,
    fresh_only=True,
)
REF_LOGP = ColumnNeed(
    "ref_logp",
    "reference",
    "pass the reference's log-probs, or set beta = 0 where the objective allows it",
    is_logp=True,
)
BEHAVIOR_LOGP = ColumnNeed(
    "behavior_logp",
    "record",
    "sample again, without greedy choices, and with top-k, top-p or min-p only where the kept sets are "
    "recorded (embedded engine, sampler.keep_sets = true), or use an objective that doesn't need them, "
    "such as agro",
    is_logp=True,
    is_unknown=_lacks_behavior,
)
# The same column, of samples of any staleness: for what corrects for whoever generated them.
DRAWN_LOGP = ColumnNeed(
    "old_logp", "draw", "pass the trainer's log-probs when the batch was drawn", is_logp=True
)
OLD_LOGP = changed(
    DRAWN_LOGP,
    fresh_only=True,
    what="old_logp (the trainer's log-probs when its samples were made)",
    way_out="train on fresh samples alone (data.replay = 0), use ratios against recorded behavior log-probs, "
    "or use agro",
)
OF_REFERENCE = OfReference(
    "of_reference",
    "record",
    "train on samples of the reference alone (agro sample --model REFERENCE, agro score, data.replay = 1), "
    'or set regularizer = "sequence"',
    what="responses of the reference (recorded log-probs within 0.1 nats a token of the reference's)",
)
DRAWN_VALUE = ColumnNeed("old_value", "draw", "pass old_value, the values when the batch was drawn")
STORED_VALUE = ColumnNeed(
    "stored_value",
    "value_store",
    "sample those prompts from the reference (agro sample --model REFERENCE -n 8), score them, and set "
    "data.value_store to that store; or set data.value_half_life, by which it is tracked",
)
STORED_QUANTILE = ColumnNeed(
    "stored_quantile",
    "value_store",
    "sample those prompts from the reference (agro sample --model REFERENCE -n 8), score them as these are, "
    "and set data.value_store to that store",
    **_scores,
)
HINTED = ColumnNeed(
    "hinted",
    "record",
    'pass extra={"hinted": …}, 1 where a response was written with a hint in its prompt, else 0',
)
MEANING = ColumnNeed(
    "meaning",
    "record",
    "name a function that gives the number of a response's meaning (reward.meaning); fresh responses get it",
    what="meaning (a number that responses of one meaning share)",
)
ADD_RESPONSES = (
    "sample more responses to each prompt (data.complete_groups does it in a run), or leave such groups "
    "out (objective.singletons=drop)"
)
GROUPS = GroupSize("groups", "record", ADD_RESPONSES, what="groups of at least 2 responses", least=2)
TRIPLES = GroupSize("triples", "record", ADD_RESPONSES, what="groups of at least 3 responses", least=3)
PAIRS = JudgedPairs(
    "pairs",
    "record",
    "import judgments (agro import, records of prompt, chosen and rejected), drop groups without pairs "
    "(objective.singletons=drop), or use an objective on rewards, such as agro",
    what="pairs (two responses to one prompt, the better one first)",
    least=2,
)
PAIRS_AND_TIES = changed(PAIRS, reads_ties=True)
VOTES = Votes(
    "votes",
    "record",
    'import them (votes_chosen and votes_rejected), or set votes = "ignore"',
    what="the votes of each pair",
)
KL = Stream("kl", "reference")
REF_MEAN = Stream("ref_mean", "reference")
REF_SQUARE = Stream("ref_square", "reference")
ENTROPY = Stream("entropy")
NORMALIZER = Stream("normalizer")  # log Σ_a exp of the logits
PROPOSAL = Stream("proposal", temperature=1.0, draws=0, seed=0.0)
PROPOSAL_MEAN = Stream("proposal_mean", temperature=1.0, draws=0, seed=0.0)
OBSERVED_LOGP = Stream(  # at other tokens than the objective's
    "observed_logp",
    marked_by="observed",
    what="the tokens that an environment answered (objective.observations)",
    way_out="play episodes ([environment]), train on stored ones with their tokens, or set "
    "objective.observations = 0",
)
VALUE = Stream("value", "value_head")
PREFIX_VALUE = Stream("prefix_value", "value_head")

NEEDS: tuple[Need, ...] = (
    *(KL, REF_MEAN, REF_SQUARE, ENTROPY, PROPOSAL, PROPOSAL_MEAN, NORMALIZER, VALUE, PREFIX_VALUE),
    OBSERVED_LOGP,
    *(REWARD, REWARD_PARTS, PART_WEIGHTS, FRESH, REF_LOGP, BEHAVIOR_LOGP, OF_REFERENCE, OLD_LOGP),
    *(DRAWN_VALUE, STORED_VALUE, STORED_QUANTILE, HINTED, MEANING, GROUPS, TRIPLES, PAIRS, VOTES),
)


def ordered(needs: Collection[Need]) -> list[Need]:
    """In the order in which they are checked. Of needs with one name it keeps the one that is given."""
    chosen = {need: need for need in needs}
    return [chosen[need] for need in NEEDS if need in chosen]


def provided_by(provider: Provider, needs: Collection[Need]) -> list[Need]:
    return [need for need in ordered(needs) if need.provider == provider]


def grouping(needs: Collection[Need]) -> GroupSize | None:
    """The need that says which groups are too small; None where a group may have one response."""
    grouped = [need for need in needs if isinstance(need, GroupSize)]
    return max(grouped, key=lambda need: need.least, default=None)


def judging(needs: Collection[Need]) -> JudgedPairs | None:
    """The need of judged pairs; None where there is none."""
    return next((need for need in needs if isinstance(need, JudgedPairs)), None)


def least_responses(needs: Collection[Need], role: str = "policy") -> int:
    """The fewest responses that a group of this role alone may have."""
    return max((need.least for need in needs if need.applies_to(role)), default=1)
