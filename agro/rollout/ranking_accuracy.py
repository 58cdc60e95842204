"""How often a policy gives the better response of a pair the higher probability (arXiv 2405.19534).

Of held-out pairs it says what preference training changed, and what it could: the idealized accuracy is that
of π* ∝ π_ref e^{r/β}, which the objective would end at. It is below 1 where the reference prefers the worse
response by more nats than (r_w − r_l)/β. None of the three says what the policy writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agro.rollout.evaluate import described

Values = NDArray[np.float64]


class RankedPair(NamedTuple):
    """Numbers of the better and of the worse response; `margin`: r_w − r_l, NaN where it is unknown."""

    winner: int
    loser: int
    margin: float


@dataclass(frozen=True)
class RankingAccuracy:
    """Means over groups, which are the independent units, of the share of their pairs [G].

    `idealized` is None without a reference, β or margins.
    """

    pairs: int
    plain: Values
    length_normalized: Values
    idealized: Values | None

    @classmethod
    def of(
        cls,
        pairs: Sequence[RankedPair],
        groups: NDArray[np.int64],
        logp: Values,
        lengths: NDArray[np.int64],
        ref_logp: Values | None = None,
        beta: float | None = None,
    ) -> RankingAccuracy:
        """`logp`, `ref_logp`: [N] of each response, in nats; `groups`: [N] a number of its prompt or cluster;
        `lengths`: [N] in tokens. `beta`: in reward per nat."""
        better, worse = np.array([(p.winner, p.loser) for p in pairs], np.int64).T
        margin, group = np.array([p.margin for p in pairs]), groups[better]
        per_token = logp / lengths
        ideal = None
        if ref_logp is not None and beta and not np.isnan(margin).any():
            ideal = by_group(ref_logp[better] - ref_logp[worse] + margin / beta, group)
        plain, normalized = (by_group(x[better] - x[worse], group) for x in (logp, per_token))
        return cls(len(pairs), plain, normalized, ideal)

    def to_json(self) -> dict[str, Any]:
        rows = {"plain": self.plain, "length_normalized": self.length_normalized, "idealized": self.idealized}
        return {
            "pairs": self.pairs,
            "groups": len(self.plain),
            **{name: None if of_group is None else described(of_group) for name, of_group in rows.items()},
        }


def by_group(difference: Values, group: NDArray[np.int64]) -> Values:
    """[P] -> [G] the share of a group's differences above 0, where 0 counts one half."""
    right = np.where(difference == 0, 0.5, difference > 0)
    numbers = np.unique(group, return_inverse=True)[1]
    return np.asarray(np.bincount(numbers, right) / np.bincount(numbers))


def pairs_by_reward(rewards: Values, groups: NDArray[np.int64]) -> list[RankedPair]:
    """All pairs of responses of one group with unequal rewards."""
    found = []
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        for i in members:
            worse = members[rewards[members] < rewards[i]]
            found += [RankedPair(int(i), int(j), float(rewards[i] - rewards[j])) for j in worse]
    return found
