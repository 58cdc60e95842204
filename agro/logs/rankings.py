"""Which responses are better than which: by their ranks, and by what several annotators say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from agro.logs.protocol import TIE, Judgment, Votes


def score_votes(a: float | None, b: float | None) -> Votes:
    """The votes for two responses with these scores: equal scores are a tie, others no number of votes."""
    return TIE if a is not None and a == b else (None, None)


def rank_judgments(ranks: Sequence[float | None]) -> tuple[Judgment, ...]:
    """Of every two responses with a rank the one with the lower rank is better; equal ranks are a tie."""
    judgments = []
    for (i, a), (j, b) in combinations(enumerate(ranks), 2):
        if a is None or b is None:
            continue
        if a == b:
            judgments.append(Judgment(i, j, TIE))
        else:
            judgments.append(Judgment(i, j) if a < b else Judgment(j, i))
    return tuple(judgments)


def tally(judgments: Iterable[Judgment]) -> tuple[Judgment, ...]:
    """The judgments of several annotators as one of every two responses, with the votes for both.

    A tie is half a vote for each.
    """
    votes: dict[tuple[int, int], list[float]] = {}
    for judgment in judgments:
        pair = (min(judgment[:2]), max(judgment[:2]))
        counts = votes.setdefault(pair, [0.0, 0.0])
        if judgment.votes == TIE:
            counts[0] += 0.5
            counts[1] += 0.5
        else:
            counts[pair.index(judgment.winner)] += 1.0
    total = []
    for (i, j), (a, b) in votes.items():
        ahead = a >= b
        total.append(Judgment(i, j, (a, b)) if ahead else Judgment(j, i, (b, a)))
    return tuple(total)
