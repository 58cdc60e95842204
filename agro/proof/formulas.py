"""The expected gradients that sources claim, as formulas that are independent of the objectives' code.

A claim is a scalar whose gradient in the policy's weights is the expected gradient. It is a formula over all
responses of the exact distributions, without groups or estimators.

Letters: π the policy, μ the behavior policy, f the reference; p [X,Y] = μ(y), l [X,Y] = log π(y),
d = l − log f(y).

Formulas of advantages are expectations over all ordered groups. A is the advantage of a group's first
response, which by symmetry represents all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from agro.proof.enumerable import Enumerable, optimal_value
from agro.proof.expectation import PART_WEIGHTS, parts_of

EPS = 1e-6  # in the denominator of GRPO's standardized advantage


@dataclass(frozen=True)
class Situation:
    """A policy, its reference and the behavior policy, rewards [X,Y], β, the size n of groups, and whether a
    response of several tokens is an episode of two rows: its first token, and the others."""

    policy: Enumerable
    reference: Enumerable
    behavior: Enumerable
    reward: Tensor
    beta: float
    n: int
    two_rows: bool = False
    old: Enumerable | None = None  # the policy when the batch was drawn; None: the behavior
    expert: Enumerable | None = None  # writes one more response in each group

    @property
    def p(self) -> Tensor:
        """[X,Y] μ(y), without gradient."""
        return self.behavior.logp().detach().exp()

    @property
    def d(self) -> Tensor:
        """[X,Y] log π(y)/f(y)."""
        return self.d_tokens.sum(2)

    @property
    def d_tokens(self) -> Tensor:
        """[X,Y,T]"""
        return self.policy.logp_tokens() - self.reference.logp_tokens().detach()

    @property
    def e_tokens(self) -> Tensor:
        """[X,Y,T] log π/μ of each token; 0 for responses that are never sampled, which have no ratio."""
        return self._ratio_to(self.behavior)

    @property
    def e(self) -> Tensor:
        """[X,Y] log π(y)/μ(y)."""
        return self.e_tokens.sum(2)

    @property
    def drawn_tokens(self) -> Tensor:
        """[X,Y,T] log π/π_old of each token, π_old the policy when the batch was drawn."""
        return self._ratio_to(self.behavior if self.old is None else self.old)

    def _ratio_to(self, sampler: Enumerable) -> Tensor:
        ratio_XYT = self.policy.logp_tokens() - sampler.logp_tokens().detach()
        return torch.where((self.p > 0)[..., None], ratio_XYT, 0.0)

    @property
    def R(self) -> Tensor:
        """[X,Y] r − βd."""
        return self.reward - self.beta * self.d

    @property
    def first_logp(self) -> Tensor:
        """[X,K] log π of the first response of each group."""
        return self.policy.logp()[:, self.groups[:, 0]]

    @property
    def optimal_value(self) -> Tensor:
        """[X,1] V* = β log E_f exp(r/β)."""
        return optimal_value(self.reference, self.reward, self.beta)[:, None]

    def mean(self, v_XY: Tensor) -> Tensor:
        """[X,Y] -> []: E over prompts and the behavior policy."""
        return (self.p * v_XY).sum(1).mean()

    @property
    def groups(self) -> Tensor:
        """[K,n] all ordered groups of n responses."""
        return torch.cartesian_prod(*[torch.arange(len(self.policy.space.responses))] * self.n).view(
            -1, self.n
        )

    def mean_groups(self, v_XK: Tensor) -> Tensor:
        """[X,K] -> []: E over prompts and groups of draws from the behavior policy."""
        return (self.p[:, self.groups].prod(-1) * v_XK).sum(1).mean()

    def centered(self, v_XY: Tensor) -> Tensor:
        """[X,Y] v − E_μ v."""
        return v_XY - (self.p * v_XY).sum(1, keepdim=True)

    @property
    def value(self) -> Tensor:
        """[X,Y] the learned value of each response: the mean over the contexts at which its rows start."""
        space, prefix_XC = self.policy.space, self.policy.value.prefix
        first_XY = prefix_XC[:, space.places[:, 0]]
        if not self.two_rows:
            return first_XY
        return torch.where(space.lengths > 1, (first_XY + prefix_XC[:, space.places[:, 1]]) / 2, first_XY)

    @property
    def kl(self) -> Tensor:
        """[X,Y,T]; see `Enumerable.kl_tokens`."""
        return self.policy.kl_tokens(self.reference)


def half_variance(s: Situation) -> Tensor:
    """E_x ½ Var_μ[R], R = r − βd (AGRO, the consistency loss with μ fixed)."""
    return 0.5 * s.mean(s.centered(s.R).square())


def half_variance_of_means(s: Situation) -> Tensor:
    """The same with the mean of a response's token log-ratios instead of their sum, divided by β."""
    return 0.5 * s.mean(s.centered(s.reward - s.beta * s.d / s.policy.space.lengths).square()) / s.beta


