"""What objectives need from their data: how its absence is detected, who provides it, and the way out.

The needs are listed at the end, each with the attributes that differ from its class's.
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
# batch is drawn; its forward pass in the step; the policy's value head; the store in data.value_store.
Provider = Literal["record", "reference", "draw", "step", "value_head", "value_store"]


TIES_WAY_OUT = 'train on votes (votes = "mean"), or on judgments with a winner'
APART = 0.1  # mean nats per token between two policies: above the rounding of engines and dtypes


class StoredFields(Protocol):
    """The fields of a stored sample that can be checked before it is read."""

    @property
    def scored(self) -> bool: ...
    @property
    def knows_behavior(self) -> bool: ...
    @property
    def truncation(self) -> str: ...


class Need(str):
    """One need: a string, its name, so that it prints, sorts, compares and hashes as that."""

    provider: Provider
    what: str  # its name in messages
    way_out: str
    least = 1  # the fewest responses that a group may have
    fresh_only = False  # whether only fresh samples can have it
    optional = False  # whether stored samples without it are skipped, as long as some have it
    but_experts = False  # whether rows of role "expert" needn't have it
    is_unknown: Callable[[StoredFields], bool] | None = None  # for stored samples; None: `fresh_only`

    def __new__(
        cls, name: str, provider: Provider = "record", way_out: str = "", *, what: str = "", **more: Any
    ) -> Self:
        """`more`: attributes that differ from those of its class."""
        need = super().__new__(cls, name)
        vars(need).update(provider=provider, way_out=way_out, what=what or name, **more)
        return need

    def refusal(
        self, name: str, missing: Sequence[str], total: int, unit: str = "rows", count: int | None = None
    ) -> Refused:
        """Make the error for data that lack it: counts, three of the `missing` records, and the way out.

        `count`: how many records lack it, if `missing` has only the first of them.
        """
        count = len(missing) if count is None else count
        return Refused(
            f"objective {name} needs {self.what}: {total - count} of {total} {unit} have it, "
            f"{count} don't (for example: {'; '.join(missing[:3])}). What to do: {self.way_out}."
        )

    def check(self, name: str, batch: Batch) -> None:
        """Raise `Refused` if rows of the batch lack it."""

    def missing_in(self, sample: StoredFields) -> bool:
        """Whether a stored sample lacks it."""
        return self.fresh_only if self.is_unknown is None else self.is_unknown(sample)

    def applies_to(self, role: str) -> bool:
        return not (self.but_experts and role == "expert")

    def without(self, batch: Batch) -> Batch:
        """The batch with this need withheld, which `check` must notice."""
        return batch


class ColumnNeed(Need):
    """A number per row [B], per token in the mask [B,T], or per part of the reward [B,K]: a field or an
    `extra` of the batch."""

    field = ""  # of the batch, if its name differs
    is_logp = False  # whether it is the log-prob of another policy
    of_parts = False
    must_be: float | None = None  # the only valid number

    def of(self, batch: Batch) -> Tensor | None:
        value = getattr(batch, self.field or self, None)
        return batch.extra.get(self) if value is None else value

    def missing(self, batch: Batch) -> Tensor:
        """[B] whether a row lacks it, whatever its role."""
        value = self.of(batch)
        if value is None or (self.of_parts and not value.shape[1]):
            return torch.ones_like(batch.mask[:, 0])
        valid = value.isfinite() if self.must_be is None else value == self.must_be
        if self.of_parts:
            return ~valid.all(1)
        return (batch.mask & ~valid).any(1) if value.dim() == 2 else ~valid

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
    """Responses that the reference wrote: their recorded log-probs are the reference's."""

    def missing(self, batch: Batch) -> Tensor:
        assert batch.behavior_logp is not None
        assert batch.ref_logp is not None
        gap_BT = torch.where(batch.mask, batch.behavior_logp.double() - batch.ref_logp.double(), 0.0).abs()
        return ~(gap_BT.sum(1) / batch.mask.sum(1) <= APART)

    def without(self, batch: Batch) -> Batch:
        assert batch.ref_logp is not None
        return batch.replace(behavior_logp=batch.ref_logp - 2 * APART)


class GroupSize(Need):
    """A minimum number of responses in each group."""

    def too_small(self, batch: Batch) -> Tensor:
        """[G] whether a group is too small for an objective with this need."""
        groups = Groups.of(batch)
        if not self.but_experts:
            return groups.n < self.least
        policy_G = groups.sum(~groups.by_expert)
        return (policy_G > 0) & (policy_G < self.least)

    def without(self, batch: Batch) -> Batch:
        """The batch with its first response in a group of its own."""
        alone_B = batch.response == batch.response[0]
        group = torch.where(alone_B, batch.n_groups, batch.group)
        return batch.replace(group=group, group_names=(*batch.group_names, "alone"))


class JudgedPairs(GroupSize):
    """A judged pair in each group. A tie, whose votes are equal, has no winner and doesn't count."""

    reads_ties = False  # whether ties count: votes are read, or it doesn't matter who won

    def without_ties(self, batch: Batch) -> tuple[Batch, int]:
        """The batch with the pairs that count, and the number of those that don't."""
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
                f"{int(wrong_P.sum())} of {len(pairs)} pairs don't (for example: {examples}). What to do: "
                "remove these pairs."
            )
        if not self.reads_ties and ties(batch).all():
            raise Refused(
                f"objective {name}: pairs: expected judgments with a winner, but the votes of all "
                f"{len(pairs)} pairs are equal (for example: {_named(batch, ties(batch))[0]}). What to do: "
                f"{TIES_WAY_OUT}."
            )

    def without(self, batch: Batch) -> Batch:
        return batch.replace(pairs=None)


