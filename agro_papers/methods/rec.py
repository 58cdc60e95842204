"""Policy gradients that stay near the policy that drew the samples: mirror descent; and REINFORCE in groups
with a mask or a weight of the tokens (REC and RED, arXiv 2509.24203)."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import torch

from agro.objectives import advantage as advantages
from agro.objectives.advantage import Advantage
from agro.objectives.core import SINGLETONS, Objective, Options, Streams, Terms, always
from agro.objectives.imitation import IMITATION
from agro.objectives.methods.clipped import limited
from agro.objectives.needs import BEHAVIOR_LOGP, GROUPS, REF_LOGP, REWARD, Need
from agro.objectives.options import Option
from agro.objectives.reduce import Groups, token_mean
from agro.objectives.weights import Ratio, log_ratio
from agro.types import Batch, Tensor
from agro_papers.methods.truncated import ratio_and_advantage


def opmd(
    streams: Streams,
    batch: Batch,
    *,
    tau: Annotated[
        float, Option("τ, the strength of the regularization of a step", "reward per nat", gt=0)
    ] = 1.0,
    form: Annotated[
        Literal["simple", "pairwise"], Option("the factor before the gradient: 1/(1+τ), or 2τ/max(1, τ)")
    ] = "simple",
    baseline: Annotated[
        Literal["mean", "soft"], Option("the group's mean reward, or its soft maximum τ log mean exp(r/τ)")
    ] = "mean",
) -> Terms:
    """OPMD as Trinity has it (arXiv 2509.24203): −c (r − b) log π, mean over all tokens, c = 1/(1+τ).

    It is REINFORCE with another step size, and needs no ratio: τ counts only beside other terms of the loss,
    in clipping of the gradient's norm, and in a soft b. "pairwise" is Σ_i (u_i − ū)², u_i = r_i − τ (log π −
    sg[log π]), over the tokens times max(1, τ): where it is evaluated its gradient is this one with c =
    2τ/max(1, τ). Kimi's own form, with squared log-ratios of responses, is `kimi`.
    """
    groups = Groups.of(batch)
    r_N = groups.reward
    advantage_N = r_N - (groups.mean(r_N) if baseline == "mean" else groups.soft_maximum(r_N, tau))
    factor = 1 / (1 + tau) if form == "simple" else 2 * tau / max(1.0, tau)
    return Terms(factor * token_mean(batch, -advantage_N[batch.response][:, None] * streams["logp"]))


def token_quadratic(
    streams: Streams,
    batch: Batch,
    *,
    pull: Annotated[
        float, Option("strength of the squares of the log-ratios", "reward per nat²", ge=0)
    ] = 0.1,
    ratio: Ratio = "behavior",
    advantage: Advantage = "mean",
) -> Terms:
    """The "dro" of tinker and verl: −A log π + ½ c (log π − log μ)² token by token, c = `pull`, mean over all
    tokens.

    Another objective than DRO (arXiv 2405.19107; here `dro`): no value, the anchor is the behavior, and the
    squares of tokens have no cross terms, so that its end depends on how a response is cut into tokens.
    tinker takes the sum for the mean.
    """
    advantage_B1 = advantages.of_tokens(Groups.of(batch), advantage)
    square_BT = log_ratio(streams, batch, ratio).square()
    return Terms(token_mean(batch, -advantage_B1 * streams["logp"] + 0.5 * pull * square_BT))


def mdpo(
    streams: Streams,
    batch: Batch,
    *,
    step_size: Annotated[
        float, Option("t_k: the KL to the last policy counts 1/t_k", "nat per reward", gt=0)
    ] = 1.0,
    kl: Annotated[
        Literal["weighted", "square"], Option("the estimate of each token's KL: w log w, or half (log w)²")
    ] = "weighted",
    ratio: Ratio = "behavior",
    advantage: Advantage = "mean",
) -> Terms:
    """Mirror descent policy optimization (MDPO, arXiv 2005.09814): −w A + (1/t_k) KL(π ‖ μ)
    token by token, w = π/μ, mean over all tokens; no clip.

    μ is the policy π_k that drew the samples, from which several updates are made. Of its samples w log w is
    an unbiased estimate of the KL at each prefix, which the authors compute in closed form; half (log w)² is
    right near π_k alone. The first update is the policy gradient. The authors anneal t_k to 0: a schedule.
    """
    advantage_B1 = advantages.of_tokens(Groups.of(batch), advantage)
    log_BT = log_ratio(streams, batch, ratio)
    w_BT = log_BT.exp()
    kl_BT = w_BT * log_BT if kl == "weighted" else 0.5 * log_BT.square()
    loss = token_mean(batch, -w_BT * advantage_B1 + kl_BT / step_size)
    return Terms(loss, metrics={"ratio_max": w_BT.max()})


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

    It is PPO's clip with the advantage −1 of all stored responses: each becomes less probable, whatever its
    reward, until w < 1−ε. π, the policy to sample for, is the reference; the sampler φ begins as π and is
    trained again before each collection. The authors' λ KL(π ‖ φ) is 0 by default, and isn't here; they stop
    at a limit of the KL, as evaluate.target_kl does.
    """
    assert batch.ref_logp is not None
    w_BT = torch.where(batch.mask, streams["logp"] - batch.ref_logp, 0.0).exp()
    return limited(token_mean(batch, w_BT.clamp(min=1 - clip)), batch, w_BT < 1 - clip, w_BT)