class _Weighted(Enumerable):
    """A policy in whose gradient each token counts w [X,Y,T] times."""

    def __init__(self, policy: Enumerable, w_XYT: Tensor) -> None:
        self.__dict__.update(policy.__dict__)
        self.w_XYT = w_XYT

    def logp_tokens(self) -> Tensor:
        return sloped(super().logp_tokens(), self.w_XYT)


@dataclass(frozen=True)
class CorrectionWeight:
    """A correction weight of the gradient, with the options of `agro.objectives.ingredients`."""

    weight: Literal["reference", "behavior", "mismatch"] = "reference"
    maximum: float | None = 1.0
    minimum: float = 0.0
    level: Literal["token", "sequence", "mean"] = "sequence"
    rule: Literal["truncate", "mask"] = "truncate"

    def __call__(self, expects: Callable[[Situation], Tensor]) -> Callable[[Situation], Tensor]:
        """`expects` with each token's part of its gradient times the weight."""
        return lambda s: expects(replace(s, policy=_Weighted(s.policy, self._of(s).detach())))

    def _of(self, s: Situation) -> Tensor:
        """[X,Y,T]"""
        log_XYT = {"reference": s.d_tokens, "behavior": s.e_tokens, "mismatch": s.e_tokens - s.drawn_tokens}[
            self.weight
        ]
        if self.level != "token":
            tokens = s.policy.space.lengths[:, None] if self.level == "mean" else 1
            log_XYT = (log_XYT.sum(2, keepdim=True) / tokens).expand_as(log_XYT)
        ratio_XYT, maximum = log_XYT.exp(), math.inf if self.maximum is None else self.maximum
        if self.rule == "truncate":
            return ratio_XYT.clamp(self.minimum, maximum)
        return ratio_XYT * ((ratio_XYT >= self.minimum) & (ratio_XYT <= maximum))


def half_variance_on_policy(s: Situation) -> Tensor:
    """The same with μ = π, with the gradient through both."""
    p, R = s.policy.logp().exp(), s.R
    return 0.5 * (p * (R - (p * R).sum(1, keepdim=True)).square()).sum(1).mean()


def advantage(s: Situation, beta: float) -> Tensor:
    """−E_μ[(R − E_μ R) log π], R = r − βd without gradient. On-policy its gradient is that of −E_π r + β
    KL(π ‖ f)."""
    return -s.mean(s.centered(s.reward - beta * s.d).detach() * s.policy.logp())


def half_variance_to_behavior(s: Situation) -> Tensor:
    """½ Var_μ[r − β (log π − log μ)] (GVPO)."""
    return 0.5 * s.mean(s.centered(s.reward - s.beta * s.e).square())


