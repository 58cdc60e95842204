"""Where descent ends, of methods that don't end at the optimum π_ref exp(r/β)/Z: closed forms.

μ is the policy that the samples are from, which stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agro.proof.claim import End
from agro.proof.formulas import Situation, wins


def _lambert(s: Situation) -> Tensor:
    """[X,Y] log π with β log(π/μ) + ν π/μ = A, A = (1 − 1/n)(r − E_μ r): the least E_μ (A − β log(π/μ))² of
    all policies. (arXiv 2605.28150, whose abstract was read, finds Lambert functions for methods without
    ratios; this one is derived here.)

    A is that of a group of n on average. ν makes probabilities add up to 1; it is at least 0, and without it
    the end would be π ∝ μ exp(A/β).
    """
    A_XY, low_X1 = (1 - 1 / s.n) * s.centered(s.reward), torch.zeros_like(s.reward[:, :1])
    high_X1 = torch.full_like(low_X1, 100.0)
    for _ in range(100):
        middle_X1 = (low_X1 + high_X1) / 2
        too_large_X1 = (s.p * _log_ratio(A_XY, s.beta, middle_X1).exp()).sum(1, keepdim=True) > 1
        low_X1 = torch.where(too_large_X1, middle_X1, low_X1)
        high_X1 = torch.where(too_large_X1, high_X1, middle_X1)
    return s.p.log() + _log_ratio(A_XY, s.beta, high_X1)


def _log_ratio(A_XY: Tensor, beta: float, nu_X1: Tensor) -> Tensor:
    """[X,Y] x with β x + ν e^x = A, by Newton's method from above, where it can't miss."""
    x_XY = A_XY / beta
    for _ in range(100):
        rise_XY = nu_X1 * x_XY.exp()
        x_XY = x_XY - (beta * x_XY + rise_XY - A_XY) / (beta + rise_XY)
    return x_XY


def _tilted(logp_XY: Tensor, by_XY: Tensor) -> Tensor:
    return (logp_XY + by_XY).log_softmax(1)


SAMPLER = End("μ", lambda s: s.behavior.logp())
BY_REWARD = End("μ r/Z", lambda s: _tilted(s.behavior.logp(), s.reward.log()))
OF_SAMPLER = End("μ exp(r/β)/Z", lambda s: _tilted(s.behavior.logp(), s.reward / s.beta))
LAMBERT = End("β log(π/μ) + ν π/μ = (1 − 1/n)(r − E_μ r)", _lambert)
TEACHER = End("π_ref", lambda s: s.reference.logp())
PER_TOKEN = End(
    "π_ref exp(T r/β)/Z",
    lambda s: _tilted(s.reference.logp(), s.policy.space.lengths * s.reward / s.beta),
)
BY_WINS = End("π_ref exp(P(y ≻ y')/β)/Z, y' from μ", lambda s: _tilted(s.reference.logp(), wins(s) / s.beta))
# p̂ is the mean of the votes of each pair, 3 against 1 in the proof: ⅔.
BY_VOTED_WINS = End(
    "π_ref exp((2p̂ − 1) P(y ≻ y')/β)/Z, y' from μ",
    lambda s: _tilted(s.reference.logp(), wins(s) / (3 * s.beta)),
)
