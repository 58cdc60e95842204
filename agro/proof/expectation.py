"""All groups of n responses, and expected gradients by the objectives and the step that train."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from agro.objectives import get
from agro.proof.enumerable import Enumerable, multisets
from agro.train.step import MicroBatch, Passes, backward
from agro.types import Batch

VOTES = (3.0, 1.0)  # in each judged pair, for the winner and the loser
PER_TOKEN = ("ref_logp", "behavior_logp", "old_logp", "old_value")


@dataclass(frozen=True, eq=False)
class Expert:
    """A policy that adds one response to each group, and its rewards [X,Y]; `hinted`: by a hint."""

    policy: Enumerable
    reward: Tensor
    hinted: bool = False


@dataclass(frozen=True, eq=False)
class DataDistribution:
    """The distribution of groups: outcomes with rewards and probabilities. An outcome is a response, or a
    response with noise in its reward.

    There are O outcomes; without noise they are the Y responses. `judged`: the first two of a group are a
    pair, and the first is better with probability σ(r_1 − r_2) (Bradley–Terry).
    """

    behavior: Enumerable
    reward: Tensor  # [X,O]
    response: Tensor | None = None  # [O]; None: the responses themselves
    noise: Tensor | None = None  # [X,O] probability of the outcome given its response; None: 1
    staleness: float = 0.0  # optimizer steps; NaN: unknown
    judged: bool = False
    stored_value: Tensor | None = None  # [X] V* of the prompts, if it was estimated earlier
    old: Enumerable | None = None  # the policy when the batch was drawn; None: the behavior
    expert: Expert | None = None  # which adds one response to each group
    spread: bool = False  # whether groups of equal rewards are dropped (data.spread)

    @property
    def behavior_responses(self) -> Tensor:
        """[O] the responses of the behavior policy's outcomes."""
        return torch.arange(len(self.behavior.space.responses)) if self.response is None else self.response

    @property
    def outcomes(self) -> Tensor:
        """[O] the responses of all outcomes; the last Y are those of an expert."""
        if self.expert is None:
            return self.behavior_responses
        return torch.cat([self.behavior_responses, torch.arange(len(self.behavior.space.responses))])

    def probability(self) -> Tensor:
        """[X,O] current probabilities: the behavior may be the policy in training."""
        p = self._of_outcomes(self.behavior)
        return p if self.expert is None else torch.cat([p, self.expert.policy.logp().detach().exp()], 1)

    @property
    def rewards(self) -> Tensor:
        """[X,O]"""
        return self.reward if self.expert is None else torch.cat([self.reward, self.expert.reward], 1)

    def quantile(self, reference: Enumerable) -> Tensor:
        """[X,O] the probability that the reference's reward isn't above an outcome's."""
        above = self.reward[:, None, :] > self.rewards[:, :, None]
        return 1 - (self._of_outcomes(reference)[:, None, :] * above).sum(-1)

    def _of_outcomes(self, policy: Enumerable) -> Tensor:
        """[X,O] probabilities of the behavior policy's outcomes under a policy."""
        p = policy.logp().detach().exp()[:, self.behavior_responses]
        return p if self.noise is None else p * self.noise

    def behavior_logp(self, prompt: Tensor, outcome: Tensor) -> Tensor:
        """[B,T] as recorded: NaN if an expert wrote the response, unless it is a hinted one."""
        logp = _shifted(self.behavior, prompt, self.outcomes[outcome])
        if self.expert is None:
            return logp
        expert_logp = _shifted(self.expert.policy, prompt, self.outcomes[outcome])
        recorded = expert_logp if self.expert.hinted else torch.full_like(logp, math.nan)
        return torch.where((outcome >= len(self.behavior_responses))[:, None], recorded, logp)


