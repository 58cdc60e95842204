"""Preferences: pairs that a run makes itself (a demonstration over a sample of an earlier version, or two
turns of a search), pairs with votes, and groups whose responses are equivalent by reward or meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch

from agro.objectives.core import SINGLETONS, Objective, Streams, Terms, always, coupling
from agro.objectives.ingredients import IMITATION, WEIGHT
from agro.objectives.methods.preference import (
    ORDERED,
    BetaOfJudgments,
    Threshold,
    bradley_terry,
    judged,
    log_ratio,
    ordered,
)
from agro.objectives.needs import BEHAVIOR_LOGP, GROUPS, MEANING, PAIRS, REF_LOGP, REWARD
from agro.objectives.options import Option
from agro.objectives.reduce import Groups, Pairs
from agro.types import Batch, Tensor
from agro_papers.methods.weighted import rec


def seppo(
    streams: Streams,
    batch: Batch,
    *,
    beta: BetaOfJudgments,
    doubt: Annotated[
        Literal["flip", "drop"],
        Option("what to do with the sample if the reference fits the winner better: raise it, or drop it"),
    ] = "flip",
) -> Terms:
    """−log σ(β (ρ_w − s ρ_0)), s = sign ρ_w without gradient, 1 at 0: SePPO (arXiv 2410.05255), for text.

    A pair is a winner from the data and, as the loser, a sample y_0 of the reference, which in the paper is a
    random earlier checkpoint. If the policy already fits the winner better than the reference does, s = 1 and
    this is DPO; otherwise the reference counts as the better one and its sample is raised (s = −1), or left
    out with doubt = "drop" (s = 0). The paper is about diffusion models; the loss is reconstructed from its
    description.
    """
    pairs = Pairs.of(batch)
    rho_N = log_ratio(streams, batch, pairs.groups)
    fits_P = rho_N[pairs.winner].detach() >= 0
    sign_P = torch.where(fits_P, 1.0, -1.0 if doubt == "flip" else 0.0)
    margin_P = beta * (pairs.gap(rho_N) + (1 - sign_P) * rho_N[pairs.loser])
    return Terms(pairs.average(-torch.nn.functional.logsigmoid(margin_P)), metrics=ordered(pairs, margin_P))


Equivalent = Annotated[
    Literal["reward", "meaning"],
    Option(
        "responses that are equivalent: all good ones, or those whose `reward.meaning` is the same",
        needs={"meaning": (MEANING,)},
    ),
]


def gepo(
    streams: Streams,
    batch: Batch,
    *,
    beta: BetaOfJudgments,
    threshold: Threshold = 0.0,
    variance: Annotated[
        float, Option("λ, share of the variance of the good responses' log-ratios", "share", ge=0)
    ] = 1.0,
    unit: Annotated[
        Literal["logit", "nat"], Option("whether that variance is of β ρ ('logit') or of ρ ('nat')")
    ] = "logit",
    equivalent: Equivalent = "reward",
) -> Terms:
    """−log σ(β (ρ̄_W − ρ̄_L)) + λ Var_W(β ρ): group equivalent preferences (GEPO, arXiv 2505.12723).

    ρ̄_W and ρ̄_L are the means over the good responses of a group and over the others; Var_W, with 1/n, is
    over the good ones, which are assumed equivalent: it is AGRO's loss with equal rewards. A group in which
    all responses are good has only the second term, a group without a good response none. The paper's text
    doesn't say whether the variance is of ρ or of β ρ. Mean over groups.

    With `equivalent` = "meaning" only responses of one meaning are equivalent, such as two spellings, or two
    programs with the same unit-test results. ρ̄_W and ρ̄_L are then means over meanings of each meaning's mean,
    so that two spellings share the weight of one response; a meaning is good if its mean reward is above the
    threshold, and Var_W is the mean over good meanings of the variance within one.
    """
    groups = Groups.of(batch)
    rho_N = log_ratio(streams, batch, groups)
    kind_N = _kinds(groups, equivalent, threshold)
    good_N = (_of_kind(groups.reward, kind_N) > threshold).double()
    share_N = 1 / kind_N.bincount()[kind_N].double()
    mean_G = groups.weighted_mean(rho_N, good_N * share_N)
    other_G = groups.weighted_mean(rho_N, (1 - good_N) * share_N)
    good_G = groups.sum(good_N)
    both_G = (good_G > 0) & (good_G < groups.n)
    loss_G = torch.where(both_G, bradley_terry(beta * (mean_G - other_G), 1.0), 0.0)
    off_N = rho_N - _of_kind(rho_N, kind_N)
    variance_G = groups.weighted_mean(off_N.square(), good_N * share_N)
    factor = beta**2 if unit == "logit" else 1.0
    return Terms(groups.average(loss_G + variance * factor * variance_G))


def oorl(
    streams: Streams,
    batch: Batch,
    *,
    beta: BetaOfJudgments,
    threshold: Threshold = 0.0,
    share: Annotated[float, Option("weight of GEPO's part in the loss", "share", ge=0)] = 0.01,
    equivalent: Equivalent = "reward",
) -> Terms:
    """REINFORCE++ and a small share of GEPO (OORL, arXiv 2505.12723): L_RL + `share` · L_GEPO, as
    `reinforce_pp` and `gepo` have them.

    Both use all responses of a step; the reward decides which ones are good.
    """
    rl = rec(streams, batch, mask="one_side", token_weight="is", advantage="reinforce_pp")
    preference = gepo(streams, batch, beta=beta, threshold=threshold, equivalent=equivalent)
    return Terms(rl.loss + share * preference.loss, metrics=rl.metrics)


def _kinds(groups: Groups, equivalent: str, threshold: float) -> Tensor:
    """[N] a number for each class of equivalent responses to one prompt."""
    key_N = (groups.reward > threshold).double()
    if equivalent == "meaning":
        key_N = groups.extra("meaning")
    kinds: Tensor = torch.stack([groups.group.double(), key_N], 1).unique(dim=0, return_inverse=True)[1]
    return kinds


def _of_kind(v_N: Tensor, kind_N: Tensor) -> Tensor:
    """[N] the mean over the responses equivalent to each."""
    size = kind_N.bincount()
    return (torch.zeros_like(size, dtype=torch.float64).index_add(0, kind_N, v_N) / size)[kind_N]


ENTRIES: dict[str, Objective] = {
    "seppo": judged(seppo, "SePPO, arXiv 2410.05255", ORDERED, PAIRS, REF_LOGP),
    "gepo": Objective(
        gepo,
        "GEPO, arXiv 2505.12723",
        always(REWARD, GROUPS, REF_LOGP),
        coupling("group"),
        ingredients=(WEIGHT, IMITATION, SINGLETONS),
    ),
    "oorl": Objective(
        oorl,
        "OORL, arXiv 2505.12723",
        always(REWARD, GROUPS, REF_LOGP, BEHAVIOR_LOGP),
        coupling("group"),
        metrics=("clipped_share", "ratio_max"),
    ),
}
