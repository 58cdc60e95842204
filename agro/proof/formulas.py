"""What each objective's source claims, as formulas that are written apart from the objective: its expected
gradient.

A claim is a scalar whose gradient in the policy's weights is the expected gradient. It is a formula over all
responses of the exact distributions, with no groups and no estimators in it.

Letters: π the policy, μ the behavior policy, f the reference; p [X,Y] = μ(y), l [X,Y] = log π(y), d = l − log
f(y).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agro.objectives.clipped import EPS
from agro.proof.enumerable import Enumerable


@dataclass(frozen=True)
class Situation:
    """One policy, its reference and the behavior policy, rewards [X,Y], β and the size of groups."""

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

    @property
    def e_tokens(self) -> Tensor:
        """[X,Y,T] log π/μ of each token; 0 for what is never sampled, which has no ratio."""
        ratio_XYT = self.policy.logp_tokens() - self.behavior.logp_tokens().detach()
        return torch.where((self.p > 0)[..., None], ratio_XYT, 0.0)

    def mean(self, v_XY: Tensor) -> Tensor:
        """[X,Y] -> []: E over prompts and the behavior policy."""
        return (self.p * v_XY).sum(1).mean()

    def mean_pairs(self, v_XYY: Tensor) -> Tensor:
        """[X,Y,Y] -> []: E over prompts and two draws from the behavior policy."""
        return (self.p[:, :, None] * self.p[:, None] * v_XYY).sum((1, 2)).mean()

    def centered(self, v_XY: Tensor) -> Tensor:
        """[X,Y] v − E_μ v."""
        return v_XY - (self.p * v_XY).sum(1, keepdim=True)

    @property
    def value(self) -> Tensor:
        """[X,1] the learned value of each prompt."""
        return self.policy.value.prompt[:, None]

    @property
    def kl(self) -> Tensor:
        """[X,Y,T]; see `Enumerable.kl_tokens`."""
        return self.policy.kl_tokens(self.reference)


def half_variance(s: Situation) -> Tensor:
    """E_x ½ Var_μ[R], R = r − βd (AGRO, the consistency loss with μ fixed)."""
    return 0.5 * s.mean(s.centered(s.reward - s.beta * s.d).square())


def half_variance_of_means(s: Situation) -> Tensor:
    """The same with the mean of a response's token log-ratios for their sum, divided by β."""
    return 0.5 * s.mean(s.centered(s.reward - s.beta * s.d / s.policy.space.lengths).square()) / s.beta


def weighted_residual(s: Situation) -> Tensor:
    """−E_μ[min(1, π/f) (R − E_μ R) log π], R = r − βd: weight and residual without gradient."""
    weight = s.d.detach().clamp(max=0.0).exp()
    residual = s.centered(s.reward - s.beta * s.d).detach()
    return -s.mean(weight * residual * s.policy.logp())


def half_variance_on_policy(s: Situation) -> Tensor:
    """The same with μ = π, through which the gradient flows too."""
    p, R = s.policy.logp().exp(), s.reward - s.beta * s.d
    return 0.5 * (p * (R - (p * R).sum(1, keepdim=True)).square()).sum(1).mean()


def advantage(s: Situation, beta: float) -> Tensor:
    """−E_μ[(R − E_μ R) log π], R = r − βd without gradient. On-policy its gradient is that of −E_π r + β
    KL(π ‖ f)."""
    return -s.mean(s.centered(s.reward - beta * s.d).detach() * s.policy.logp())


def half_variance_to_behavior(s: Situation) -> Tensor:
    """½ Var_μ[r − β (log π − log μ)] (GVPO)."""
    return 0.5 * s.mean(s.centered(s.reward - s.beta * s.e_tokens.sum(2)).square())


def soft_pairs(s: Situation) -> Tensor:
    """E (r_1 − β log π/μ − β log ½(exp r_1/β + exp r_2/β))² over all ordered pairs (OAPL, n = 2)."""
    u_XY = s.reward - s.beta * s.e_tokens.sum(2)
    r_XY = s.reward / s.beta
    value_XYY = s.beta * torch.logaddexp(r_XY[:, :, None], r_XY[:, None]) - s.beta * math.log(2)
    return s.mean_pairs((u_XY[:, :, None] - value_XYY).square())