@dataclass(frozen=True, eq=False)
class AllGroups:
    """All groups of outcomes of every prompt, for each of the equally probable sizes.

    Each group occurs once, in any order; judged ones in every order, the winner first and the loser second.
    """

    data: DataDistribution
    reference: Enumerable
    sizes: tuple[int, ...]

    @cached_property
    def groups(self) -> tuple[Tensor, Tensor, Tensor]:
        """For one prompt: [M] the outcomes of all groups, [M] the group of each, and [G] the number of orders
        of a group."""
        sampled, parts = self.data.reward.shape[1], []
        experts = torch.arange(sampled, len(self.data.outcomes))
        for n in self.sizes:
            if self.data.judged:
                groups = torch.cartesian_prod(*[torch.arange(sampled)] * n).view(-1, n)
                orders = torch.ones(len(groups), dtype=torch.float64)
            else:
                groups, orders = multisets(sampled, n)
            if len(experts):  # each group, followed by each response of the expert
                added = experts.repeat(len(groups))[:, None]
                groups = torch.cat([groups.repeat_interleave(len(experts), 0), added], 1)
                orders = orders.repeat_interleave(len(experts))
            parts.append((groups, orders))
        sizes = [group.shape[1] for group, _ in parts for _ in group]
        return (
            torch.cat([groups.flatten() for groups, _ in parts]),
            torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
            torch.cat([orders for _, orders in parts]),
        )

    @cached_property
    def pairs(self) -> Tensor:
        """[P,2] the first two of each group that has two, as positions among the outcomes of one prompt."""
        position = torch.arange(len(self.groups[1]))
        is_first = torch.cat([torch.ones(1, dtype=torch.bool), self.groups[1].diff() > 0])
        is_second = torch.cat([torch.zeros(1, dtype=torch.bool), is_first[:-1]]) & ~is_first
        return torch.stack([position[is_second] - 1, position[is_second]], 1)

    @cached_property
    def batch(self) -> Batch:
        """Each group's weight is its probability, so means over groups are expectations."""
        prompt, outcome = self._rows
        X, (_, group, orders) = self.data.behavior.space.prompts, self.groups
        number_X1 = torch.arange(X)[:, None]
        judgments = {}
        if self.data.judged:
            pairs = (number_X1[..., None] * len(group) + self.pairs).view(-1, 2)
            judgments = {"pairs": pairs, "votes": torch.tensor(VOTES).expand(len(pairs), 2)}
        batch = Batch.of(
            group=(number_X1 * len(orders) + group).flatten().tolist(),
            staleness=torch.full((len(prompt),), self.data.staleness, dtype=torch.float64),
            weight=self._weight(),
            **judgments,
            **columns(self.data, self.reference, prompt, outcome),
        )
        return batch if self._possible is None else batch.rows(self._possible)

    def next_batch(self) -> Batch:
        """The batch with current probabilities, after the behavior has changed, but not its support."""
        behavior_logp = self.data.behavior_logp(*self._rows)
        changed = {"weight": self._weight(), "behavior_logp": behavior_logp}
        if self.data.old is None:
            changed["old_logp"] = behavior_logp
        if self._possible is not None:
            changed = {name: value[self._possible] for name, value in changed.items()}
        return self.batch.replace(**changed)

    @property
    def response(self) -> Tensor:
        """[B] the response of each row, if all groups have some probability."""
        return self.data.outcomes[self._rows[1]]

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        """The prompt and the outcome of each row of all groups."""
        X, outcome = self.data.behavior.space.prompts, self.groups[0]
        return torch.arange(X).repeat_interleave(len(outcome)), outcome.repeat(X)

    @cached_property
    def _possible(self) -> Tensor | None:
        """[B] the rows of groups with some probability; None: all."""
        weight = self._weight()
        return None if weight.all() else weight.nonzero()[:, 0]

    def _weight(self) -> Tensor:
        """[B] the current probability of each row's group."""
        outcome, group, orders = self.groups
        p_XM = self.data.probability()[:, outcome]
        weight_XG = orders.repeat(len(p_XM), 1).scatter_reduce(1, group.expand_as(p_XM), p_XM, "prod")
        if self.data.judged:
            winner, loser = self.pairs.unbind(1)
            gap = self.data.reward[:, outcome[winner]] - self.data.reward[:, outcome[loser]]
            weight_XG[:, group[winner]] *= gap.sigmoid()
        if self.data.spread:
            reward_XM, index_XM = self.data.rewards[:, outcome], group.expand_as(p_XM)
            largest, smallest = (
                torch.zeros_like(weight_XG).scatter_reduce(1, index_XM, reward_XM, kind, include_self=False)
                for kind in ("amax", "amin")
            )
            weight_XG = weight_XG * (largest > smallest)
        return weight_XG[:, group].flatten()


