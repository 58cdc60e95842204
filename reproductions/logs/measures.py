"""Held-out measurements of the folds together, each group of which is held out in one; and what the log says
without a model: responses ranked by their length or by their source alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.stats.intervals import standard_error
from agro.types import Sample
from reproductions.logs.data import groups_of

Features = Callable[[Sample], Sequence[float]]
Array = NDArray[np.float64]


def pooled_mean(folds: Sequence[dict[str, Any]], name: str, count: str) -> tuple[float, float]:
    """Mean and standard error over the values of all folds, from each fold's mean, error and count."""
    n, mean, se = (np.array([fold[key] for fold in folds], float) for key in (count, name, f"{name}_se"))
    total = n.sum()
    overall = float(n @ mean / total)
    squares = float((n * (n - 1) * se**2).sum() + (n * (mean - overall) ** 2).sum())
    return overall, (squares / (total - 1) / total) ** 0.5


def pooled(folds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """AUC over the mixed groups of all folds, and the decrease of ½ Var(R) over all of their groups."""
    auc, auc_se = pooled_mean(folds, "eval_auc", "eval_auc_groups")
    fall, fall_se = pooled_mean(folds, "eval_consistency_fall", "eval_groups")
    now, _ = pooled_mean(folds, "eval_consistency", "eval_groups")
    return {
        "auc": auc,
        "auc_se": auc_se,
        "mixed": sum(fold["eval_auc_groups"] for fold in folds),
        "groups": sum(fold["eval_groups"] for fold in folds),
        "dropped": sum(fold["eval_dropped"] for fold in folds),
        **compare(now + fall, fall, fall_se),
    }


def above_chance(measured: dict[str, Any]) -> float | None:
    """How many standard errors an AUC is above 0.5. None where every pair is a tie, as before training."""
    if not measured["auc_se"]:
        return None
    return float((measured["auc"] - 0.5) / measured["auc_se"])


def compare(before: float, fall: float, fall_se: float) -> dict[str, float]:
    """½ Var before and after, its decrease, paired by group, and that decrease relative to `before`."""
    after = before - fall
    return {"before": before, "after": after, "fall": fall, "fall_se": fall_se, "relative": fall / before}


def length(sample: Sample) -> Sequence[float]:
    assert isinstance(sample.response, str)
    return [len(sample.response)]


def source_of(sources: Sequence[str]) -> Features:
    """One indicator per source."""
    return lambda sample: [float(sample.source == name) for name in sources]


def baselines(folds: Sequence[tuple[Path, Path]]) -> dict[str, dict[str, Any]]:
    """Every baseline, fitted on each fold's training groups and measured on its held-out ones."""
    stores = [(groups_of(train), groups_of(heldout)) for train, heldout in folds]
    sources = sorted({s.source for train, _ in stores for group in train for s in group})
    found = {"length alone": linear(length, stores)}
    if len(sources) > 1:
        found["source alone"] = linear(source_of(sources), stores)
    return found


def linear(
    features: Features, folds: Sequence[tuple[Sequence[Sequence[Sample]], Sequence[Sequence[Sample]]]]
) -> dict[str, Any]:
    """AUC of a linear score, and ½ Var(r − score), on the held-out groups of all folds.

    Least squares on what differs within the training groups, each of which has the same weight.
    """
    auc: list[float] = []
    before: list[float] = []
    after: list[float] = []
    for train, heldout in folds:
        fitted = [(x / len(r) ** 0.5, r / len(r) ** 0.5) for x, r in (centered(features, g) for g in train)]
        c = np.linalg.lstsq(
            np.concatenate([x for x, _ in fitted]), np.concatenate([r for _, r in fitted]), rcond=None
        )[0]
        for x, r in (centered(features, group) for group in heldout):
            score = (x @ c).round(12)  # equal features have equal scores
            auc += ranked(score, r)
            before.append(half_variance(r))
            after.append(half_variance(r - score))
    fall, ranks = np.array(before) - np.array(after), np.array(auc)
    return {
        "auc": float(ranks.mean()),
        "auc_se": standard_error(ranks),
        "mixed": len(auc),
        **compare(float(np.mean(before)), float(fall.mean()), standard_error(fall)),
    }


def centered(features: Features, group: Sequence[Sample]) -> tuple[Array, Array]:
    """Features and rewards less their means in the group."""
    x = np.array([features(s) for s in group], dtype=float)
    r = np.array([s.reward for s in group], dtype=float)
    return x - x.mean(0), r - r.mean()


def ranked(score: Array, reward: Array) -> list[float]:
    """AUC within one group, equal scores as ½; empty where all rewards are equal."""
    better = reward[:, None] > reward
    if not better.any():
        return []
    wins = (score[:, None] > score) + 0.5 * (score[:, None] == score)
    return [float(wins[better].mean())]


def half_variance(r: Array) -> float:
    return 0.5 * float(r.var(ddof=1))
