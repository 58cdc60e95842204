"""What groups show of the distance to the optimum, whatever objective trained: ½ Var(R), regret, the share of the pull.

All of R = r − βρ, ρ the log-ratio of a whole response to the reference. At π* it is the same for every response to a
prompt (AGRO, Theorem 1), so that ½ Var(R) and regret are 0 there, and βρ differs as much as r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agro.config import RunConfig
from agro.objectives import get
from agro.objectives.consistency import regularised_reward
from agro.objectives.reduce import Groups
from agro.train.step import Step
from agro.types import Batch

# Above this the rewards are less than 1/(1 + 10²), 1 %, of the variance of R if ρ has nothing to do with them: the rest
# is noise that each update is weighed by.
DWARFED = 10.0
# The objectives that weigh a response by its βρ. In grpo and kl_pg the pull is a term of its own, token by token.
WEIGHED = ("agro", "agro_onpolicy", "rloo", "squared_consistency", "dro")


def diagnostic_beta(config: RunConfig, options: Mapping[str, Any]) -> float | None:
    """β of ½ Var(R) and regret, reward per nat: `evaluate.beta`, else that of an objective on rewards that pulls to the reference.

    `options`: the objective's, of this step. None: there is no such β, or it is 0.
    """
    if config.evaluate.beta is not None:
        return config.evaluate.beta
    needs = get(config.objective.name).needed(config.objective.options)
    return (options.get("beta") or None) if "reward" in needs and {"ref_logp", "kl"} & needs else None


def distances(
    batch: Batch, logp: Tensor, beta: float, average: str = "sum"
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[G] ½ Var(R), n − 1 in the variance, and [G] β log mean exp(R/β) − mean R of groups with two or more scored responses.

    The first is of responses of any origin. The second, of samples of the policy itself, estimates β KL(π ‖ π*), the
    regret in regularised reward (AGRO, Lemma 5), and is biased low: a group of n can't show more than β log n.
    """
    groups = Groups.of(batch)
    scored = ~groups.reward.isnan()
    several = groups.sum(scored.double()) > 1
    rows = (scored & several[groups.group])[batch.response].nonzero()[:, 0]
    if not len(rows):
        return np.empty(0), np.empty(0)
    part = batch.rows(rows)
    groups = Groups.of(part)
    R = regularised_reward({"logp": logp[rows]}, part, groups, beta, average)
    regret = groups.sum(groups.soft_maximum(R, beta) - R) / groups.n
    return (0.5 * groups.variance(R)).cpu().numpy(), regret.cpu().numpy()


def fresh_metrics(batch: Batch, logp: Tensor, beta: float, average: str) -> dict[str, float | int]:
    """Means over the groups of an evaluation's own samples, with standard errors; nothing where there are no groups."""
    half, regret = distances(batch, logp, beta, average)
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
    """Standard deviations of ρ (nats) and of r within the groups of a step whose rewards differ, as roots of mean variances.

    None for an objective that doesn't weigh responses by βρ, and where no rewards differ.

    What an update follows in AGRO is R against the rest of its group. So a |ρ| that all responses share cancels, and
    what can drown the rewards is the spread of βρ inside a group. The ratio of β times the one to the other is 1 at π*.
    Groups of equal rewards are left out: they would make a run that has solved its prompts look like one that can't learn.
    """
    batch, beta = step.batch, options.get("beta")
    anchor = batch.behavior_logp if options.get("anchor") == "behavior" else batch.ref_logp
    if name not in WEIGHED or not beta or anchor is None:
        return None
    groups = Groups.of(batch)
    rho = groups.over_tokens(step.streams["logp"] - anchor, options.get("average", "sum"))
    differs = groups.largest(groups.reward) > -groups.largest(-groups.reward)
    if not differs.any():
        return None
    nats, reward = (float(groups.variance(x)[differs].mean().sqrt()) for x in (rho, groups.reward))
    return nats, reward


def dwarfed(step: Step, name: str, options: Mapping[str, Any], length: float) -> str:
    """What to say where `kl_to_reward_spread` is above `DWARFED`. `length`: of the responses, tokens on average."""
    found = spreads(step, name, options)
    assert found is not None
    beta, by_token = options["beta"], options.get("average") == "token"
    way = "" if by_token else f" (about 1/length, {1 / length:.2g}, where rewards go from 0 to 1)"
    if name == "agro" and not by_token:
        way += ', or objective.average = "token"'
    return (
        f"within groups βρ differs {beta * found[0] / found[1]:.3g} times as much as the rewards (at the optimum once), so that updates "
        f"follow the log-ratios and hardly the rewards: β = {beta:.3g}, ρ ± {found[0]:.3g} nats{' a token' if by_token else ''} in responses "
        f"of {length:.0f} tokens, rewards ± {found[1]:.3g}. What to do: a smaller objective.beta{way}"
    )