class Votes(Need):
    """Vote counts for both responses of each pair."""

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
    """Numbers [B,T] ("value": [B]) that the model computes in addition to log-probs, with gradient.

    "proposal" is q of the token, q ∝ π^(1/κ), without gradient; "proposal_mean" is the mean of log π over q.
    """

    marked_by = ""  # the `extra` [B,T] that marks its tokens; "": they are those of the mask
    temperature: float  # κ
    draws: int  # number of tokens sampled to stand for q; 0: the exact q
    seed: float  # of these samples

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
    """A copy of the need with these attributes replaced."""
    replaced = copy(need)
    vars(replaced).update(values)
    return replaced


def except_experts(need: N) -> N:
    """The same need, which rows of role "expert" may lack: it isn't read there."""
    return changed(need, but_experts=True)


def _named(batch: Batch, chosen_P: Tensor) -> list[str]:
    """Pairs of a batch as "WINNER over LOSER"."""
    assert batch.pairs is not None
    chosen = batch.pairs[chosen_P].tolist()
    return [f"{batch.ids[winner]} over {batch.ids[loser]}" for winner, loser in chosen]


def _is_unscored(sample: StoredFields) -> bool:
    return not sample.scored


def _lacks_behavior(sample: StoredFields) -> bool:
    """Log-probs are missing, or over a truncated vocabulary that wasn't recorded, unlike the trainer's."""
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
    what="samples of staleness 0 (generated by the current weights)",
    field="staleness",
    must_be=0.0,
    fresh_only=True,
)
REF_LOGP = ColumnNeed(
    "ref_logp",
    "reference",
    "pass the reference's log-probs, or set beta = 0 if the objective allows it",
    is_logp=True,
)
BEHAVIOR_LOGP = ColumnNeed(
    "behavior_logp",
    "record",
    "sample again, without greedy choices, and with top-k, top-p or min-p only if the kept sets are "
    "recorded (embedded engine, sampler.keep_sets = true), or use an objective that doesn't need them, "
    "such as agro",
    is_logp=True,
    is_unknown=_lacks_behavior,
)
# The same column for samples of any staleness: a weight corrects for the policy that generated them.
DRAWN_LOGP = ColumnNeed(
    "old_logp", "draw", "pass the trainer's log-probs when the batch was drawn", is_logp=True
)
OLD_LOGP = changed(
    DRAWN_LOGP,
    fresh_only=True,
    what="old_logp (the trainer's log-probs when its samples were generated)",
    way_out="train on fresh samples alone (data.replay = 0), use ratios against recorded behavior log-probs, "
    "or use agro",
)
OF_REFERENCE = OfReference(
    "of_reference",
    "record",
    "train on samples of the reference alone (agro sample --model REFERENCE, agro score, data.replay = 1), "
    'or set regularizer = "sequence"',
    what="responses of the reference (recorded log-probs within 0.1 nats per token of the reference's)",
)
DRAWN_VALUE = ColumnNeed("old_value", "draw", "pass old_value, the values when the batch was drawn")
STORED_VALUE = ColumnNeed(
    "stored_value",
    "value_store",
    "sample those prompts from the reference (agro sample --model REFERENCE -n 8), score them, and set "
    "data.value_store to that store; or set data.value_half_life, which tracks it",
)
STORED_QUANTILE = ColumnNeed(
    "stored_quantile",
    "value_store",
    "sample those prompts from the reference (agro sample --model REFERENCE -n 8), score them as these "
    "were scored, and set data.value_store to that store",
    **_scores,
)
HINTED = ColumnNeed(
    "hinted",
    "record",
    'pass extra={"hinted": …}, 1 if a response was written with a hint in its prompt, else 0',
)
MEANING = ColumnNeed(
    "meaning",
    "record",
    "set reward.meaning to a function that numbers the meaning of a response, for fresh responses",
    what="meaning (a number that responses of one meaning share)",
)
ADD_RESPONSES = (
    "sample more responses to each prompt (data.complete_groups does it in a run), or drop such groups "
    "(objective.singletons=drop)"
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
OBSERVED_LOGP = Stream(  # at tokens outside the mask
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
    """These needs, in the order in which they are checked."""
    chosen = {need: need for need in needs}
    return [chosen[need] for need in NEEDS if need in chosen]


def provided_by(provider: Provider, needs: Collection[Need]) -> list[Need]:
    return [need for need in ordered(needs) if need.provider == provider]


def grouping(needs: Collection[Need]) -> GroupSize | None:
    """The need that says which groups are too small; None if groups of one response are enough."""
    grouped = [need for need in needs if isinstance(need, GroupSize)]
    return max(grouped, key=lambda need: need.least, default=None)


def judging(needs: Collection[Need]) -> JudgedPairs | None:
    """The need for judged pairs, or None."""
    return next((need for need in needs if isinstance(need, JudgedPairs)), None)


def least_responses(needs: Collection[Need], role: str = "policy") -> int:
    """The fewest responses that a group of this role alone may have."""
    return max((need.least for need in needs if need.applies_to(role)), default=1)
