"""Claims of agro.objectives.methods.teaching: objectives that learn from a teacher, and sft.

All are means over tokens. The letters are those of `agro.proof.formulas`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agro.proof import formulas
from agro.proof.claim import Claims, End, moved, weighted
from agro.proof.ends import SAMPLER, TEACHER
from agro.proof.formulas import Situation, per_token


def exact(s: Situation, divergence: str | float = "reverse") -> Tensor:
    """The divergence of π from f (the teacher) after prefixes of μ, over all next tokens."""
    logp, f = s.policy.logp_next(), s.reference.logp_next().detach()
    if divergence == "reverse":
        d_XC = (logp.exp() * (logp - f)).sum(-1)
    elif divergence == "forward":
        d_XC = (f.exp() * (f - logp)).sum(-1)
    else:
        beta = float(divergence)
        m = (beta * f.exp() + (1 - beta) * logp.exp()).log()
        d_XC = (beta * f.exp() * (f - m) + (1 - beta) * logp.exp() * (logp - m)).sum(-1)
    return per_token(s, d_XC[:, s.policy.space.places])


def sampled(s: Situation, divergence: str | float, *, weighted: bool = True) -> Tensor:
    """Σ_t w_t c_t log π_t over samples, w = π/μ and c = h(u) − u h'(u), u = f/π, constants."""
    logp = s.policy.logp_tokens()
    u = torch.where(s.policy.space.mask, (-s.d_tokens.detach()).exp(), 1.0)
    c = {"reverse": -u.log(), "forward": -u}.get(str(divergence))
    if c is None:
        beta = float(divergence)
        c = -(1 - beta) * (beta * u + 1 - beta).log()
    w = s.e_tokens.detach().exp() if weighted else torch.ones_like(logp)
    return per_token(s, w * c * logp)


def distilled(s: Situation, divergence: str | float = "reverse") -> Tensor:
    """The exact divergence if μ may write every token, else the divergence over those that it writes."""
    return exact(s, divergence) if (s.p > 0).all() else sampled(s, divergence)


SAMPLED = ("ref_logp", "behavior_logp")


def of_texts(
    expects: Callable[[Situation], Tensor],
    needs: tuple[str, ...] = (),
    updates: int = 0,
    end: End | None = None,
    **options: Any,
) -> Claims:
    """Claims of an objective that doesn't compare responses."""
    return Claims(expects, "elsewhere", needs, options, n=(1, 2), updates=updates, end=end)


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "distill": (
        of_texts(distilled, SAMPLED, 300, TEACHER),
        moved(
            of_texts(
                lambda s: distilled(s, "forward"), ("ref_logp", "old_logp"), divergence="forward", ratio="old"
            )
        ),
        moved(of_texts(lambda s: distilled(s, 0.3), SAMPLED, divergence=0.3)),
        moved(of_texts(lambda s: sampled(s, "reverse", weighted=False), ("ref_logp",), ratio="none")),
        of_texts(exact, ("kl",), over="vocabulary"),
    ),
    "sft": (
        of_texts(formulas.imitation, (), 400, SAMPLER),
        weighted(of_texts(formulas.imitation), "reference", updates=0),
    ),
}