def baseline_for_squares(s: Situation) -> Tensor:
    """On-policy AGRO with v_i − v̄_{-i} for v_i = ½ (R_i − R̄_{-i})²: a share of 1 − 1/(n−1)² remains of the
    likelihood-ratio part ½ E_π[(R − E R)² ∇log π], since R_i is in the others' means too."""
    R = s.R.detach()
    likelihood_ratio = 0.5 * s.mean(s.centered(R).square() * s.policy.logp())
    return half_variance(s) + (1 - (s.n - 1) ** -2) * likelihood_ratio


def soft_maxima(s: Situation, value_beta: float) -> Tensor:
    """E (r_1 − β log π/μ − β₁ log mean exp(r_i/β₁))², the mean over a group (OAPL)."""
    u_XY = s.reward - s.beta * s.e
    r_XKn = s.reward[:, s.groups] / value_beta
    value_XK = value_beta * (r_XKn.logsumexp(-1) - math.log(s.n))
    return s.mean_groups((u_XY[:, s.groups[:, 0]] - value_XK).square())


def adaptive(s: Situation) -> Tensor:
    """On-policy AGRO whose share c of the likelihood-ratio part is min(1, β/max_i (R_i − R̄_{-i})) in each
    group."""
    R_XKn = s.R.detach()[:, s.groups]
    off_XKn = s.n / (s.n - 1) * (R_XKn - R_XKn.mean(-1, keepdim=True))
    c_XK = (s.beta / off_XKn.amax(-1)).abs().clamp(max=1.0)
    weight_XK = -s.beta * off_XKn[..., 0] + c_XK * off_XKn[..., 0].square() / 2
    return s.mean_groups(weight_XK * s.first_logp)


def square_with_stored_value(s: Situation) -> Tensor:
    """E_μ (r − βd − V*)² (A*PO)."""
    return s.mean((s.R - s.optimal_value).square())


def square_of_quantile(s: Situation) -> Tensor:
    """E_μ (q − β log Z − βd)², q(y) = P_f(r ≤ r(y)), Z = ∫ exp(q/β) dq from 0 to 1 (QRPO)."""
    f = s.reference.logp().detach().exp()
    q = (f[:, None, :] * (s.reward[:, None, :] <= s.reward[:, :, None])).sum(-1)
    log_Z = math.log(s.beta * (math.exp(1 / s.beta) - 1))
    return s.mean((q - s.beta * log_Z - s.beta * s.d).square())


def half_square_with_value(s: Situation) -> Tensor:
    """½ E_μ (r − βd − V)²; the policy's part of the gradient is divided by β (DRO)."""
    return 0.5 * s.mean((s.reward - s.beta * sloped(s.d, 1 / s.beta) - s.value).square())


def sloped(x: Tensor, slope: float | Tensor) -> Tensor:
    """x, with its derivative times `slope`."""
    return slope * x + (1 - slope) * x.detach()


def imitation(s: Situation, k: Tensor | float = 1.0) -> Tensor:
    """−Σ log π over the mean number of tokens; a response is imitated with probability k [X,Y]."""
    tokens = s.mean(k * s.policy.space.lengths.double().expand_as(s.p))
    return -s.mean(k * s.policy.logp()) / torch.where(tokens > 0, tokens, 1.0)


def is_best(s: Situation) -> Tensor:
    """[X,Y] the probability that another draw has a lower reward."""
    return ((s.reward[:, :, None] > s.reward[:, None]) * s.p[:, None]).sum(2)


def wins(s: Situation) -> Tensor:
    """[X,Y] the probability that a response is judged better than another draw (Bradley–Terry)."""
    return ((s.reward[:, :, None] - s.reward[:, None]).sigmoid() * s.p[:, None]).sum(2)


def reinforce(s: Situation, baseline: float | Tensor) -> Tensor:
    """−E_μ[(r − b) log π]."""
    return -s.mean((s.reward - baseline) * s.policy.logp())


def kl_policy_gradient(s: Situation) -> Tensor:
    """The policy gradient of r, and β times the KLs after sampled prefixes."""
    return advantage(s, 0.0) + s.beta * s.mean(s.kl.sum(2))


