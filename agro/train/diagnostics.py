"""What groups show of the distance to the optimum, whatever objective trained: ½ Var(R), regret, the spread
of βρ.

All of R = r − βρ, ρ the log-ratio of a whole response to the reference. At π* it is the same for every
response to a prompt (AGRO, Theorem 1), so that ½ Var(R) and regret are 0 there, and βρ differs as much as r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agro.config import RunConfig
from agro.objectives import get
from agro.objectives.consistency import regularized_reward
from agro.objectives.needs import REWARD, provided_by
from agro.objectives.reduce import Groups
from agro.train.step import Step
from agro.types import Batch

# Above this the rewards are less than 1/(1 + 10²), 1 %, of the variance of R if ρ has nothing to do with
# them: the rest
# is noise that each update is weighed by.
DWARFED = 10.0


def diagnostic_beta(config: RunConfig, options: Mapping[str, Any]) -> float | None:
    """β of ½ Var(R) and regret, reward per nat: `evaluate.beta`, else that of an objective on rewards with a
    reference.

    `options`: the objective's, of this step. None: there is no such β, or it is 0.
    """
    if config.evaluate.beta is not None:
        return config.evaluate.beta
    needs = get(config.objective.name).needed(config.objective.options)
    if REWARD not in needs or not provided_by("reference", needs):
        return None
    return options.get("beta") or None


def distances(
    batch: Batch, logp_BT: Tensor, beta: float, average: str = "sum"
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[G] ½ Var(R), n − 1 in the variance, and [G] β log mean exp(R/β) − mean R of groups with two or more
    scored responses.

    The first is of responses of any origin. The second, of samples of the policy itself, estimates β KL(π ‖
    π*), the regret in regularized reward (AGRO, Lemma 5), and is biased low: a group of n can't show more
    than β log n.
    """
    groups = Groups.of(batch)
    scored_N = ~groups.reward.isnan()
    several_G = groups.sum(scored_N.double()) > 1
    rows = (scored_N & several_G[groups.group])[batch.response].nonzero()[:, 0]
    if not len(rows):
        return np.empty(0), np.empty(0)
    part = batch.rows(rows)
    groups = Groups.of(part)
    R_N = regularized_reward({"logp": logp_BT[rows]}, part, groups, beta, average)
    regret_G = groups.sum(groups.soft_maximum(R_N, beta) - R_N) / groups.n
    return (0.5 * groups.variance(R_N)).cpu().numpy(), regret_G.cpu().numpy()


def fresh_metrics(batch: Batch, logp_BT: Tensor, beta: float, average: str) -> dict[str, float | int]:
    """Means over the groups of an evaluation's own samples, with standard errors; nothing where there are no groups."""
    half, regret = distances(batch, logp_BT, beta, average)
    if not len(half):
        return {}
    return {
        "eval_fresh_consistency": float(half.mean()),
        "eval_fresh_consistency_se": standard_error(half),
        "eval_regret": float(regret.mean()),
        "eval_regret_se": standard_error(regret),
        "eval_fresh_groups": len(half),
    }


def standard_error(x: NDArray[np.float64]) -> float:
    """Of the mean of independent values; NaN for a single one."""
    return float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan


def spreads(step: Step, name: str, options: Mapping[str, Any]) -> tuple[float, float] | None:
    """Standard deviations of ρ (nats) and of r within the groups of a step whose rewards differ, as roots of
    mean variances.

    None for an objective that doesn't weigh responses by r − βρ, and where no rewards differ.

    What an update follows in AGRO is R against the rest of its group. So a |ρ| that all responses share
    cancels, and what can drown the rewards is the spread of βρ inside a group. The ratio of β times the one
    to the other is 1 at π*. Groups of equal rewards are dropped: they would make a run that has solved its
    prompts look like one that can't learn.
    """
    entry, batch = get(name), step.batch
    need = entry.anchor(options)
    anchor_BT = None if need is None else need.of(batch)
    if anchor_BT is None or not options.get("beta"):
        return None
    groups = Groups.of(batch)
    rho_N = groups.over_tokens(step.streams["logp"] - anchor_BT, entry.averages(options))
    differs_G = groups.largest(groups.reward) > -groups.largest(-groups.reward)
    if not differs_G.any():
        return None
    nats, reward = (float(groups.variance(x_N)[differs_G].mean().sqrt()) for x_N in (rho_N, groups.reward))
    return nats, reward


def dwarfed(ratio: float, name: str, options: Mapping[str, Any], length: float) -> str:
    """The warning where `kl_to_reward_spread` is above `DWARFED`. `length`: of the responses, tokens on average."""
    entry, beta = get(name), options["beta"]
    way = ""
    if entry.averages(options) == "sum":
        way = f" (about 1/length, {1 / length:.2g}, where rewards go from 0 to 1)"
        if "average" in entry.options.model_fields:
            way += ', or objective.average = "token"'
    return (
        f"within groups βρ differs {ratio:.3g} times as much as the rewards (at the optimum as much), so that updates "
        f"follow the log-ratios and hardly the rewards: β = {beta:.3g}, responses of {length:.0f} tokens. What to do: a "
        f"smaller objective.beta{way}"
    )
