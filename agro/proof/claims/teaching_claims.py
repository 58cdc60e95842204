"""Claims of agro.objectives.methods.teaching: objectives that learn from a teacher, and sft.

All are means over tokens. The letters are those of `agro.proof.formulas`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agro.objectives.needs import PROPOSAL, changed
from agro.objectives.reduce import quantile
from agro.proof import formulas
from agro.proof.claim import DESCENT, Claims, End
from agro.proof.claims.truncated_claims import per_token
from agro.proof.ends import SAMPLER, TEACHER
from agro.proof.families import weighted
from agro.proof.formulas import Situation


def one_token(s: Situation, negative: float = -0.1, kappa: float = 1.0, draws: int = 0) -> Tensor:
    """−Σ_a R(a) q(a) log π(a), R = 1 for the given token and β_o for the others, q ∝ π^(1/κ), or the shares
    of K draws from it (OTR)."""
    space, logp_XCV = s.policy.space, s.policy.logp_next()
    q_XCV = s.policy.proposal(changed(PROPOSAL, temperature=kappa, draws=draws, seed=3.0))
    given_YTV = torch.nn.functional.one_hot(space.tokens, space.vocabulary).bool()
    R = given_YTV + negative * (~given_YTV).double()
    return per_token(s, -(R * (q_XCV * logp_XCV)[:, space.places]).sum(-1))


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
    """The exact divergence wherever μ may write every token; else of those that it writes."""
    return exact(s, divergence) if (s.p > 0).all() else sampled(s, divergence)


def in_band(s: Situation, low: float, high: float) -> Tensor:
    """[X,Y] whether the mean of −log π over a response's tokens is between two quantiles over μ."""
    nll = -(s.policy.logp().detach() / s.policy.space.lengths)
    lower, upper = (quantile(nll.flatten(), s.p.flatten(), share) for share in (low, high))
    return ((nll >= lower) & (nll <= upper)).double()


PROPOSALS = ("proposal", "proposal_mean")
SAMPLED = ("ref_logp", "behavior_logp")


def _claims(
    expects: Callable[[Situation], Tensor],
    needs: tuple[str, ...] = (),
    updates: int = 0,
    end: End | None = None,
    **options: Any,
) -> Claims:
    """No response is compared with others."""
    return Claims(expects, "elsewhere", needs, options, n=(1, 2), updates=updates, end=end)


def _moved(claims: Claims) -> Claims:
    """The same, where a number more in log f of a prompt makes a difference."""
    return replace(claims, reference_shift=False)


SUPERVISED_CLAIMS: dict[str, tuple[Claims, ...]] = {
    "sft": (
        _claims(formulas.imitation, (), 400, SAMPLER),
        weighted(_claims(formulas.imitation), "reference", updates=0),
    )
}
CLAIMS: dict[str, tuple[Claims, ...]] = {
    "otr": (
        _claims(one_token, PROPOSALS, DESCENT),
        _claims(lambda s: one_token(s, -0.3, 1.5), PROPOSALS, negative=-0.3, temperature=1.5),
        # Given the draws; their mean is the first claim.
        _claims(lambda s: one_token(s, kappa=1.5, draws=4), PROPOSALS, temperature=1.5, draws=4.0, seed=3.0),
    ),
    "distill": (
        _claims(distilled, SAMPLED, 300, TEACHER),
        _moved(
            _claims(
                lambda s: distilled(s, "forward"), ("ref_logp", "old_logp"), divergence="forward", ratio="old"
            )
        ),
        _moved(_claims(lambda s: distilled(s, 0.3), SAMPLED, divergence=0.3)),
        _moved(_claims(lambda s: sampled(s, "reverse", weighted=False), ("ref_logp",), ratio="none")),
        _claims(exact, ("kl",), over="vocabulary"),
    ),
    "middle_band": (
        _claims(lambda s: formulas.imitation(s, in_band(s, 0.2, 0.7)), (), 100, low=0.2, high=0.7),
    ),
    "sophia": (_claims(formulas.imitation),),
    "pear": (replace(weighted(_claims(formulas.imitation), "behavior", 2.0, updates=0), options={}),),
    "reward_conditioned": (_claims(formulas.imitation),),
}
