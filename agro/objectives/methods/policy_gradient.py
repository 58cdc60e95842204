"""Policy gradients on the reward, with and without a KL term."""

from __future__ import annotations

from typing import Annotated, Literal

from agro.objectives import advantage as advantages
from agro.objectives.core import (
    SINGLETONS,
    Objective,
    Streams,
    Terms,
    always,
    couples_baseline,
    to_reference,
)
from agro.objectives.ingredients import IMITATION, WEIGHT, WEIGHT_BASELINE
from agro.objectives.methods.consistency import less_baseline, regularized_reward
from agro.objectives.needs import GROUPS, KL, REWARD, STORED_VALUE
from agro.objectives.options import NATS, TOWARDS, Baseline, Beta, Option
from agro.objectives.reduce import Groups
from agro.types import Batch


def rloo(
    streams: Streams,
    batch: Batch,
    *,
    beta: Beta = 0.0,
    baseline: Baseline = "others",
    normalize: Annotated[
        bool,
        Option("subtract the mean of the step's advantages, and divide by their standard deviation (n − 1)"),
    ] = False,
) -> Terms:
    """REINFORCE with the leave-one-out baseline (arXiv 2402.14740): −(1/n) Σ_i (r_i − r̄_{-i}) log π(y_i).

    β > 0 subtracts k1 to the reference from the reward: r_i − β ρ_i at the current policy, without gradient.
    baseline: r̄_{-i}, or "stored" for groups of one, as in SPO (arXiv 2509.13232) with a tracked value
    (data.value_half_life) and `normalize`, or "step", as in `agro`. On fresh samples the expected gradient
    is the same for all baselines; `normalize` divides it by a number that depends on the step's responses.
    """
    groups = Groups.of(batch)
    R_N = regularized_reward(streams, batch, groups, beta).detach()
    advantage_N = less_baseline(groups, streams["logp"], R_N, baseline)
    if normalize:
        advantage_N = advantages.normalized_over_responses(groups, advantage_N)
    return Terms(groups.average_responses(-advantage_N * groups.sum_tokens(streams["logp"])))


def reinforce(
    streams: Streams,
    batch: Batch,
    *,
    baseline: Annotated[
        Literal["none", "stored", "mean", "maxrl", "opo"] | float,
        Option(
            "b in r − b: none, the prompt's stored value, the group's mean, a number, or the baseline of "
            "the method of this name",
            "reward",
            needs={
                "none": (REWARD,),
                "stored": (REWARD, STORED_VALUE),
                **dict.fromkeys(("mean", "maxrl", "opo"), (REWARD, GROUPS)),
            },
        ),
    ] = "none",
    shift: Annotated[float, Option("number added to b; below 0 it imitates all responses", "reward")] = 0.0,
) -> Terms:
    """REINFORCE (Williams 1992): −(1/n) Σ_i (r_i − b) log π(y_i); b is 0, the prompt's stored value, the
    group's mean reward, or a number.

    "maxrl" and "opo" replace r − b by that method's advantage A, see `agro.objectives.advantage`. `shift` is
    added to b, so A − shift: below 0 it adds |shift| times imitation of all responses (AsymRE).
    """
    groups = Groups.of(batch)
    if baseline == "none":
        advantage_N = groups.reward
    elif baseline == "stored":
        advantage_N = less_baseline(groups, streams["logp"], groups.reward, baseline)
    elif isinstance(baseline, str):
        advantage_N = advantages.advantage(groups, baseline)
    else:
        advantage_N = groups.reward - baseline
    advantage_N = advantage_N - shift
    return Terms(groups.average_responses(-advantage_N * groups.sum_tokens(streams["logp"])))


def kl_pg(streams: Streams, batch: Batch, *, beta: Annotated[float, Option(TOWARDS, NATS, ge=0)]) -> Terms:
    """The KL-regularized policy gradient that AGRO is compared with (arXiv 2503.19612, figure 1 and section
    8).

    −(1/n) Σ_i (r_i − r̄_{-i}) log π(y_i) + (β/n) Σ_i Σ_t KL(π(·|y_{i,<t}) ‖ π_ref(·|y_{i,<t})), over the
    complete vocabulary. Off-policy its fixed point is not the optimum.
    """
    groups = Groups.of(batch)
    advantage_N = advantages.against_others(groups)
    gain = groups.average_responses(-advantage_N * groups.sum_tokens(streams["logp"]))
    kl = groups.average_responses(groups.sum_tokens(streams["kl"]))
    return Terms(gain + beta * kl, metrics={"kl_sampled_prefixes": kl})


ENTRIES: dict[str, Objective] = {
    "rloo": Objective(
        rloo,
        "RLOO, arXiv 2402.14740",
        always(REWARD),
        couples_baseline,
        anchor=to_reference,
        ingredients=(WEIGHT_BASELINE, WEIGHT, IMITATION, SINGLETONS),
    ),
    "reinforce": Objective(
        reinforce,
        "REINFORCE, Williams 1992",
        lambda options: set() if isinstance(options["baseline"], str) else {REWARD},
        ingredients=(WEIGHT, IMITATION, SINGLETONS),
    ),
    "kl_pg": Objective(
        kl_pg,
        "AGRO, arXiv 2503.19612, section 8",
        always(REWARD, GROUPS, KL),
        ingredients=(IMITATION, SINGLETONS),
        metrics=("kl_sampled_prefixes",),
    ),
}