def _opmd_conflict(options: Options) -> str:
    if options["form"] == "pairwise" and options["baseline"] == "soft":
        return 'form = "pairwise" compares with the group\'s mean; leave baseline = "soft" out'
    return ""


_mirrored = partial(Objective, ingredients=(IMITATION, SINGLETONS))


Mask = Annotated[
    Literal["none", "one_side", "two_side", "ring"], Option("which tokens are masked, by their ratio")
]
Limits = tuple[float, float]
Clip = Annotated[Limits, Option("how far below and above 1 the ratio of a kept token may be", "ratio", ge=0)]
Ring = Annotated[
    Limits, Option("how far a ratio has to go back to be kept again, below and above 1", "ratio", ge=0)
]


def rec(
    streams: Streams,
    batch: Batch,
    *,
    mask: Mask = "none",
    token_weight: Annotated[Literal["none", "is"], Option("the weight of a token: 1, or its ratio")] = "none",
    clip: Clip = (0.2, 0.2),
    ring: Ring = (0.6, 2.0),
    advantage: Advantage = "mean",
) -> Terms:
    """REC (arXiv 2509.24203): −sg[M ω] A log π, mean over all tokens of the step, w = π/μ token by token.

    M is 1 for "none"; for "one_side" where A ≥ 0 and w ≤ 1+ε_high, or A ≤ 0 and w ≥ 1−ε_low; for "two_side"
    where 1−ε_low ≤ w ≤ 1+ε_high; for "ring" there, and where A ≥ 0 and w ≤ 1−`ring`[0], or A ≤ 0 and w ≥
    1+`ring`[1]. ω is 1 (NoIS) or w. One-sided and weighed by w the gradient is that of PPO's clip. The ring's
    limits are 0.6 and 2.0 in Trinity's default_args, 0.4 and 0.4 in its constructor.
    """
    advantage_B1 = advantages.of_tokens(Groups.of(batch), advantage)
    logp_BT = streams["logp"]
    if mask == "none" and token_weight == "none":
        return Terms(token_mean(batch, -advantage_B1 * logp_BT))
    w_BT = log_ratio(streams, batch, "behavior").detach().exp()
    unmasked_BT = _unmasked(mask, w_BT, advantage_B1, clip, ring)
    weight_BT = torch.where(unmasked_BT, w_BT if token_weight == "is" else 1.0, 0.0)
    return limited(token_mean(batch, -weight_BT * advantage_B1 * logp_BT), batch, ~unmasked_BT, w_BT)


def _unmasked(mask: str, w_BT: Tensor, advantage_B1: Tensor, clip: Limits, ring: Limits) -> Tensor:
    """[B,T] the tokens that aren't masked."""
    up_B1, down_B1 = advantage_B1 >= 0, advantage_B1 <= 0
    above_low_BT, below_high_BT = w_BT >= 1 - clip[0], w_BT <= 1 + clip[1]
    if mask == "none":
        return torch.ones_like(w_BT, dtype=torch.bool)
    if mask == "one_side":
        return (up_B1 & below_high_BT) | (down_B1 & above_low_BT)
    band_BT = above_low_BT & below_high_BT
    if mask == "two_side":
        return band_BT
    return band_BT | (up_B1 & (w_BT <= 1 - ring[0])) | (down_B1 & (w_BT >= 1 + ring[1]))


def red_weight(
    streams: Streams,
    batch: Batch,
    *,
    temperature: Annotated[float, Option("T of the weight exp(A/T)", "reward", gt=0)] = 1.0,
) -> Terms:
    """RED-Weight (arXiv 2509.24203): −exp(A/T) A log π, A = r − r̄, mean over all tokens of the step.

    REINFORCE without ratios in which better responses weigh more: with r̄_w the mean of the rewards under
    these weights it is −exp(A/T) (r − r̄_w) log π, and imitation of the weighted responses times r̄_w − r̄ ≥ 0.
    """
    advantage_B1 = advantages.of_tokens(Groups.of(batch), "mean")
    weight_B1 = (advantage_B1 / temperature).exp()
    return Terms(token_mean(batch, -weight_B1 * advantage_B1 * streams["logp"]))


def _needs(options: Options) -> set[Need]:
    uses_ratio = options["mask"] != "none" or options["token_weight"] == "is"
    return advantages.needs(options) | ({BEHAVIOR_LOGP} if uses_ratio else set())


ENTRIES: dict[str, Objective] = {
    "opmd": _mirrored(
        opmd,
        "OPMD, arXiv 2509.24203",
        always(REWARD, GROUPS),
        excludes=_opmd_conflict,
    ),
    "token_quadratic": _mirrored(
        token_quadratic,
        "the loss dro of tinker and verl",
        ratio_and_advantage,
    ),
    "mdpo": _mirrored(mdpo, "MDPO, arXiv 2005.09814", ratio_and_advantage, metrics=("ratio_max",)),
    "props": Objective(
        props,
        "PROPS, arXiv 2311.08290",
        always(REF_LOGP),
        ingredients=(),
        metrics=("clipped_share", "ratio_max"),
    ),
    "rec": Objective(
        rec,
        "REC, arXiv 2509.24203",
        _needs,
        ingredients=(IMITATION, SINGLETONS),
        metrics=("clipped_share", "ratio_max"),
    ),
    "red_weight": Objective(
        red_weight,
        "RED-Weight, arXiv 2509.24203",
        always(REWARD, GROUPS),
        ingredients=(IMITATION, SINGLETONS),
    ),
}
