"""Judged pairs of responses: what a batch must hold of them, and what is computed over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agro.errors import Refused
from agro.objectives.reduce import Groups
from agro.types import Batch


@dataclass(frozen=True)
class Pairs:
    """The pairs [P] of a batch, as responses of `groups`: a row of an episode stands for the whole of it."""

    groups: Groups
    winner: Tensor  # [P]
    loser: Tensor  # [P]

    @classmethod
    def of(cls, batch: Batch) -> Pairs:
        assert batch.pairs is not None
        winner, loser = batch.response[batch.pairs].unbind(1)
        return cls(Groups.of(batch), winner, loser)

    @property
    def count(self) -> Tensor:
        """[G] pairs of each group."""
        return torch.bincount(self.groups.group[self.winner], minlength=self.groups.batch.n_groups)

    def gap(self, v: Tensor) -> Tensor:
        """[N] -> [P]: the winner's minus the loser's."""
        return v[self.winner] - v[self.loser]

    def chance(self, votes: str) -> Tensor | float:
        """[P] that the winner is the better one: 1 as judged; for "mean" of its votes, (v_w + 1)/(v_w + v_l + 2).

        That is the posterior mean of a share that was uniform before (VPO, arXiv 2410.22891).
        """
        if votes == "ignore":
            return 1.0
        counted = self.groups.batch.votes
        assert counted is not None
        return (counted[:, 0].double() + 1) / (counted.double().sum(1) + 2)

    def average(self, v: Tensor) -> Tensor:
        """[P] -> []: the mean over the pairs of a group, then over groups, each of which has one at least."""
        total = torch.zeros_like(self.groups.weight).index_add(0, self.groups.group[self.winner], v)
        return self.groups.average(total / self.count)


def check_pairs(name: str, batch: Batch, *, votes: bool) -> None:
    """Raise `Refused` where there are none, where one joins what can't be compared, or lacks `votes` that are read."""
    rows = batch.pairs
    if rows is None or not len(rows):
        raise Refused(no_pairs(name, f"{len(batch.mask)} rows in {batch.n_groups} groups", batch.ids))

    def said(bad: Tensor, what: str = "") -> str:
        some = [
            " over ".join(batch.ids[i] for i in rows[p].tolist())
            for p in bad.nonzero().flatten().tolist()[:3]
        ]
        return f"{int(bad.sum())} of {len(rows)} pairs don't{what} (for one: {'; '.join(some)})"

    groups, responses = batch.group[rows], batch.response[rows]
    wrong = (groups[:, 0] != groups[:, 1]) | (responses[:, 0] == responses[:, 1])
    if wrong.any():
        raise Refused(
            f"objective {name}: pairs: expected each to join two responses to one prompt, but {said(wrong)}. "
            "What to do: take these pairs out."
        )
    if votes:
        counted = batch.votes
        lacking = torch.ones_like(wrong) if counted is None else ~counted.isfinite().all(1)
        if lacking.any():
            raise Refused(no_votes(name, said(lacking, " have them")))


def no_pairs(name: str, of: str, rows: Sequence[str]) -> str:
    """The message for data without pairs; `of`: counts of what there is."""
    return (
        f"objective {name} needs pairs (of two responses to one prompt, the better one first): there are none among "
        f"{of} (for one: {'; '.join(rows[:3])}). What to do: import judged ones (agro import, records of prompt, chosen "
        "and rejected), or take an objective on rewards, such as agro."
    )


def no_votes(name: str, said: str) -> str:
    """The message for pairs without votes; `said`: how many of them."""
    return (
        f'objective {name} with votes = "mean" needs the votes of each pair, but {said}. What to do: import them '
        '(votes_chosen and votes_rejected), or set votes = "ignore".'
    )


def groups_without_pairs(name: str, groups: Sequence[str], total: int) -> str:
    """The message for groups none of whose responses were compared."""
    return (
        f"objective {name} needs a pair in each group: {len(groups)} of {total} groups have none (for one: "
        f'{", ".join(groups[:3])}). What to do: judge their responses, or leave such groups out with singletons = "drop".'
    )
