"""What each objective's source claims, written down apart from the objective: the expected gradient, and where descent goes.

`expects` returns a scalar whose gradient in the policy's weights is the claim. It is a formula over all responses of
the exact distributions, with no groups and no estimators in it.

Letters: π the policy, μ the behaviour, f the reference; p [X,Y] = μ(y), l [X,Y] = log π(y), d = l − log f(y).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from agro.objectives.clipped import EPS
from agro.proof.enumerable import Enumerable

Ends = Literal["optimum", "elsewhere", "unknown"]


@dataclass(frozen=True)
class Situation:
    """One policy, its reference and the behaviour, rewards [X,Y], β and the size of groups."""

    policy: Enumerable
    reference: Enumerable
    behavior: Enumerable
    reward: Tensor
    beta: float
    n: int

    @property
    def p(self) -> Tensor:
        """[X,Y] μ(y), which doesn't move."""
        return self.behavior.logp().detach().exp()

    @property
    def d(self) -> Tensor:
        """[X,Y] log π(y)/f(y)."""
        return self.policy.logp() - self.reference.logp().detach()

    def mean(self, v: Tensor) -> Tensor:
        """[X,Y] -> []: E over prompts and the behaviour."""
        return (self.p * v).sum(1).mean()

    def centred(self, v: Tensor) -> Tensor:
        """[X,Y] v − E_μ v."""
        return v - (self.p * v).sum(1, keepdim=True)

    @property
    def value(self) -> Tensor:
        """[X,1] the learned value of each prompt."""
        return self.policy.value.prompt[:, None]

    @property
    def kl(self) -> Tensor:
        """[X,Y,T]; see `Enumerable.kl_tokens`."""
        return self.policy.kl_tokens(self.reference)


@dataclass(frozen=True, eq=False)
class Claims:
    """Of an objective with `options`, whose `beta` is filled in where it has one.

    `off_policy`, `on_policy`: where gradient descent goes: to the regularised optimum, elsewhere, or nothing is claimed.
    `shift`: whether adding a number to all rewards of a prompt changes nothing; `reference_shift`: to all log f of one.
    """

    expects: Callable[[Situation], Tensor]
    options: Mapping[str, Any]
    off_policy: Ends
    on_policy: Ends
    shift: bool = True
    reference_shift: bool = True
    policy_gradient: Callable[[float], float] | None = (
        None  # β -> on-policy gradient over that of −E_π r + β KL(π ‖ f)
    )
    noise: bool = True  # whether rewards that are noisy count with their mean alone
    n: tuple[int, ...] = (2, 3)
    updates: int = 600  # of the descent
    judged: bool = False  # whether the two responses of a group are judged, as Bradley–Terry has it


def half_variance(s: Situation) -> Tensor:
    """E_x ½ Var_μ[R], R = r − βd (AGRO, the consistency loss with μ fixed)."""
    return 0.5 * s.mean(s.centred(s.reward - s.beta * s.d).square())


def half_variance_of_means(s: Situation) -> Tensor:
    """The same with the mean of a response's token log-ratios for their sum, divided by β."""
    return 0.5 * s.mean(s.centred(s.reward - s.beta * s.d / s.policy.space.lengths).square()) / s.beta


def weighted_residual(s: Situation) -> Tensor:
    """−E_μ[min(1, π/f) (R − E_μ R) log π], R = r − βd: weight and residual without gradient."""
    weight = s.d.detach().clamp(max=0.0).exp()
    residual = s.centred(s.reward - s.beta * s.d).detach()
    return -s.mean(weight * residual * s.policy.logp())


def half_variance_on_policy(s: Situation) -> Tensor:
    """The same with μ = π, through which the gradient flows too."""
    p, R = s.policy.logp().exp(), s.reward - s.beta * s.d
    return 0.5 * (p * (R - (p * R).sum(1, keepdim=True)).square()).sum(1).mean()


