"""Claims of agro_papers.methods.imitated: means over tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agro.objectives.needs import PROPOSAL, changed
from agro.objectives.reduce import quantile
from agro.proof import formulas
from agro.proof.claim import DESCENT, Claims
from agro.proof.claims.advantages import per_token
from agro.proof.claims.teaching_claims import of_texts
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


def in_band(s: Situation, low: float, high: float) -> Tensor:
    """[X,Y] whether the mean of −log π over a response's tokens is between two quantiles over μ."""
    nll = -(s.policy.logp().detach() / s.policy.space.lengths)
    lower, upper = (quantile(nll.flatten(), s.p.flatten(), share) for share in (low, high))
    return ((nll >= lower) & (nll <= upper)).double()


PROPOSALS = ("proposal", "proposal_mean")


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "otr": (
        of_texts(one_token, PROPOSALS, DESCENT),
        of_texts(lambda s: one_token(s, -0.3, 1.5), PROPOSALS, negative=-0.3, temperature=1.5),
        # Given the draws; their mean is the first claim.
        of_texts(lambda s: one_token(s, kappa=1.5, draws=4), PROPOSALS, temperature=1.5, draws=4.0, seed=3.0),
    ),
    "middle_band": (
        of_texts(lambda s: formulas.imitation(s, in_band(s, 0.2, 0.7)), (), 100, low=0.2, high=0.7),
    ),
    "sophia": (of_texts(formulas.imitation),),
    "pear": (replace(weighted(of_texts(formulas.imitation), "behavior", 2.0, updates=0), options={}),),
    "reward_conditioned": (of_texts(formulas.imitation),),
}
