"""Batches that fit on a line: responses of one token, which differ from an anchor by a log-ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np

from agro import Batch, objectives
from agro.objectives import Evaluation

BETA = 0.4
FAR = -9.0  # a log-prob that leaves room for any log-ratio


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def nll(x: float) -> float:
    """-log σ(x)."""
    return log(1 + exp(-x))


@dataclass(frozen=True)
class Of:
    """An objective of responses with one token each: their log-ratios to an anchor, and their rewards."""

    name: str
    ratio: Sequence[float]
    batch: Batch
    logp: list[list[float]]
    options: dict[str, Any]

    def __call__(self) -> Evaluation:
        return objectives.evaluate(self.name, self.logp, self.batch, **self.options)

    def slopes(self) -> np.ndarray:
        return np.asarray(self().grad)[:, 1]


def of(
    name: str,
    ratio: Sequence[float],
    reward: Sequence[float] = (),
    /,
    *,
    at: Sequence[float] = (),
    **given: Any,
) -> Of:
    """One group, and β = 0.4, unless `given` has others: fields of the batch as `batch`, else options.

    `at`: the anchor's log-probs. β = None leaves the objective its own.
    """
    n = len(ratio)
    anchor = [[0.0, x] for x in at or [FAR] * n]
    fields: dict[str, Any] = {
        "mask": [[False, True]] * n,
        "reward": reward or [np.nan] * n,
        "group": [0] * n,
        "age": [0] * n,
        **dict.fromkeys(("ref_logp", "behavior_logp", "old_logp"), anchor),
    }
    batch = Batch.of(**fields | given.pop("batch", {}))
    logp = [[0.0, row[1] + x] for row, x in zip(anchor, ratio, strict=True)]
    options = {key: value for key, value in ({"beta": BETA} | given).items() if value is not None}
    return Of(name, ratio, batch, logp, options)


def of_pairs(name: str, ratio: Sequence[float], *pairs: tuple[int, int], batch: Any = (), **given: Any) -> Of:
    """Judged pairs (winner, loser) of one group."""
    return of(name, ratio, batch={"pairs": pairs, **dict(batch)}, **given)