def advantage(s: Situation, beta: float) -> Tensor:
    """−E_μ[(R − E_μ R) log π], R = r − βd without gradient. On-policy its gradient is that of −E_π r + β KL(π ‖ f)."""
    return -s.mean(s.centred(s.reward - beta * s.d).detach() * s.policy.logp())


def half_variance_to_behavior(s: Situation) -> Tensor:
    """½ Var_μ[r − β (log π − log μ)] (GVPO)."""
    possible = s.p > 0
    ratio = torch.where(possible, s.policy.logp() - s.behavior.logp().detach(), 0.0)
    return 0.5 * s.mean(s.centred(s.reward - s.beta * ratio).square())


def soft_pairs(s: Situation) -> Tensor:
    """E (r_1 − β log π/μ − β log ½(exp r_1/β + exp r_2/β))² over all ordered pairs (OAPL, n = 2)."""
    ratio = torch.where(s.p > 0, s.policy.logp() - s.behavior.logp().detach(), 0.0)
    u = s.reward - s.beta * ratio
    value = s.beta * torch.logaddexp(
        s.reward[:, :, None] / s.beta, s.reward[:, None] / s.beta
    ) - s.beta * math.log(2)
    return (s.p[:, :, None] * s.p[:, None] * (u[:, :, None] - value).square()).sum((1, 2)).mean()


def adaptive_pairs(s: Situation) -> Tensor:
    """On-policy AGRO whose share c of the likelihood-ratio part is min(1, β/|R_1 − R_2|) in each pair (n = 2)."""
    R = (s.reward - s.beta * s.d).detach()
    a = R[:, :, None] - R[:, None]  # [X,Y,Y]
    c = torch.where(a.abs() > s.beta, s.beta / a.abs(), 1.0)
    weight = -s.beta * a + c * a.square() / 2
    return ((s.p[:, :, None] * s.p[:, None] * weight).sum(2) * s.policy.logp()).sum(1).mean()


def grpo_pairs(s: Situation) -> Tensor:
    """GRPO's clipped gain over all ordered pairs of responses (n = 2), where (r_1 − r_2)/2 is the advantage of the first."""
    assert s.n == 2
    mask, low, high = s.policy.space.mask, 0.8, 1.2
    half = (s.reward[:, :, None] - s.reward[:, None]) / 2  # [X,Y,Y]
    A = (half / (half.abs() * math.sqrt(2) + EPS))[..., None]
    possible = (s.p > 0)[..., None]  # what is never sampled has no ratio
    ratio = torch.where(possible, s.policy.logp_tokens() - s.behavior.logp_tokens().detach(), 0.0)
    w = ratio.exp()[:, :, None]  # [X,Y,1,T]
    gain = torch.minimum(w * A, w.clamp(low, high) * A)
    per_response = (gain * mask[:, None]).sum(-1) / mask.sum(1)[:, None]
    return -(s.p[:, :, None] * s.p[:, None] * per_response).sum((1, 2)).mean()


def square_with_stored_value(s: Situation) -> Tensor:
    """E_μ (r − βd − V*)², V* = β log E_f exp(r/β) (A*PO)."""
    value = s.beta * (s.reference.logp().detach() + s.reward / s.beta).logsumexp(1, keepdim=True)
    return s.mean((s.reward - s.beta * s.d - value).square())


def half_square_with_value(s: Situation) -> Tensor:
    """½ E_μ (r − βd − V)² (DRO)."""
    return 0.5 * s.mean((s.reward - s.beta * s.d - s.value).square())


def dro_in_units_of_reward(s: Situation) -> Tensor:
    """The same, the part that goes to the policy divided by β."""
    off = s.reward - s.beta * s.d.detach() - s.value
    return 0.5 * s.mean(off.square()) - s.mean(off.detach() * s.policy.logp())


