"""Held-out measurements of the folds together: each group is held out in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def mean_and_error(values: NDArray[np.float64]) -> tuple[float, float]:
    """The mean of independent values, and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)


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