def adaptive_pairs(s: Situation) -> Tensor:
    """On-policy AGRO whose share c of the likelihood-ratio part is min(1, β/|R_1 − R_2|) in each pair (n =
    2)."""
    R_XY = (s.reward - s.beta * s.d).detach()
    a_XYY = R_XY[:, :, None] - R_XY[:, None]
    c_XYY = torch.where(a_XYY.abs() > s.beta, s.beta / a_XYY.abs(), 1.0)
    weight_XYY = -s.beta * a_XYY + c_XYY * a_XYY.square() / 2
    return s.mean_pairs(weight_XYY * s.policy.logp()[:, :, None])


def clipped_pairs(s: Situation, log_ratio_XYT: Tensor, low: float, high: float) -> Tensor:
    """E of a clipped gain over all ordered pairs of responses (n = 2): the advantage of the first is (r_1 −
    r_2)/2, standardized.

    Mean over the tokens of a response.
    """
    assert s.n == 2
    mask_YT = s.policy.space.mask
    half_XYY = (s.reward[:, :, None] - s.reward[:, None]) / 2
    A = (half_XYY / (half_XYY.abs() * math.sqrt(2) + EPS))[..., None]
    w = log_ratio_XYT.exp()[:, :, None]  # [X,Y,1,T]
    gain = torch.minimum(w * A, w.clamp(low, high) * A)
    return -s.mean_pairs((gain * mask_YT[:, None]).sum(-1) / mask_YT.sum(1)[:, None])


def grpo_pairs(s: Situation) -> Tensor:
    """Ratios token by token (GRPO)."""
    return clipped_pairs(s, s.e_tokens, 0.8, 1.2)


def gspo_pairs(s: Situation) -> Tensor:
    """One ratio a response, the geometric mean of its tokens' (GSPO)."""
    mean_XY = s.e_tokens.sum(2) / s.policy.space.mask.sum(1)
    return clipped_pairs(s, mean_XY[..., None].expand_as(s.e_tokens), 1 - 3e-4, 1 + 4e-4)


def tapered(s: Situation, baseline: float) -> Tensor:
    """−E_μ[k (r − b) log π / T], k = 1 where r > b, else min(1, π/μ), without gradient (TOPR)."""
    ratio_XY = s.e_tokens.sum(2).exp().detach()
    weight_XY = torch.where(s.reward > baseline, 1.0, ratio_XY.clamp(max=1.0))
    return -s.mean(weight_XY * (s.reward - baseline) * s.policy.logp() / s.policy.space.lengths)


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
    """E_μ of the mean of ½ (V(y_<i) − Σ_{i≤u<j} (r_u − βd_u) − V(y_<j))² over all i < j, r at the last
    token, V = 0 after it."""
    space, total_XY = s.policy.space, torch.zeros_like(s.reward)
    d_XYT = s.policy.logp_tokens() - s.reference.logp_tokens().detach()
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


def judged_pairs(s: Situation, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """E loss(h) over two draws from μ, h = d of the better one minus d of the other; y is better than y'
    with σ(r(y) − r(y'))."""
    gap_XYY = s.reward[:, :, None] - s.reward[:, None]
    h_XYY = s.d[:, :, None] - s.d[:, None]
    return s.mean_pairs(2 * gap_XYY.sigmoid() * loss(h_XYY))  # y is the better one in either order of {y, y'}


def ipo(s: Situation) -> Tensor:
    """¼ (½ − βh)² (IPO, times β²/4)."""
    return judged_pairs(s, lambda h: (0.5 - s.beta * h).square() / 4)


def bradley_terry(s: Situation) -> Tensor:
    """−log σ(βh) (DPO)."""
    return judged_pairs(s, lambda h: torch.log1p((-s.beta * h).exp()))


def imitation(s: Situation) -> Tensor:
    """−Σ log π over the mean number of tokens."""
    lengths = s.policy.space.lengths.double().expand_as(s.p)
    return -s.mean(s.policy.logp()) / s.mean(lengths)


def reinforce(s: Situation, baseline: float) -> Tensor:
    """−E_μ[(r − b) log π]."""
    return -s.mean((s.reward - baseline) * s.policy.logp())


def kl_policy_gradient(s: Situation) -> Tensor:
    """The policy gradient of r, and β times the KLs after sampled prefixes."""
    return advantage(s, 0.0) + s.beta * s.mean(s.kl.sum(2))