def prefix_residuals(s: Situation) -> Tensor:
    """E_μ of the mean of ½ (V(y_<i) − Σ_{i≤u<j} (r_u − βd_u) − V(y_<j))² over all i < j, r at the last token, V = 0 after it."""
    space, total = s.policy.space, torch.zeros_like(s.reward)
    tokens = s.policy.logp_tokens() - s.reference.logp_tokens().detach()
    for y, T in enumerate(space.lengths.tolist()):
        values = [s.policy.value.prefix[:, space.places[y, t]] for t in range(T)] + [
            torch.zeros_like(s.reward[:, 0])
        ]
        pairs = [(i, j) for j in range(T + 1) for i in range(j)]
        squares = torch.zeros_like(s.reward[:, 0])
        for i, j in pairs:
            gained = -s.beta * tokens[:, y, i:j].sum(1) + (s.reward[:, y] if j == T else 0.0)
            squares = squares + 0.5 * (values[i] - gained - values[j]).square()
        total[:, y] = squares / len(pairs)
    return s.mean(total)


def judged_pairs(s: Situation, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """E loss(h) over two draws from μ, h = d of the better one minus d of the other; y is better than y' with σ(r(y) − r(y'))."""

    def over(v: Tensor) -> Tensor:
        """[X,Y] -> [X,Y,Y]: of the better one minus of the other."""
        return v[:, :, None] - v[:, None]

    chance = (
        2 * s.p[:, :, None] * s.p[:, None] * over(s.reward).sigmoid()
    )  # of {y, y'} in either order, y the better
    return (chance * loss(over(s.d))).sum((1, 2)).mean()


def imitation(s: Situation) -> Tensor:
    """−Σ log π over the mean number of tokens."""
    lengths = s.policy.space.lengths.double().expand_as(s.p)
    return -s.mean(s.policy.logp()) / s.mean(lengths)


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "agro": (
        Claims(half_variance, {"scale": "loss"}, "optimum", "optimum", policy_gradient=lambda beta: beta),
        Claims(
            lambda s: half_variance(s) / s.beta,
            {"scale": "reward"},
            "optimum",
            "optimum",
            policy_gradient=lambda beta: 1.0,
        ),
        Claims(
            lambda s: half_variance(s) / s.beta,
            {"regulariser": "triangular"},
            "optimum",
            "optimum",
            policy_gradient=lambda beta: 1.0,
        ),
        Claims(
            lambda s: half_variance(s) / s.beta,
            {"regulariser": "local"},
            "optimum",
            "optimum",
            policy_gradient=lambda beta: 1.0,
        ),
        # Statement 25. A response that the policy has left behind comes back slowly: its weight is small.
        Claims(
            weighted_residual,
            {"weight": "reference"},
            "optimum",
            "optimum",
            reference_shift=False,
            updates=2000,
        ),
        # Its optimum is another: that of β/T. A number more in log f is one over the length in R.
        Claims(half_variance_of_means, {"average": "token"}, "elsewhere", "elsewhere", reference_shift=False),
    ),
    "agro_onpolicy": (
        Claims(half_variance_on_policy, {"likelihood_ratio": 1.0}, "unknown", "unknown", noise=False),
        Claims(half_variance_on_policy, {"squared": "triangular"}, "unknown", "unknown", noise=False),
        Claims(half_variance_on_policy, {"squared": "local"}, "unknown", "unknown", noise=False),
        Claims(
            adaptive_pairs,
            {"likelihood_ratio": "adaptive"},
            "optimum",
            "optimum",
            noise=False,
            n=(2,),
            updates=800,
        ),
        Claims(
            half_variance, {"likelihood_ratio": 0.0}, "optimum", "optimum", policy_gradient=lambda beta: beta
        ),
    ),
    "squared_consistency": (
        Claims(
            half_variance, {"scale": "half_variance"}, "optimum", "optimum", policy_gradient=lambda beta: beta
        ),
        Claims(
            lambda s: 2 * (s.n - 1) / s.n / s.beta**2 * half_variance(s),
            {"scale": "trajectory"},
            "optimum",
            "optimum",
            policy_gradient=lambda beta: 4 / (3 * beta),
        ),
        Claims(
            lambda s: 2 * s.n * half_variance(s),
            {"scale": "pairs"},
            "optimum",
            "optimum",
            policy_gradient=lambda beta: 6 * beta,
        ),
        Claims(half_variance_to_behavior, {"anchor": "behavior"}, "unknown", "unknown"),
        Claims(
            soft_pairs,
            {"anchor": "behavior", "baseline": "soft", "scale": "square"},
            "unknown",
            "unknown",
            noise=False,
            n=(2,),
        ),
        Claims(
            square_with_stored_value,
            {"baseline": "stored", "scale": "square"},
            "optimum",
            "optimum",
            reference_shift=False,
            policy_gradient=lambda beta: 2 * beta,
            n=(1, 2),
        ),
    ),
    # Policy and value learn at once, which takes its time where the behaviour hardly ever shows some response.
    "dro": (
        Claims(
            dro_in_units_of_reward,
            {"scale": "reward"},
            "optimum",
            "optimum",
            shift=False,
            reference_shift=False,
            policy_gradient=lambda beta: 1.0,
            n=(1, 2),
            updates=3000,
        ),
        Claims(
            half_square_with_value,
            {"scale": "loss"},
            "optimum",
            "optimum",
            shift=False,
            reference_shift=False,
            policy_gradient=lambda beta: beta,
            n=(1, 2),
            updates=3000,
        ),
    ),
    "prefix_consistency": (
        Claims(
            prefix_residuals,
            {"scale": "loss"},
            "optimum",
            "optimum",
            shift=False,
            reference_shift=False,
            n=(1, 2),
            updates=5000,
        ),
    ),
    "rloo": (
        Claims(lambda s: advantage(s, 0.0), {"beta": 0.0}, "elsewhere", "elsewhere"),
        Claims(lambda s: advantage(s, s.beta), {}, "optimum", "optimum", policy_gradient=lambda beta: 1.0),
    ),
    "reinforce": (
        Claims(
            lambda s: -s.mean(s.reward * s.policy.logp()),
            {"baseline": "none"},
            "elsewhere",
            "elsewhere",
            shift=False,
        ),
        Claims(
            lambda s: -s.mean((s.reward - 0.5) * s.policy.logp()),
            {"baseline": 0.5},
            "elsewhere",
            "elsewhere",
            shift=False,
        ),
        # The group's mean holds r_i itself, which takes a share 1/n of the gradient away.
        Claims(lambda s: (1 - 1 / s.n) * advantage(s, 0.0), {"baseline": "mean"}, "elsewhere", "elsewhere"),
    ),
    # The prefixes of the KL are sampled, and no gradient says so: on-policy too it goes a little beside the optimum.
    "kl_pg": (
        Claims(lambda s: advantage(s, 0.0) + s.beta * s.mean(s.kl.sum(2)), {}, "elsewhere", "elsewhere"),
    ),
    "grpo": (Claims(grpo_pairs, {"beta": 0.0}, "elsewhere", "elsewhere", noise=False, n=(2,)),),
    "pair_consistency": (
        Claims(
            half_variance,
            {"gap": "reward"},
            "optimum",
            "optimum",
            policy_gradient=lambda beta: beta,
            n=(2,),
            judged=True,
        ),
        # IPO: judgements that are drawn by σ(r − r') say ½ (2σ − 1), which isn't r − r'.
        Claims(
            lambda s: judged_pairs(s, lambda h: (0.5 - s.beta * h).square() / 4),
            {},
            "elsewhere",
            "elsewhere",
            n=(2,),
            updates=200,
            judged=True,
        ),
    ),
    "dpo": (
        Claims(
            lambda s: judged_pairs(s, lambda h: torch.log1p((-s.beta * h).exp())),
            {},
            "optimum",
            "optimum",
            n=(2,),
            judged=True,
        ),
    ),
    "sft": (Claims(imitation, {}, "elsewhere", "elsewhere", n=(1, 2)),),
}
