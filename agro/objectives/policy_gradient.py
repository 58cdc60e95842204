"""Policy gradients on the reward, with and without a KL term."""

from __future__ import annotations

from agro.objectives.consistency import regularised_reward
from agro.objectives.core import Streams, Terms
from agro.objectives.reduce import Groups
from agro.types import Batch


def rloo(streams: Streams, batch: Batch, *, beta: float) -> Terms:
    """REINFORCE with the leave-one-out baseline (arXiv 2402.14740): −(1/n) Σ_i (r_i − r̄_{-i}) log π(y_i).

    β > 0 puts k1 against the reference into the reward: r_i − β ρ_i at the present policy, without gradient.
    """
    groups = Groups.of(batch)
    R = regularised_reward(streams, batch, groups, beta).detach()
    return Terms(groups.average_responses(-(R - groups.mean_others(R)) * groups.sum_tokens(streams["logp"])))


def reinforce(streams: Streams, batch: Batch, *, baseline: str | float) -> Terms:
    """REINFORCE (Williams 1992): −(1/n) Σ_i (r_i − b) log π(y_i); b is 0, the group's mean reward, or a number."""
    groups = Groups.of(batch)
    r = groups.reward
    b = 0.0 if baseline == "none" else groups.mean(r) if isinstance(baseline, str) else baseline
    return Terms(groups.average_responses(-(r - b) * groups.sum_tokens(streams["logp"])))


def kl_pg(streams: Streams, batch: Batch, *, beta: float) -> Terms:
    """The KL-regularised policy gradient that AGRO is compared with (arXiv 2503.19612, figure 1 and section 8).

    −(1/n) Σ_i (r_i − r̄_{-i}) log π(y_i) + (β/n) Σ_i Σ_t KL(π(·|y_{i,<t}) ‖ π_ref(·|y_{i,<t})), over the whole
    vocabulary. Off-policy its fixed point is not the optimum.
    """
    groups = Groups.of(batch)
    r = groups.reward
    gain = groups.average_responses(-(r - groups.mean_others(r)) * groups.sum_tokens(streams["logp"]))
    kl = groups.average_responses(groups.sum_tokens(streams["kl"]))
    return Terms(gain + beta * kl, metrics={"kl_sampled_prefixes": kl})
