"""Candidates for one response a prompt, negative token filtering (arXiv 2606.17250) and RAE (2506.24119), and
for judged pairs SquaredPO (2602.06788), which is f-DPO with f(t) = ½ (log t)².

The first two weren't read in their papers. Filtering is as a public reproduction of it says the paper has it
(C-RF with NTF, verl-agent), RAE as the documentation of UnstableBaselines quotes it.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F

from agro.objectives import Objective
from agro.objectives.core import SINGLETONS, Streams, Terms, always, coupling
from agro.objectives.needs import PAIRS, REF_LOGP, REWARD
from agro.objectives.options import Option
from agro.objectives.reduce import Groups, Pairs
from agro.types import Batch, Tensor

LEAST = -25.0  # nats of a loser, where the sigmoid was saturated long before


def filtered_negatives(
    streams: Streams,
    batch: Batch,
    *,
    threshold: Annotated[
        float, Option("a response whose reward is above it is a positive one", "reward")
    ] = 0.0,
    keep: Annotated[
        float, Option("least likely tokens of a negative one that are pushed down", "share", gt=0, le=1)
    ] = 0.1,
) -> Terms:
    """−½ (mean over positives of l − mean over negatives of l), l(y) = (1/|y|) Σ_t log π(y_t).

    Of a negative response the sum has the `keep` least likely tokens alone, at least one; |y| counts all.
    The source has the clipped ratio to the sampler in place of log π, whose gradient is the same where the
    policy is the sampler: a log without log-probs has no other. One side alone counts whole.
    """
    groups = Groups.of(batch)
    logp_BT, positive_N = streams["logp"], groups.reward > threshold
    kept_BT = positive_N[batch.response][:, None] | _least_likely(logp_BT.detach(), batch.mask, keep)
    length_N = groups.sum_tokens(torch.ones_like(logp_BT))
    l_N = groups.sum_tokens(logp_BT * kept_BT) / length_N
    sides = [
        sign * l_N[side_N].mean() for sign, side_N in ((-1, positive_N), (1, ~positive_N)) if side_N.any()
    ]
    return Terms(torch.stack(sides).mean())


def _least_likely(logp_BT: Tensor, mask_BT: Tensor, share: float) -> Tensor:
    """[B,T] whether a token is among the `share` of its row that are least likely."""
    kept_B = (share * mask_BT.sum(1)).floor().clamp(min=1)
    rank_BT = logp_BT.masked_fill(~mask_BT, torch.inf).argsort(1).argsort(1)
    return mask_BT & (rank_BT < kept_B[:, None])


def averaged_baseline(
    streams: Streams,
    batch: Batch,
    *,
    start: Annotated[float, Option("the baseline before the step's first response", "reward")] = 0.0,
    decay: Annotated[
        float, Option("share of the baseline that a response leaves", "ratio", ge=0, lt=1)
    ] = 0.95,
) -> Terms:
    """−mean (R − b) log π with b ← decay · b + (1 − decay) R after each response, one role in one game.

    The source keeps b from step to step. Here it begins at `start`, the log's mean, in each: an objective
    has no memory, and the rewards of a log have one mean all along.
    """
    groups = Groups.of(batch)
    baseline, advantages = torch.tensor(start, dtype=torch.float64), []
    for reward in groups.reward:
        baseline = decay * baseline + (1 - decay) * reward
        advantages.append(reward - baseline)
    return Terms(-(torch.stack(advantages) * groups.sum_tokens(streams["logp"])).mean())


def squared_preference(
    streams: Streams,
    batch: Batch,
    *,
    beta: Annotated[float, Option("scale of the margin", "logit of a judgment", gt=0)] = 0.1,
) -> Terms:
    """−log σ(β f′(t_w) − β f′(t_l)), t = π/π_ref of a response and f′(t) = log t / t."""
    assert batch.ref_logp is not None
    pairs = Pairs.of(batch)
    rho_N = pairs.groups.sum_tokens(streams["logp"] - batch.ref_logp).clamp(min=LEAST)
    return Terms(pairs.average(F.softplus(-beta * pairs.gap(rho_N * (-rho_N).exp()))))


NTF = Objective(
    filtered_negatives,
    "C-RF with negative token filtering, arXiv 2606.17250",
    always(REWARD),
    coupling("step"),
    certainty="notes",
)
RAE = Objective(
    averaged_baseline, "RAE of SPIRAL, arXiv 2506.24119", always(REWARD), coupling("step"), certainty="notes"
)
SQUARED = Objective(
    squared_preference,
    "SquaredPO, arXiv 2602.06788",
    always(PAIRS, REF_LOGP),
    coupling("group"),
    ingredients=(SINGLETONS,),
    certainty="notes",
)
