"""Judged pairs of the actions that a search tried in one state (Agent Q, arXiv 2408.07199)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from agro.errors import Refused
from agro.store import Pair


@dataclass(frozen=True)
class Attempt:
    """An action tried in a state of a search tree: a sample of the store whose prompt is the state."""

    sample: int
    searched: float | None  # mean return of the visits below it; None: never visited
    critic: float | None = None  # what a critic says of it; None: not asked

    def value(self, alpha: float) -> float:
        """α · searched + (1 − α) · critic; where one is unknown, the other."""
        if self.searched is not None and self.critic is not None:
            return alpha * self.searched + (1 - alpha) * self.critic
        value = self.critic if self.searched is None else self.searched
        if value is None:
            raise Refused(
                f"sample {self.sample}: expected a value by the search or by a critic, got neither. What to "
                "do: leave out actions that nobody valued."
            )
        return value


def step_pairs(
    tried: Sequence[Attempt], *, theta: float, alpha: float = 0.5, most: int | None = None
) -> list[Pair]:
    """The pairs of actions whose values differ by more than `theta`, the better one first, the widest gaps
    first.

    `alpha` is the search's share in a value. There are as many pairs as the square of the actions; `most`
    keeps that many. Give them to `Store.add_pairs`.
    """
    if not (theta >= 0 and 0 <= alpha <= 1):
        raise Refused(f"pairs: expected theta of 0 or more and alpha from 0 to 1, got {theta} and {alpha}")
    ranked = sorted(((action.value(alpha), action.sample) for action in tried), reverse=True)
    gaps = [
        (better - worse, Pair(winner, loser))
        for (better, winner), (worse, loser) in itertools.combinations(ranked, 2)
        if better - worse > theta
    ]
    gaps.sort(key=lambda gap: -gap[0])
    return [pair for _, pair in gaps[:most]]
