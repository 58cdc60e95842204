"""Objectives with ratios that keep the policy near what generated the samples by other means than PPO's clip.

BAPO (arXiv 2510.18927) searches bounds of the clip in each step, so that tokens pushed up weigh enough
against tokens pushed down. A token with A > 0 adds |A| min(w, c_high) to P, one with A < 0 adds
|A| max(w, c_low) to N. While P is too small relative to N, one bound after the other is raised by a step, up
to its maximum. Both sums are over the complete step, so rows are coupled by step; the bounds are constant in
the gradient.

In the paper's form ("value"), raising c_low can't help: max(w, c_low) grows with c_low and so does N. If the
start is below the target, c_low runs to its maximum. With the criterion "gradient" a sum counts only the
tokens that have a gradient, w ≤ c_high or w ≥ c_low, and raising c_low lowers N, as the paper intends.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import torch

from agro.objectives.advantage import centered, standardized
from agro.objectives.core import SINGLETONS, Objective, Rule, Streams, Terms, always, coupling
from agro.objectives.ingredients import IMITATION, KL_TERM, WEIGHT, Ratio, anchor_logp, k3, log_ratio
from agro.objectives.methods.clipped import Clip, clipped_gain, floored_gain, limited
from agro.objectives.needs import BEHAVIOR_LOGP, DRAWN_LOGP, GROUPS, REF_LOGP, REWARD
from agro.objectives.options import Average, Beta, Option
from agro.objectives.reduce import Groups, average_tokens, token_mean, token_weight
from agro.types import Batch, Tensor

DUAL_CLIP = 3.0  # of BAPO's code

Bound = tuple[float, float, float]  # start, maximum and step
Criterion = Annotated[
    Literal["value", "gradient"],
    Option("how a clipped token counts in the search: its clipped value, or 0, as it has no gradient"),
]
Low = Annotated[Bound, Option("lower bound of the ratio: its start, maximum and step", "ratio", ge=0)]
High = Annotated[Bound, Option("upper bound of the ratio: its start, maximum and step", "ratio", ge=0)]


def deepseek_v32(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    clip: Clip = (0.2, 0.2),
    off_policy: Annotated[
        float,
        Option(
            "a response with A < 0 is dropped if its mean log μ/π over tokens is above this", "nats per token"
        ),
    ] = 0.5,
) -> Terms:
    """DeepSeek-V3.2's GRPO (arXiv 2512.02556, eqs. 7 to 9): −M min(w A, clamp(w, 1−ε_low, 1+ε_high) A) + β w
    k3, M = 0 if A < 0 and mean_t(log μ − log π) > δ.

    A = r − r̄. A wrong response that became improbable isn't pushed down further. μ in the mask is
    always the recorded behavior; the mask is constant. A dropped response keeps its place in the mean and its
    KL term. The report gives neither clip nor δ; TRL's guide suggests δ = 0.5.
    """
    groups = Groups.of(batch)
    advantage_N = centered(groups)
    behind_N = -groups.mean_tokens(log_ratio(streams, batch, "behavior").detach())
    dropped_N = (advantage_N < 0) & (behind_N > off_policy)
    advantage_BT = groups.at_tokens(torch.where(dropped_N, 0.0, advantage_N))
    w_BT = log_ratio(streams, batch, ratio).exp()
    gain_BT = clipped_gain(w_BT, advantage_BT, 1 - clip[0], 1 + clip[1])
    stopped_BT = (w_BT * advantage_BT > gain_BT) | groups.at_tokens(dropped_N)
    loss = groups.average_responses(groups.mean_tokens(-gain_BT))
    return limited(loss, batch, stopped_BT, w_BT)


def kimi_k25(
    streams: Streams,
    batch: Batch,
    *,
    pull: Annotated[
        float, Option("times the squared log-ratio of each token", "loss per square nat of a token", ge=0)
    ] = 1e-3,
) -> Terms:
    """Kimi K2.5 (arXiv 2602.02276): −w A + τ e² of each token, e = log π/μ, w = exp e, μ the recorded
    behavior.

    A = r − r̄; the mean over all tokens of the step. The squares pull each token back to its probability at
    sampling; AGRO squares the sum over the response, to the reference, which is why its optimum is known and
    this one's isn't. The report also clamps w to unspecified bounds, whatever the sign of A; prime-rl, where
    this equation was read, masks tokens like `dppo` instead.
    """
    groups = Groups.of(batch)
    e_BT = log_ratio(streams, batch, "behavior")
    w_BT = e_BT.exp()
    loss_BT = -w_BT * groups.at_tokens(centered(groups)) + pull * e_BT.square()
    return Terms(token_mean(batch, loss_BT), metrics={"ratio_max": w_BT.max()})


def sapo(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    temperature: Annotated[
        tuple[float, float], Option("τ of the gate for A > 0, and otherwise", "per ratio", gt=0)
    ] = (1.0, 1.05),
    average: Average = "response",
) -> Terms:
    """SAPO (arXiv 2511.20347, eqs. 5 and 6): −(4/τ) σ(τ (w − 1)) A, a soft gate in place of the clip.

    Its slope in log π is −4 σ (1 − σ) w A: −A at w = 1, falling on both sides, faster the larger τ is. A as
    in `grpo`; token mean in a response, mean in a group, mean over groups. verl averages over all tokens of
    the step.
    """
    groups = Groups.of(batch)
    advantage_BT = groups.at_tokens(standardized(groups))
    w_BT = log_ratio(streams, batch, ratio).exp()
    tau_BT = torch.full_like(w_BT, temperature[1]).masked_fill(advantage_BT > 0, temperature[0])
    # By a logarithm, because the sigmoid's own gradient loses its digits near 1.
    gate_BT = 4 / tau_BT * torch.nn.functional.logsigmoid(tau_BT * (w_BT - 1)).exp()
    return Terms(average_tokens(groups, -gate_BT * advantage_BT, average), metrics={"ratio_max": w_BT.max()})


def dppo(
    streams: Streams,
    batch: Batch,
    *,
    divergence: Annotated[
        Literal["tv", "kl"],
        Option("divergence of two outcomes, this token or another: total variation, or KL(μ ‖ π)"),
    ] = "tv",
    limit: Annotated[
        float, Option("largest divergence of a token that is still moved away", "divergence", ge=0)
    ] = 0.2,
    average: Average = "token",
) -> Terms:
    """DPPO (arXiv 2602.04879): −M w A of each token, M = 0 if the gradient leads away from μ and D > δ.

    D is |π − μ| of the token's probability ("tv"), or μ log(μ/π) + (1−μ) log((1−μ)/(1−π)) ("kl"); it leads
    away if A > 0 and π > μ, or A < 0 and π < μ. So a rare token may change its ratio freely, a
    frequent one hardly. μ is the recorded behavior, M is constant; A = r − r̄, and the mean is over all
    tokens of the step as in prime-rl and verl. prime-rl's default adds the squares of `kimi_k25`.
    """
    groups = Groups.of(batch)
    advantage_BT = groups.at_tokens(centered(groups))
    e_BT = log_ratio(streams, batch, "behavior")
    w_BT = e_BT.exp()
    mu_BT = torch.where(batch.mask, anchor_logp(batch, "behavior"), 0.0)
    moved_BT = _divergence(streams["logp"].detach(), mu_BT, divergence)
    masked_BT = (advantage_BT * e_BT.detach() > 0) & (moved_BT > limit)
    loss = average_tokens(groups, torch.where(masked_BT, 0.0, -w_BT * advantage_BT), average)
    return limited(loss, batch, masked_BT, w_BT)


def remix(
    streams: Streams,
    batch: Batch,
    *,
    clip: Clip = (0.2, 0.2),
    beta: Beta = 0.0,
    base_share: Annotated[
        float, Option("share of the KL to the reference; the rest is to π_old", "share", ge=0, le=1)
    ] = 0.5,
) -> Terms:
    """ReMix (arXiv 2507.06892): −min(w A, clamp(w, κ−ε_low, κ+ε_high) A) + β (λ k3(π_ref) + (1−λ) k3(π_old)).

    w = π/μ of a token, μ the recorded behavior, κ = π_old/μ, π_old the policy when the batch was drawn: the
    clip holds on to π_old whatever generated the samples, and on fresh samples it is PPO's. At π = π_old it
    never binds. A as in `grpo`; the mean over all tokens of the step. The paper's λ falls from 1 to 0.5 (a
    schedule), and its reincarnation is a second phase (recipe remix). The paper doesn't name its KL estimate;
    k3 is GRPO's.
    """
    groups = Groups.of(batch)
    advantage_BT = groups.at_tokens(standardized(groups))
    w_BT = log_ratio(streams, batch, "behavior").exp()
    u_BT = log_ratio(streams, batch, "old")
    kappa_BT = (log_ratio(streams, batch, "behavior") - u_BT).detach().exp()
    near_BT = w_BT.minimum(kappa_BT + clip[1]).maximum(kappa_BT - clip[0])
    gain_BT = torch.minimum(w_BT * advantage_BT, near_BT * advantage_BT)
    loss_BT = -gain_BT
    if beta > 0:
        d_BT = log_ratio(streams, batch, "reference")
        loss_BT = loss_BT + beta * (base_share * k3(d_BT) + (1 - base_share) * k3(u_BT))
    return limited(token_mean(batch, loss_BT), batch, w_BT * advantage_BT > gain_BT, w_BT)


def props(
    streams: Streams,
    batch: Batch,
    *,
    clip: Annotated[
        float, Option("how far below 1 the ratio of a token is pushed", "ratio", gt=0, lt=1)
    ] = 0.3,
) -> Terms:
    """A sampler of what the store lacks (PROPS, arXiv 2311.08290): max(w, clamp(w, 1−ε, 1+ε)) = max(w, 1−ε)
    token by token, w = φ/π, mean over all tokens.

    This is PPO's clip with the advantage −1 for all stored responses: each becomes less probable, whatever
    its reward, until w < 1−ε. π, the policy to sample for, is the reference; the sampler φ starts as π and is
    trained again before each collection. The authors' λ KL(π ‖ φ) is 0 by default, and isn't here; they stop
    at a limit of the KL, like evaluate.target_kl.
    """
    w_BT = log_ratio(streams, batch, "reference").exp()
    return limited(token_mean(batch, w_BT.clamp(min=1 - clip)), batch, w_BT < 1 - clip, w_BT)


def bapo(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    criterion: Criterion = "value",
    target: Annotated[
        float,
        Option(
            "share of tokens with A > 0 in the loss, P/(P + N), that ends the search", "share", ge=0, lt=1
        ),
    ] = 0.4,
    low: Low = (0.6, 0.9, 0.02),
    high: High = (1.2, 3.0, 0.05),
) -> Terms:
    """BAPO as in the paper (arXiv 2510.18927, eqs. 7 to 9): −min(w A, clamp(w, c_low, c_high) A), c searched.

    P and N weight each token by its probability under the recorded behavior. First c_high is raised, then
    c_low. A as in `grpo`; the mean over all tokens of the step. The authors' notes give the target both as
    0.4 and as 0.5.
    """
    groups = Groups.of(batch)
    advantage_BT = groups.at_tokens(standardized(groups))
    w_BT = log_ratio(streams, batch, ratio).exp()
    probability_BT = torch.where(batch.mask, anchor_logp(batch, "behavior"), 0.0).exp()
    size_BT = token_weight(batch) * probability_BT * advantage_BT
    c_low, c_high = searched_bounds(w_BT, size_BT, target / (1 - target), low, high, criterion, first="high")
    gain_BT = clipped_gain(w_BT, advantage_BT, c_low, c_high)
    return limited(token_mean(batch, -gain_BT), batch, w_BT * advantage_BT != gain_BT, w_BT)


def bapo_code(
    streams: Streams,
    batch: Batch,
    *,
    ratio: Ratio = "behavior",
    criterion: Criterion = "value",
    target: Annotated[float, Option("P/N that ends the search", "ratio", ge=0)] = 0.5,
    low: Low = (0.8, 0.95, 0.05),
    high: High = (1.2, 2.0, 0.1),
) -> Terms:
    """BAPO as in the authors' code (github.com/WooooDyy/BAPO): max(min(w A, clamp(w, c_low, c_high) A), 3 A
    if A < 0), c searched.

    P and N count all tokens alike, the target is their ratio, and c_low is raised first, then c_high. The
    numbers are those of its script. A as in `grpo`; the mean over all tokens of the step.
    """
    groups = Groups.of(batch)
    advantage_BT = groups.at_tokens(standardized(groups))
    w_BT = log_ratio(streams, batch, ratio).exp()
    size_BT = token_weight(batch) * advantage_BT
    c_low, c_high = searched_bounds(w_BT, size_BT, target, low, high, criterion, first="low")
    gain_BT = floored_gain(clipped_gain(w_BT, advantage_BT, c_low, c_high), advantage_BT, DUAL_CLIP)
    return limited(token_mean(batch, -gain_BT), batch, w_BT * advantage_BT != gain_BT, w_BT)


def searched_bounds(
    w_BT: Tensor,
    size_BT: Tensor,
    odds: float,
    low: Bound,
    high: Bound,
    criterion: str,
    *,
    first: Literal["low", "high"],
) -> tuple[float, float]:
    """c_low and c_high at which P ≥ odds · N, or the largest ones.

    `size_BT`: A of each token times its weight. `first`: which bound is raised first.
    """
    w_BT = w_BT.detach()
    bounds = {"low": low[0], "high": high[0]}

    def is_short() -> bool:
        """Whether P < odds · N."""
        up_BT, down_BT = w_BT.clamp(max=bounds["high"]), w_BT.clamp(min=bounds["low"])
        if criterion == "gradient":
            up_BT = torch.where(w_BT <= bounds["high"], w_BT, 0.0)
            down_BT = torch.where(w_BT >= bounds["low"], w_BT, 0.0)
        P = (size_BT.abs() * up_BT)[size_BT > 0].sum()
        N = (size_BT.abs() * down_BT)[size_BT < 0].sum()
        return bool(odds * N > P)

    for name in (first, "high" if first == "low" else "low"):
        _, maximum, step = low if name == "low" else high
        while bounds[name] < maximum and is_short():
            bounds[name] = min(bounds[name] + step, maximum)
    return bounds["low"], bounds["high"]


def _divergence(logp_BT: Tensor, mu_BT: Tensor, divergence: str) -> Tensor:
    """[B,T] the divergence of the Bernoulli distributions with these log-probs of a token."""
    p, q = mu_BT.exp(), logp_BT.exp()
    if divergence == "tv":
        return (p - q).abs()
    other_p, other_q = -mu_BT.expm1(), -logp_BT.expm1()
    return p * (mu_BT - logp_BT) + torch.xlogy(other_p, other_p) - torch.xlogy(other_p, other_q)


def _rising(name: str) -> Rule:
    needs = "start, maximum and step, the start up to the maximum and the step above 0"
    return Rule((name,), needs, lambda bound: bound[0] <= bound[1] and bound[2] > 0)


MASKED = ("clipped_share", "ratio_max")
_of_behavior = always(REWARD, GROUPS, BEHAVIOR_LOGP)
_entry = partial(Objective, ingredients=(WEIGHT, IMITATION, SINGLETONS))
_with_kl = partial(Objective, ingredients=(WEIGHT, KL_TERM, IMITATION, SINGLETONS))
_bounds = (
    *(_rising("low"), _rising("high")),
    Rule(("low", "high"), "high to start at its maximum or above", lambda low, high: low[1] <= high[0]),
)
_bapo = partial(_entry, couples=coupling("step"), rules=_bounds, metrics=MASKED)
ENTRIES: dict[str, Objective] = {
    "deepseek_v32": _with_kl(
        deepseek_v32,
        "DeepSeek-V3.2, arXiv 2512.02556, eqs. 7 to 9",
        _of_behavior,
        metrics=MASKED,
        preset={"unbiased_kl": True},
    ),
    "kimi_k25": _entry(kimi_k25, "Kimi K2.5, arXiv 2602.02276", _of_behavior, metrics=("ratio_max",)),
    "sapo": _with_kl(
        sapo, "SAPO, arXiv 2511.20347, eqs. 5 and 6", always(REWARD, GROUPS), metrics=("ratio_max",)
    ),
    "dppo": _with_kl(dppo, "DPPO, arXiv 2602.04879", _of_behavior, metrics=MASKED),
    "remix": _entry(
        remix,
        "ReMix, arXiv 2507.06892",
        always(REWARD, GROUPS, BEHAVIOR_LOGP, DRAWN_LOGP),
        metrics=MASKED,
    ),
    "props": Objective(props, "PROPS, arXiv 2311.08290", always(REF_LOGP), ingredients=(), metrics=MASKED),
    "bapo": _bapo(bapo, "BAPO, arXiv 2510.18927", _of_behavior),
    "bapo_code": _bapo(bapo_code, "BAPO, arXiv 2510.18927, the authors' code", always(REWARD, GROUPS)),
}
