"""Claims of agro_papers.methods.values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agro.proof.claim import DESCENT, Claims
from agro.proof.families import REGULARIZED
from agro.proof.formulas import Situation, sloped
from agro_papers.claims.experts_claims import hybrid


def half_square_with_normalizer(s: Situation) -> Tensor:
    """½β E_μ (d + V − r/β)², V the log of the sum of exp of the logits at the first token (TBRM)."""
    start_XY = s.policy.normalizer()[:, s.policy.space.places[:, 0]]
    return 0.5 * s.beta * s.mean((s.d + start_XY - s.reward / s.beta).square())


def prefix_residuals(s: Situation, slope: float = 1.0) -> Tensor:
    """E_μ of the mean of ½ (V(y_<i) − Σ_{i≤u<j} (r_u − βd_u) − V(y_<j))² over all i < j, r at the last
    token, V = 0 after it; the part that goes to the policy times `slope`."""
    space, total_XY = s.policy.space, torch.zeros_like(s.reward)
    d_XYT = sloped(s.d_tokens, slope)
    for y, T in enumerate(space.lengths.tolist()):
        none_X = torch.zeros_like(s.reward[:, 0])
        values = [s.policy.value.prefix[:, space.places[y, t]] for t in range(T)] + [none_X]
        pairs = list(itertools.combinations(range(T + 1), 2))
        for i, j in pairs:
            gained_X = -s.beta * d_XYT[:, y, i:j].sum(1)
            if j == T:
                gained_X = gained_X + s.reward[:, y]
            total_XY[:, y] += 0.5 * (values[i] - gained_X - values[j]).square() / len(pairs)
    return s.mean(total_XY)


def residuals_to_end(s: Situation, slope: float = 1.0) -> Tensor:
    """E_μ of the mean over t of ½ (r − β Σ_{u≥t} d_u − V(y_<t))², later d without gradient (OREO)."""
    space, total_XY = s.policy.space, torch.zeros_like(s.reward)
    d_XYT, place = s.d_tokens, space.places
    for y, T in enumerate(space.lengths.tolist()):
        for t in range(T):
            d_X = sloped(d_XYT[:, y, t], slope) + d_XYT[:, y, t + 1 : T].detach().sum(1)
            value_X = s.policy.value.prefix[:, place[y, t]]
            total_XY[:, y] += 0.5 * (s.reward[:, y] - s.beta * d_X - value_X).square() / T
    return s.mean(total_XY)


def prefix_claims(expects: Callable[[Situation], Tensor], updates: int = 0, **options: str) -> Claims:
    return Claims(
        expects,
        "optimum",
        (*REGULARIZED, "prefix_value"),
        options,
        shift=False,
        reference_shift=False,
        n=(1, 2),
        episodes=False,
        updates=updates,
    )


def hybrid_claims(weight: float, updates: int = 0, **options: Any) -> Claims:
    """Its own samples are fresh; with each group comes one response of an expert, whoever that is."""
    return Claims(
        lambda s: hybrid(s, weight),
        "elsewhere",
        ("reward", "value", "fresh"),
        options,
        shift=False,
        n=(1, 2),
        updates=updates,
        expert="apart",
    )


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "tbrm": (
        Claims(
            half_square_with_normalizer,
            "optimum",
            (*REGULARIZED, "normalizer"),
            shift=False,
            reference_shift=False,
            n=(1, 2),
            episodes=False,
            updates=600,
        ),
    ),
    "hnpg": (hybrid_claims(1.0, updates=DESCENT), hybrid_claims(0.4, offline=0.4)),
    "prefix_consistency": (
        prefix_claims(prefix_residuals, 1000, scale="loss"),
        prefix_claims(lambda s: prefix_residuals(s, 1 / s.beta), scale="reward"),
        prefix_claims(residuals_to_end, scale="loss", compared="end"),
    ),
    "oreo": (prefix_claims(lambda s: residuals_to_end(s, 1 / s.beta), 1000),),
}
