"""See `independent.base`. The gradient of GRPO with ratios to the policy before the step, times a weight."""

from __future__ import annotations

from typing import Any

from independent.base import Case, Result, weighted
from independent.clipped import grpo


def _corrected(case: Case, **weight: Any) -> Result:
    return weighted(case, grpo(case, ratio="old"), weight="mismatch", **weight)


def tis(case: Case) -> Result:
    return _corrected(case, weight_max=2.0, weight_level="token")


def mis(case: Case) -> Result:
    return _corrected(case, weight_max=3.0, weight_rule="mask")


def icepop(case: Case) -> Result:
    return _corrected(case, weight_min=0.5, weight_max=5.0, weight_level="token", weight_rule="mask")


def decoupled_ppo(case: Case) -> Result:
    return _corrected(case, weight_max=None, weight_level="token")