def in_two_rows(batch: Batch) -> Batch:
    """Split each response of several tokens into two rows: its first token, and the others."""
    index = torch.arange(len(batch.mask)).repeat_interleave(2)
    is_first = torch.arange(batch.mask.shape[1]) == 1  # after the prompt
    takes_first = torch.arange(len(index)) % 2 == 0
    mask = batch.mask[index] & (is_first == takes_first[:, None])
    nonempty = mask.any(1)
    rows, mask = batch.rows(index[nonempty]), mask[nonempty]
    columns: dict[str, Tensor] = {"mask": mask}
    for name in PER_TOKEN:
        value = getattr(rows, name)
        columns[name] = torch.where(mask, value, math.nan)
    return rows.replace(**columns)


def meaning_of(outcome: Tensor) -> Tensor:
    """The number of a response's meaning: responses 0 and 1 share one, 2 and 3 the next, and so on."""
    return outcome // 2


PART_WEIGHTS = (1.0, 0.5)


def parts_of(rewards: Tensor) -> Tensor:
    """[X,Y] -> [X,Y,2]: two parts of each reward, its own and that of the next response."""
    return torch.stack([rewards, rewards.roll(-1, 1)], 2)


def columns(data: DataDistribution, reference: Enumerable, prompt: Tensor, outcome: Tensor) -> dict[str, Any]:
    """The columns of a batch for these outcomes of these prompts, [B] each."""
    space, response = data.behavior.space, data.outcomes[outcome]
    no_mask = torch.zeros(len(prompt), 1, dtype=torch.bool)
    behavior_logp = data.behavior_logp(prompt, outcome)
    old_logp = behavior_logp if data.old is None else _shifted(data.old, prompt, response)
    from_expert = (outcome >= len(data.behavior_responses)).tolist()
    hinted = data.expert is not None and data.expert.hinted
    parts_BK = parts_of(data.rewards)[prompt, outcome]
    weights_BK = torch.tensor(PART_WEIGHTS, dtype=torch.float64).expand_as(parts_BK)
    extra = {"meaning": meaning_of(outcome).double(), "reward_parts": parts_BK, "part_weights": weights_BK}
    if data.stored_value is not None:
        extra["stored_value"] = data.stored_value[prompt]
        extra["stored_quantile"] = data.quantile(reference)[prompt, outcome]
    extra["hinted"] = torch.tensor(from_expert, dtype=torch.float64) * hinted
    # The behavior policy's values of the prefix before each token
    values_XYT = data.behavior.value.prefix.detach()[:, data.behavior.space.places]
    values_XYT = torch.where(data.behavior.space.mask, values_XYT, math.nan)
    return {
        "mask": torch.cat([no_mask, space.mask[response]], 1),
        "reward": data.rewards[prompt, outcome],
        "role": ["expert" if x and not hinted else "policy" for x in from_expert],
        "ref_logp": _shifted(reference, prompt, response),
        "behavior_logp": behavior_logp,
        "old_logp": old_logp,
        "old_value": torch.nn.functional.pad(values_XYT, (1, 0), value=math.nan)[prompt, response],
        "tokens": torch.cat([prompt[:, None], space.tokens[response]], 1),
        "lengths": space.lengths[response] + 1,
        "extra": extra,
    }


def _shifted(policy: Enumerable, prompt: Tensor, response: Tensor) -> Tensor:
    """[B,T+1] log-probs of the tokens; index 0 is the prompt's."""
    logp = torch.where(policy.space.mask, policy.logp_tokens().detach(), math.nan)
    return torch.nn.functional.pad(logp, (1, 0), value=math.nan)[prompt, response]


def all_groups(data: DataDistribution, reference: Enumerable, *sizes: int) -> Batch:
    """The batch of `AllGroups`."""
    return AllGroups(data, reference, sizes).batch


def gradient(
    policy: Enumerable,
    reference: Enumerable,
    batch: Batch,
    name: str,
    options: Mapping[str, Any],
    size: int | None = None,
) -> Tensor:
    """[W] the step's gradient of objective `name` over `batch`; `size`: of its micro-batches."""
    resolved = get(name).resolve(name, options)
    backward(policy, batch, name, resolved, Passes(MicroBatch(size)), reference)  # type: ignore[arg-type]
    return torch.cat(
        [(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in policy.parameters()]
    )
