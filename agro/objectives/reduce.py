"""Reductions over tokens, responses, groups and judged pairs, all over the complete step. Each names its
denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from agro.errors import Refused
from agro.types import Batch, Tensor

EPS = 1e-6  # added to a standard deviation before dividing by it


@dataclass(frozen=True)
class Groups:
    """The responses of a batch [N] and their groups [G]: the rows of one episode are one response.

    Sums and means accept any numeric or bool dtype and return float64.
    """

    batch: Batch
    group: Tensor  # [N]
    first_row: Tensor  # [N] the first row of each response
    n: Tensor  # [G] number of responses
    weight: Tensor  # [G]

    @classmethod
    def of(cls, batch: Batch) -> Groups:
        N = int(batch.response.max()) + 1
        first_row = _first_positions(batch.response, N)
        group, row_weight = _response_values(batch, "group", batch.group, first_row), batch.weight.double()
        weight = row_weight[_first_positions(batch.group, batch.n_groups)]
        differs = weight[batch.group] != row_weight
        if differs.any():
            raise Refused(
                f"weight: {batch.ids[int(differs.int().argmax())]}: expected one weight in "
                "each group, got different ones"
            )
        return cls(batch, group, first_row, torch.bincount(group), weight)

    @cached_property
    def reward(self) -> Tensor:
        """[N] float64; computed on first use, since not every objective needs rewards."""
        return _response_values(self.batch, "reward", self.batch.reward.double(), self.first_row)

    def extra(self, name: str) -> Tensor:
        """[N] or [N,K] an `extra` of the batch in float64, from each response's first row."""
        return self.batch.extra[name].double()[self.first_row]

    @cached_property
    def by_expert(self) -> Tensor:
        """[N] whether each response has role "expert"."""
        return _response_values(self.batch, "role", by_experts(self.batch), self.first_row)

    def sum_tokens(self, x: Tensor) -> Tensor:
        """[B,T] -> [N]: the sum over the mask and over the rows of a response."""
        rows = torch.where(self.batch.mask, x.double(), 0.0).sum(1)
        return torch.zeros_like(self.group, dtype=torch.float64).index_add(0, self.batch.response, rows)

    def mean_rows(self, v: Tensor) -> Tensor:
        """[B] -> [N]: the mean over the rows of a response."""
        rows, v = torch.bincount(self.batch.response), v.double()
        return torch.zeros_like(rows, dtype=torch.float64).index_add(0, self.batch.response, v) / rows

    def mean_tokens(self, x: Tensor) -> Tensor:
        """[B,T] -> [N]: the mean over the tokens of a response."""
        return self.sum_tokens(x) / self.sum_tokens(torch.ones_like(x))

    def over_tokens(self, x: Tensor, average: str) -> Tensor:
        """[B,T] -> [N]: `sum_tokens` for "sum", `mean_tokens` for "token"."""
        return self.sum_tokens(x) if average == "sum" else self.mean_tokens(x)

    def at_tokens(self, v: Tensor) -> Tensor:
        """[N] -> [B,T]: a response's value at each of its tokens."""
        return v[self.batch.response][:, None].expand(self.batch.mask.shape)

    def sum(self, v: Tensor) -> Tensor:
        """[N] -> [G]"""
        return torch.zeros_like(self.weight).index_add(0, self.group, v.double())

    def mean(self, v: Tensor) -> Tensor:
        """[N] -> [N]: the mean of each response's group."""
        return (self.sum(v) / self.n)[self.group]

    def weighted_mean(self, v: Tensor, weight: Tensor) -> Tensor:
        """[N], weights [N] of 0 or more -> [G]; 0 where all weights are 0."""
        total_G = self.sum(weight)
        return self.sum(weight * v) / torch.where(total_G > 0, total_G, 1.0)

    def largest(self, v: Tensor) -> Tensor:
        """[N] -> [G]"""
        return torch.full_like(self.weight, -torch.inf).scatter_reduce(0, self.group, v.double(), "amax")

    @property
    def best(self) -> Tensor:
        """[N] whether a response has its group's highest reward; False where rewards are all equal."""
        highest_G, lowest_G = self.extremes(self.reward)
        return (self.reward == highest_G[self.group]) & (highest_G > lowest_G)[self.group]

    def extremes(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """[N] -> [G], [G]: the largest and the smallest known value; −∞ and ∞ if all are NaN."""
        number_N = ~v.isnan()
        largest_G = self.largest(torch.where(number_N, v, -torch.inf))
        return largest_G, -self.largest(torch.where(number_N, -v, -torch.inf))

    def soft_maximum(self, v: Tensor, beta: float) -> Tensor:
        """[N] -> [N]: β log of the mean of exp(v/β) in each response's group."""
        maximum_N = self.largest(v)[self.group]
        return maximum_N + beta * (self.sum(((v - maximum_N) / beta).exp()) / self.n)[self.group].log()

    def mean_others(self, v: Tensor) -> Tensor:
        """[N] -> [N]: the leave-one-out mean, v̄_{-i}."""
        n = self.n[self.group]
        return (n * self.mean(v) - v) / (n - 1)

    def variance(self, v: Tensor) -> Tensor:
        """[N] -> [G]: the sample variance, divided by n - 1."""
        return self.sum((v - self.mean(v)).square()) / (self.n - 1)

    def average(self, per_group: Tensor) -> Tensor:
        """[G] -> []: the mean over groups, whatever their sizes; a group of weight w counts w times."""
        return (self.weight * per_group).sum() / self.weight.sum()

    def average_responses(self, v: Tensor) -> Tensor:
        """[N] -> []: the mean in a group, then over groups."""
        return self.average(self.sum(v) / self.n)


def by_experts(batch: Batch) -> Tensor:
    """[B] whether each row has role "expert"."""
    return torch.from_numpy(np.array(batch.role, object) == "expert").to(batch.mask.device)


def center(v: Tensor, group: Tensor) -> Tensor:
    """[N], [N] -> [N]: v − v̄ in each group; exactly 0 for equal values, so that dividing by a small number
    can't magnify rounding."""
    n = torch.bincount(group)
    largest, smallest = (
        v.new_full((len(n),), start).scatter_reduce(0, group, v, kind)
        for start, kind in ((-torch.inf, "amax"), (torch.inf, "amin"))
    )
    mean = v.new_zeros(len(n)).index_add(0, group, v) / n
    return torch.where((largest == smallest)[group], 0.0, v - mean[group])


def standardize(v: Tensor, group: Tensor) -> Tensor:
    """[N], [N] -> [N]: (v − v̄)/(std + 1e-6) in each group, std with n − 1; 0 if all are equal."""
    off, n = center(v, group), torch.bincount(group)
    variance = v.new_zeros(len(n)).index_add(0, group, off.square()) / (n - 1).clamp(min=1)
    return off / (variance.sqrt()[group] + EPS)


def token_weight(batch: Batch) -> Tensor:
    """[B,T] how often each token counts: the weight of its row, 0 outside the mask."""
    return torch.where(batch.mask, batch.weight.double()[:, None], 0.0)


def token_mean(batch: Batch, x: Tensor) -> Tensor:
    """[B,T], finite outside the mask too -> []: the mean over all tokens of the step; a row of
    weight w counts w times."""
    w = token_weight(batch)
    return (w * x).sum() / w.sum()


def mean_over(weight: Tensor, chosen: Tensor, x: Tensor) -> Tensor:
    """[] the weighted mean over the chosen tokens or responses; 0 if there are none."""
    w = torch.where(chosen, weight, 0.0)
    total = w.sum()
    return torch.where(chosen, w * x, 0.0).sum() / torch.where(total > 0, total, 1.0)


def quantile(values: Tensor, weights: Tensor, share: float) -> Tensor:
    """[K], [K] -> []: the smallest value at which the cumulative weight reaches this share."""
    order = values.argsort()
    reached = weights[order].cumsum(0) >= share * weights.sum()
    return values[order][reached.int().argmax()]


def average_tokens(groups: Groups, x: Tensor, average: str | float) -> Tensor:
    """[B,T], finite outside the mask too -> []: the mean over each response's tokens, the mean over the
    step's tokens, or each response's sum divided by a number; see `Average`."""
    if average == "token":
        return token_mean(groups.batch, x)
    if average == "response":
        return groups.average_responses(groups.mean_tokens(x))
    return groups.average_responses(groups.sum_tokens(x) / float(average))


def refuse_several_rows(batch: Batch, name: str, instead: str) -> None:
    """Raise `Refused` if a response has several rows, which `name` can't handle; `instead` can."""
    several = torch.bincount(batch.response)[batch.response] > 1
    if several.any():
        raise Refused(
            f"{name} needs each response in one row, but that of {batch.ids[int(several.int().argmax())]} is "
            f"in several rows; use {instead}"
        )


def _response_values(batch: Batch, name: str, value_B: Tensor, first_row: Tensor) -> Tensor:
    """[B] -> [N]: the value in each first row; raises `Refused` if another row's differs."""
    value_N = value_B[first_row]
    differs = (value_N[batch.response] != value_B) & ~(value_B != value_B)
    if differs.any():
        raise Refused(
            f"{name}: {batch.ids[int(differs.int().argmax())]}: rows of one response have different values"
        )
    return value_N


def _first_positions(index: Tensor, size: int) -> Tensor:
    """[size] the first position of each of 0 … size-1 in `index`."""
    B = len(index)
    return torch.full((size,), B, device=index.device).scatter_reduce(
        0, index, torch.arange(B, device=index.device), "amin"
    )


def ties(batch: Batch) -> Tensor:
    """[P] whether a pair's votes are equal; unknown votes (NaN) aren't."""
    assert batch.pairs is not None
    if batch.votes is None:
        return torch.zeros_like(batch.pairs[:, 0], dtype=torch.bool)
    return batch.votes[:, 0] == batch.votes[:, 1]


@dataclass(frozen=True)
class Pairs:
    """A batch's pairs [P] of responses of `groups`. A row of an episode stands for the complete episode."""

    groups: Groups
    winner: Tensor  # [P]
    loser: Tensor  # [P]
    tie: Tensor  # [P] whether its votes are equal: neither of the two won

    @classmethod
    def of(cls, batch: Batch) -> Pairs:
        assert batch.pairs is not None
        winner, loser = batch.response[batch.pairs].unbind(1)
        return cls(Groups.of(batch), winner, loser, ties(batch))

    @classmethod
    def best_and_worst(cls, groups: Groups) -> Pairs:
        """Each group's best response over its worst, in all combinations if several are best or worst;
        no pair in groups of equal rewards."""
        best_N, (_, worst_G) = groups.best, groups.extremes(groups.reward)
        differ_N = groups.largest(best_N.double())[groups.group] > 0
        worst_N = differ_N & (groups.reward == worst_G[groups.group])
        winners, losers = best_N.nonzero()[:, 0], worst_N.nonzero()[:, 0]
        together = groups.group[winners][:, None] == groups.group[losers]
        best, worst = together.nonzero().unbind(1)
        return cls(groups, winners[best], losers[worst], torch.zeros_like(best, dtype=torch.bool))

    def won(self) -> Pairs:
        """The pairs without the ties."""
        won_P = ~self.tie
        return Pairs(self.groups, self.winner[won_P], self.loser[won_P], self.tie[won_P])

    @property
    def count(self) -> Tensor:
        """[G] number of pairs."""
        return torch.bincount(self.groups.group[self.winner], minlength=self.groups.batch.n_groups)

    def gap(self, v_N: Tensor) -> Tensor:
        """[N] -> [P]: the winner's minus the loser's."""
        return v_N[self.winner] - v_N[self.loser]

    def chance(self, votes: str) -> Tensor | float:
        """[P] the probability that the winner is the better one: 1 as judged; with "mean" the posterior mean
        of its votes under a uniform prior, (v_w + 1)/(v_w + v_l + 2) (VPO, arXiv 2410.22891)."""
        if votes == "ignore":
            return 1.0
        votes_P2 = self.groups.batch.votes
        assert votes_P2 is not None
        return (votes_P2[:, 0].double() + 1) / (votes_P2.double().sum(1) + 2)

    def average(self, v_P: Tensor) -> Tensor:
        """[P] -> []: the mean over the pairs of a group, then over groups; one without a pair counts 0."""
        group_P = self.groups.group[self.winner]
        total_G = torch.zeros_like(self.groups.weight).index_add(0, group_P, v_P.double())
        return self.groups.average(total_G / self.count.clamp(min=1))