def square_to_reward(s: Situation, ratio_XY: Tensor) -> Tensor:
    """E (r_1 − β log ratio − r̄)², r̄ the mean reward of a group (Kimi)."""
    u_XY, r_XKn = s.reward - s.beta * ratio_XY, s.reward[:, s.groups]
    return s.mean_groups((u_XY[:, s.groups[:, 0]] - r_XKn.mean(-1)).square())


def squared_norm(s: Situation) -> Tensor:
    """[X,Y] Σ_t (1 − π_t)², which approximates |∇log π|²."""
    left_XYT = torch.where(s.policy.space.mask, 1.0 - s.policy.logp_tokens().detach().exp(), 0.0)
    return left_XYT.square().sum(2)


def optimal_baseline(
    s: Situation, maximum: float | None = None, power: float = 1.0, normalize: bool = False
) -> Tensor:
    """−n/(n−1) E w_1 (R_1 − b) log π(y_1), b = Σ w g R / Σ w g over the group, g = Σ_t (1 − π_t)².

    w = min(maximum, (π/f)^power), or 1 without `maximum`; with `normalize` the ratios of a group are divided
    by the largest if all are below 1.
    """
    R_XKn = s.R.detach()[:, s.groups]
    w_XKn = torch.ones_like(R_XKn)
    if maximum is not None:
        d_XKn = s.d.detach()[:, s.groups]
        fallen_XK = d_XKn.amax(-1, keepdim=True).clamp(max=0.0) if normalize else 0.0
        w_XKn = (power * (d_XKn - fallen_XK)).exp().clamp(max=maximum)
    wg_XKn = w_XKn * squared_norm(s)[:, s.groups]
    baseline_XK = (wg_XKn * R_XKn).sum(-1) / wg_XKn.sum(-1)
    part_XK = w_XKn[..., 0] * (R_XKn[..., 0] - baseline_XK) * s.first_logp
    return -s.n / (s.n - 1) * s.mean_groups(part_XK)


def against_other_groups(s: Situation) -> Tensor:
    """−E (R_1 − b) log π(y_1), b = Σ g R / Σ g over all groups except those of the same responses in any
    order."""
    R_XKn = s.R.detach()[:, s.groups]
    g_XKn = squared_norm(s)[:, s.groups]
    p_XK = s.p[:, s.groups].prod(-1)
    above_XK, total_XK = p_XK * (g_XKn * R_XKn).sum(-1), p_XK * g_XKn.sum(-1)
    names = s.groups.sort(-1).values
    same_KK = (names[:, None] == names[None]).all(-1).double()
    b_XK = (above_XK.sum() - above_XK @ same_KK) / (total_XK.sum() - total_XK @ same_KK)
    return -s.mean_groups((R_XKn[..., 0] - b_XK) * s.first_logp)


Weight = Callable[[Tensor, Tensor], Tensor]  # takes (w [X,K,T], A [X,K,1])


def advantage_of_first(s: Situation, kind: str) -> Tensor:
    """[X,K] the advantage of the first response of each group; `kind`: see `agro.objectives.advantage`."""
    r_XKn = s.reward[:, s.groups]
    r_XK, mean_XK = r_XKn[..., 0], r_XKn.mean(-1)
    if kind == "reinforce_pp":
        return _over_all_tokens(s, r_XK)
    if kind == "reinforce_pp_baseline":
        return _over_all_tokens(s, r_XK - mean_XK)
    if kind == "gdpo":
        return _over_all_tokens(s, _by_part(s))
    if kind == "others":
        return r_XK - r_XKn[..., 1:].mean(-1)
    if kind == "opo":
        T_Kn = s.policy.space.lengths[s.groups].double()
        return r_XK - (T_Kn * r_XKn).sum(-1) / T_Kn.sum(-1)
    if kind == "red_drop":
        return _after_drops(r_XKn)
    equal_XK = r_XKn.amax(-1) == r_XKn.amin(-1)
    off_XK = torch.where(equal_XK, 0.0, r_XK - mean_XK)
    if kind == "standardized":
        return off_XK / (r_XKn.std(-1) + EPS)
    return off_XK / mean_XK.abs() if kind == "maxrl" else off_XK


