"""Claims of agro_papers.methods.balanced.

Sums over the step are those of its groups: groups have one size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agro.proof.claim import Claims
from agro.proof.claims.clipped_claims import clipped_surrogate, first_response_loss
from agro.proof.families import BEHAVIOR, OLD, ratio_claims
from agro.proof.formulas import Situation
from agro_papers.claims.trust_region_claims import log_ratio

Bound = tuple[float, float, float]  # its start, maximum and step

LOW, HIGH = (0.6, 0.9, 0.02), (1.2, 3.0, 0.05)
LOW_CODE, HIGH_CODE = (0.8, 0.95, 0.05), (1.2, 2.0, 0.1)
OTHER_LOW, OTHER_HIGH = (0.5, 0.7, 0.1), (1.1, 1.9, 0.2)
OTHER: dict[str, Any] = {"criterion": "gradient", "low": OTHER_LOW, "high": OTHER_HIGH}


def bapo(s: Situation, odds: float, low: Bound, high: Bound, gradient: bool = False) -> Tensor:
    """PPO's gain within bounds: while P < odds N, c_high is raised, then c_low. Tokens count by their
    probability (BAPO, the paper)."""
    short = _shortage(s, odds, s.behavior.logp_tokens().detach().exp(), gradient)
    c_high = _raised(high, lambda c: short(low[0], c))
    c_low = _raised(low, lambda c: short(c, c_high))
    return first_response_loss(s, clipped_surrogate(log_ratio(s), c_low, c_high), average="token")


def bapo_code(s: Situation, odds: float, low: Bound, high: Bound, gradient: bool = False) -> Tensor:
    """c_low first, tokens count alike, and the gain is 3 A at least where A < 0 (BAPO, the code)."""
    short = _shortage(s, odds, torch.ones_like(s.e_tokens), gradient)
    c_low = _raised(low, lambda c: short(c, high[0]))
    c_high = _raised(high, lambda c: short(c_low, c))
    return first_response_loss(s, clipped_surrogate(log_ratio(s), c_low, c_high, 3.0), average="token")


def _raised(bound: Bound, is_short: Callable[[float], bool]) -> float:
    value, maximum, step = bound
    while value < maximum and is_short(value):
        value = min(value + step, maximum)
    return value


def _shortage(
    s: Situation, odds: float, counts_XYT: Tensor, gradient: bool
) -> Callable[[float, float], bool]:
    """Whether P < odds N at c_low, c_high: E of |A| w over tokens with A > 0, w at most c_high, and over
    those with A < 0, w at least c_low; with `gradient` without the tokens beyond."""
    w_XYT = log_ratio(s).detach().exp()

    def total(value_XYT: Tensor, sign: float) -> Tensor:
        def part(A: Tensor, first_K: Tensor) -> Tensor:
            return (sign * A).clamp(min=0.0) * (counts_XYT * value_XYT)[:, first_K]

        return first_response_loss(s, part, average=1.0)

    def short(c_low: float, c_high: float) -> bool:
        up, down = w_XYT.clamp(max=c_high), w_XYT.clamp(min=c_low)
        if gradient:
            up, down = w_XYT * (w_XYT <= c_high), w_XYT * (w_XYT >= c_low)
        return bool(odds * total(down, -1.0) > total(up, 1.0))

    return short


_pair_claims = partial(ratio_claims, n=(2,))

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "bapo": (
        _pair_claims(lambda s: bapo(s, 0.4 / 0.6, LOW, HIGH), updates=200),
        _pair_claims(lambda s: bapo(s, 0.6 / 0.4, OTHER_LOW, OTHER_HIGH, gradient=True), target=0.6, **OTHER),
        _pair_claims(
            lambda s: bapo(s, 0.4 / 0.6, LOW, HIGH), (*BEHAVIOR, "old_logp"), drifted=True, ratio="old"
        ),
    ),
    "bapo_code": (
        _pair_claims(lambda s: bapo_code(s, 0.5, LOW_CODE, HIGH_CODE), updates=200),
        _pair_claims(lambda s: bapo_code(s, 1.1, OTHER_LOW, OTHER_HIGH, gradient=True), target=1.1, **OTHER),
        _pair_claims(lambda s: bapo_code(s, 0.5, LOW_CODE, HIGH_CODE), OLD, drifted=True, ratio="old"),
    ),
}