def _by_part(s: Situation) -> Tensor:
    """[X,K] Σ over the parts of a reward of their weight times (r − r̄)/(std + 1e-6)."""
    total_XK = torch.zeros_like(s.reward[:, s.groups[:, 0]])
    for part_XY, weight in zip(parts_of(s.reward).unbind(2), PART_WEIGHTS, strict=True):
        r_XKn = part_XY[:, s.groups]
        spread_XK = r_XKn.std(-1)
        total_XK = total_XK + weight * (r_XKn[..., 0] - r_XKn.mean(-1)) / (spread_XK + EPS)
    return total_XK


def _over_all_tokens(s: Situation, v_XK: Tensor) -> Tensor:
    """[X,K] v minus its mean over all tokens, divided by their standard deviation (REINFORCE++)."""
    share_XK = s.p[:, s.groups].prod(-1) * s.policy.space.lengths[s.groups[:, 0]]
    share_XK = share_XK / share_XK.sum()
    off_XK = v_XK - (share_XK * v_XK).sum()
    return off_XK / (share_XK * off_XK.square()).sum().clamp(min=1e-8).sqrt()


def _after_drops(r_XKn: Tensor) -> Tensor:
    """[X,K] for groups of three: of two negatives one is dropped, each with probability ½."""
    below_XKn = r_XKn < r_XKn.mean(-1, keepdim=True) - 1e-12
    halves = []
    for dropped in itertools.combinations(range(3), 1):
        rest_XKn = torch.ones_like(r_XKn)
        rest_XKn[..., dropped] = 0.0
        center_XK = (rest_XKn * r_XKn).sum(-1) / 2
        chance_XK = 0.5 * below_XKn[..., dropped[0]]
        halves.append(chance_XK * rest_XKn[..., 0] * (r_XKn[..., 0] - center_XK))
    plain_XK = r_XKn[..., 0] - r_XKn.mean(-1)
    return torch.where(below_XKn.sum(-1) == 2, torch.stack(halves).sum(0), plain_XK)


def summed(s: Situation, kind: str, shift: float = 0.0) -> Tensor:
    """−E[(A − shift) log π]."""
    return -s.mean_groups((advantage_of_first(s, kind) - shift) * s.first_logp)


def weighed(s: Situation, kind: str, weight: Weight, factor: float = 1.0) -> Tensor:
    """−E[Σ_t k_t A log π_t] divided by the mean number of tokens, k = `weight` without gradient."""
    return -factor * s.mean_groups(gain(s, kind, weight)) / mean_tokens(s)


def in_responses(s: Situation, kind: str, weight: Weight) -> Tensor:
    """The same with the mean over a response's tokens, then over responses."""
    return -s.mean_groups(gain(s, kind, weight) / s.policy.space.lengths[s.groups[:, 0]])


def gain(s: Situation, kind: str, weight: Weight) -> Tensor:
    """[X,K] Σ_t k_t A log π_t of the first response of each group."""
    first_K = s.groups[:, 0]
    A_XK1 = advantage_of_first(s, kind)[..., None]
    k_XKT = weight(s.e_tokens.detach().exp()[:, first_K], A_XK1)
    return (k_XKT * A_XK1 * s.policy.logp_tokens()[:, first_K]).sum(-1)


def mean_tokens(s: Situation) -> Tensor:
    """E_μ of a response's number of tokens."""
    return s.mean(s.policy.space.lengths.double().expand_as(s.p))


def per_token(s: Situation, v_XYT: Tensor) -> Tensor:
    """E_μ of the sum over tokens, divided by their mean number."""
    return s.mean(torch.where(s.policy.space.mask, v_XYT, 0.0).sum(2)) / mean_tokens(s)
