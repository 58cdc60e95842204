"""The metrics of a step. Metrics that are unknown or weren't measured are None.

½ Var(R), regret and the spread of βρ measure how far groups are from the optimum, for any objective.
R = r − βρ, where ρ is the log-ratio of a complete response to the reference. At π* it is the same for every
response to a prompt (AGRO, Theorem 1), so ½ Var(R) and regret are 0 there, and βρ varies as much as r.

The log-ratios ρ = log π/π_ref of the best and the worst stored responses of each group, and the mean of e^ρ,
show in which direction a run on stored data moves, which its loss doesn't. The policy should raise the best
responses of a group above the reference and lower the worst ones. The mean of e^ρ is 1 in expectation on
samples of the reference. Below 1, the policy loses probability on the stored responses, good and bad ones
alike.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agro.config import RewardConfig
from agro.objectives import Objective
from agro.objectives.methods.consistency import regularized_reward
from agro.objectives.reduce import Groups
from agro.rewards.shaping import shares
from agro.stats.intervals import standard_error
from agro.train.collate import staleness, total_reward
from agro.train.feed import Valid, one_each
from agro.train.phases import Phase
from agro.train.step import Step
from agro.types import Batch

Values = NDArray[np.float64]
# Rewards that differ by less than this share of the largest one differ by rounding or noise: a ratio to such
# a spread would suggest a smaller β, whatever β is.
NOTICEABLE = 1e-3
LARGEST = math.log(sys.float_info.max)  # a larger exponent has no finite exponential


def describe_batch(valid: Valid, version: int, reward: RewardConfig) -> dict[str, Any]:
    """Metrics of a step's samples before any forward pass. `version` is the learner's."""
    samples, responses, collected = valid.samples, one_each(valid.samples), valid.collected
    rewards_of: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    for s in responses:
        total, sample_parts = total_reward(s), s.meta.get("reward_parts")
        if not math.isnan(total):
            rewards_of[s.prompt_id].append(total)
        if isinstance(sample_parts, dict):  # an imported log may have anything under this name
            for name, value in sample_parts.items():
                parts[name] += [value] if isinstance(value, (int, float)) else []
    rewards = [s.reward for s in responses if s.reward is not None]
    fresh = {s.prompt_id for s in samples if s.id in valid.fresh}
    stored = {s.prompt_id for s in samples if s.id not in valid.fresh}
    stale = [steps for s in samples if (steps := staleness(s, version)) is not None]
    ends = [end for s in responses if (end := s.end) != "unknown"]
    actions = sum(int(s.action.sum()) for s in samples if s.action is not None)
    meanings = Counter((s.prompt_id, s.meta.get("meaning")) for s in responses if "meaning" in s.meta)
    return {
        "reward_mean": _mean(rewards),
        "reward_std": float(np.std(rewards, ddof=1)) if len(rewards) > 1 else None,
        "reward_parts": {name: _mean(values) for name, values in parts.items()} or None,
        "reward_shares": shares(responses, reward) if len(reward.functions) > 1 else None,
        "tokens": sum(int(s.mask.sum()) for s in samples if s.mask is not None),
        "sampled_tokens": collected.tokens,
        "staleness_mean": _mean(stale),
        "staleness_max": max(stale, default=None),
        "length_mean": actions / len(responses) if responses else None,
        "truncated_share": ends.count("cut") / len(ends) if ends else None,
        "groups": len(fresh | stored),
        "groups_merged": len(fresh & stored),
        "hinted": sum(s.meta.get("hint") is not None for s in responses),
        "experts": sum(s.role == "expert" for s in responses),
        "same_meaning": sum(n for n in meanings.values() if n > 1) if meanings else None,
        "groups_equal": sum(min(r) == max(r) for r in rewards_of.values()),
        "rewards_failed": collected.failed,
        **collected.measured,
        "dropped": sum(valid.dropped.values()),
        "dropped_reasons": dict(valid.dropped),
        "skipped": 0,
        "rolled_back": 0,
        "replay_missing": valid.missing,
        "replay_share": len(stored) / (len(fresh) + len(stored)) if samples else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def describe_step(
    step: Step, recent: Sequence[bool], phase: Phase, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Metrics of a step's gradient and objective, KL and regret on recent samples, and on stored samples the
    log-ratios of the best and the worst responses, see `agro.train.measure`.

    kl_ref is the mean over recent responses of Σ_t log π − log π_ref, in nats, which estimates the KL on
    samples of the policy itself. Samples of earlier weights are weighted by π/μ, normalized.

    Args:
        recent: [B] see `Valid.recent`.
        options: the objective's, at this step.
    """
    batch, logp = step.batch, step.streams["logp"]
    metrics: dict[str, Any] = {
        "loss": step.evaluation.loss,
        "objective": step.evaluation.metrics,
        "beta": options.get("beta"),
        "baseline_shift": options.get("baseline_shift"),
        "grad_norm": step.norm,
        "grad_norm_clipped": min(step.norm, phase.config.train.clip),
    }
    spread = spreads(step, phase.entry, options)
    if spread is not None:
        nats, reward = spread
        metrics["kl_to_reward_spread"] = options["beta"] * nats / reward
    metrics |= stored_metrics(batch, logp, recent)
    rows = torch.tensor(recent, device=logp.device).nonzero()[:, 0]
    if not len(rows) or batch.ref_logp is None:
        return metrics
    part, logp = batch.rows(rows), logp[rows]
    metrics["kl_ref"] = kl_of(part, logp)
    beta = phase.diagnostic_beta(options)
    if beta and unequal(Groups.of(part)).any():  # equal rewards don't show what could be better
        metrics["regret"] = float(distances(part, logp, beta, options.get("average", "sum"))[1].mean())
    return metrics


def logp_differences(step: Step, comparable: Sequence[bool]) -> dict[str, float]:
    """|log π − log μ| of trainer and sampler, over the tokens where both are known.

    Metrics without such a token are missing. For samples of earlier weights a difference also shows how far
    the policy has moved. On fresh ones, of staleness 0, it is rounding.

    Args:
        comparable: [B] the rows where both are from one distribution, see `StepBatch`.
    """
    batch = step.batch
    if batch.behavior_logp is None:
        return {}
    off_BT = (step.streams["logp"] - batch.behavior_logp).abs()
    known_BT = batch.mask & batch.behavior_logp.isfinite()
    compared_BT = known_BT & torch.tensor(comparable, device=off_BT.device)[:, None]
    off, off_fresh = off_BT[compared_BT], off_BT[compared_BT & (batch.staleness == 0)[:, None]]
    metrics: dict[str, float] = {}
    if len(off):
        metrics |= {"logp_diff_mean": off.mean().item(), "logp_diff_max": off.max().item()}
    if len(off_fresh):
        metrics["logp_diff_fresh"] = off_fresh.mean().item()
    return metrics


def change(logp_BT: Tensor, step: Step) -> float:
    """KL, in nats per token, of a policy with these log-probs from the policy at `step`'s gradient."""
    mask = step.batch.mask
    return float((logp_BT.to(mask.device) - step.streams["logp"])[mask].square().mean()) / 2


def gain_of(logp_BT: Tensor, step: Step) -> float | None:
    """The part of its predicted gain −⟨g, Δθ⟩ that a step realized, by the log-probs after it; in units of
    the objective. None if other streams, such as an exact KL, moved the policy too.

    With a = −∂loss/∂log π of a token and Δ the change of its log-prob: Σ a Δ over the responses that were
    pushed up, plus Σ a (e^Δρ − 1) over those pushed down, Δρ being the response's change: an improbable
    response can't lose more. If a varies within a response, its Σ a Δ is scaled by (e^Δρ − 1)/Δρ.
    """
    streams = step.evaluation.grads.keys() - {"logp", "value", "prefix_value"}
    if any(step.evaluation.grads[stream].any() for stream in streams):
        return None
    groups, push_BT = Groups.of(step.batch), -step.evaluation.grad
    change_BT = logp_BT.to(push_BT.device) - step.streams["logp"]
    change_N, sum_N = groups.sum_tokens(change_BT), groups.sum_tokens(push_BT * change_BT)
    falls_N = (groups.sum_tokens(push_BT) < 0) & (change_N != 0)
    return float(torch.where(falls_N, sum_N * change_N.expm1() / change_N, sum_N).sum())


def kl_of(batch: Batch, logp: Tensor) -> float:
    """Mean over responses of Σ_t log π − log π_ref, in nats; see `describe_step`."""
    assert batch.ref_logp is not None
    ratio_BT = logp - batch.ref_logp
    is_stale = batch.staleness > 0
    if not is_stale.any() or batch.behavior_logp is None:
        return ratio_BT[batch.mask].sum().item() / len(batch.response.unique())
    groups = Groups.of(batch)
    log_weight_N = groups.sum_tokens(torch.where(is_stale[:, None], logp - batch.behavior_logp, 0.0))
    weight_N = log_weight_N.softmax(0)
    return float((weight_N * groups.sum_tokens(ratio_BT)).sum())


def distances(batch: Batch, logp_BT: Tensor, beta: float, average: str = "sum") -> tuple[Values, Values]:
    """½ Var(R) [G], n − 1 in the variance, and β log mean exp(R/β) − mean R [G].

    Both cover groups with two or more scored responses. The first is valid for responses of any origin. The
    second estimates β KL(π ‖ π*), the regret in regularized reward (AGRO, Lemma 5), on samples of the policy
    itself. It is biased low, since a group may miss the best responses.
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


def ranking(batch: Batch, logp_BT: Tensor, average: str = "sum") -> Values:
    """How often ρ is higher for the response with the higher reward [G], within groups of unequal rewards.

    For rewards of 0 and 1 it is the area under the ROC curve (AUC): a share of the pairs of responses with
    different rewards, in which an equal ρ counts one half. Responses without a reward are dropped. It is 0.5
    by chance and if π is π_ref. Unlike ½ Var(R) it doesn't depend on the scale of ρ.
    """
    assert batch.ref_logp is not None
    groups = Groups.of(batch)
    rho_N = groups.over_tokens(logp_BT - batch.ref_logp, average)
    auc = []
    for group in range(len(groups.n)):
        members = groups.group == group
        reward, rho = groups.reward[members], rho_N[members]
        better = reward[:, None] > reward
        if better.any():
            wins = (rho[:, None] > rho).double() + 0.5 * (rho[:, None] == rho)
            auc.append(float(wins[better].mean()))
    return np.array(auc)


def unequal(groups: Groups, share: float = 0.0) -> Tensor:
    """[G] whether the known rewards of a group differ by more than `share` times the largest |reward|."""
    highest_G, lowest_G = groups.extremes(groups.reward)
    largest = groups.reward.abs().nan_to_num().max()
    return highest_G - lowest_G > share * largest


def fresh_metrics(batch: Batch, logp_BT: Tensor, beta: float, average: str) -> dict[str, float | int]:
    """Means over the groups of an evaluation's own samples, with standard errors; empty without groups.

    If no group has unequal rewards, regret is unknown: better responses may exist.
    """
    half, regret = distances(batch, logp_BT, beta, average)
    if not len(half):
        return {}
    means = {"eval_fresh_groups": len(half), **summary("eval_fresh_consistency", half)}
    if unequal(Groups.of(batch)).any():
        means |= summary("eval_regret", regret)
    return means


def spreads(step: Step, entry: Objective, options: Mapping[str, Any]) -> tuple[float, float] | None:
    """Standard deviations of ρ (nats) and of r within groups: roots of the mean variance over groups.

    None for an objective that doesn't weight responses by r − βρ, and if no rewards differ noticeably.

    An update of AGRO follows R relative to the rest of its group. A ρ that all responses share cancels, so
    only the spread of βρ inside a group can exceed that of the rewards. The ratio of β times the first to the
    second is 1 at π*. Groups of equal rewards are dropped, or a run that has solved its prompts would look
    like one that can't learn.
    """
    batch, need = step.batch, entry.anchor(options)
    anchor_BT = None if need is None else need.of(batch)
    if anchor_BT is None or not options.get("beta"):
        return None
    groups = Groups.of(batch)
    rho_N = groups.over_tokens(step.streams["logp"] - anchor_BT, entry.averages(options))
    differs_G = unequal(groups, NOTICEABLE)
    if not differs_G.any():
        return None
    nats, reward = (float(groups.variance(x_N)[differs_G].mean().sqrt()) for x_N in (rho_N, groups.reward))
    return nats, reward


def stored_metrics(batch: Batch, logp_BT: Tensor, recent: Sequence[bool]) -> dict[str, float]:
    """The known metrics of a step's stored responses.

    If no prompt has two scored responses, as in a log of single responses, all of them are one group.
    `recent`: [B] see `Valid.recent`; the other rows are the stored ones.
    """
    stored = (~torch.tensor(recent, device=logp_BT.device)).nonzero()[:, 0]
    if not len(stored):
        return {}
    part, logp_BT = batch.rows(stored), logp_BT[stored]
    groups = Groups.of(part)
    if not (groups.sum((~_rewards(groups).isnan()).double()) > 1).any():
        one, equal = torch.zeros_like(part.group), torch.ones_like(part.weight)
        part = part.replace(group=one, group_names=("all",), weight=equal)
    best_kl = kl_of_best(part)
    metrics = summary("kl_of_best", best_kl, error=False)
    if len(best_kl):
        metrics["kl_of_best_groups"] = len(best_kl)
    if part.ref_logp is None:
        return metrics
    rows = (part.ref_logp.isfinite() | ~part.mask).all(1).nonzero()[:, 0]
    if not len(rows):
        return metrics
    part, logp_BT = part.rows(rows), logp_BT[rows]
    best_G, worst_G = best_and_worst(part, logp_BT)
    metrics |= summary("log_ratio_best", best_G, error=False)
    metrics |= summary("log_ratio_worst", worst_G, error=False)
    return metrics | exponential("ratio_mean", log_ratios(part, logp_BT), error=False)


def log_ratios(batch: Batch, logp_BT: Tensor) -> Values:
    """ρ [N] of each response, in nats: the sum over its tokens."""
    assert batch.ref_logp is not None
    rho_N = Groups.of(batch).sum_tokens(logp_BT - batch.ref_logp)
    return np.asarray(rho_N.cpu().numpy(), np.float64)


def log_mean_ratios(batch: Batch, logp_BT: Tensor) -> Values:
    """[G] log of the mean of e^ρ in each group."""
    assert batch.ref_logp is not None
    groups = Groups.of(batch)
    mean_N = groups.soft_maximum(groups.sum_tokens(logp_BT - batch.ref_logp), 1.0)
    mean_G = torch.zeros_like(groups.weight).index_copy(0, groups.group, mean_N)
    return np.asarray(mean_G.cpu().numpy(), np.float64)


def best_and_worst(batch: Batch, logp_BT: Tensor) -> tuple[Values, Values]:
    """The mean ρ of the responses with the highest reward of their group [G], and with the lowest [G].

    G counts groups with unequal rewards. Responses without a reward are dropped.
    """
    assert batch.ref_logp is not None
    groups = Groups.of(batch)
    rho_N, reward_N = groups.sum_tokens(logp_BT - batch.ref_logp), _rewards(groups)
    highest_G, lowest_G = extremes = groups.extremes(reward_N)
    best_G, worst_G = (
        groups.weighted_mean(rho_N, (reward_N == x_G[groups.group]).double()) for x_G in extremes
    )
    differs_G = highest_G > lowest_G
    return best_G[differs_G].cpu().numpy(), worst_G[differs_G].cpu().numpy()


def kl_of_best(batch: Batch) -> Values:
    """−log of the share of responses that have the highest reward of their group [G], in nats.

    G counts groups with unequal rewards. On samples of the reference this estimates the KL divergence of the
    reference restricted to such responses from the reference.
    """
    groups = Groups.of(batch)
    reward_N = _rewards(groups)
    highest_G, lowest_G = groups.extremes(reward_N)
    best_N, scored_N = (reward_N == highest_G[groups.group]).double(), (~reward_N.isnan()).double()
    share_G = groups.sum(best_N) / groups.sum(scored_N)
    return np.asarray(-share_G[highest_G > lowest_G].log().cpu().numpy(), np.float64)


def _rewards(groups: Groups) -> Tensor:
    """[N] rewards of responses; NaN also if a response's rows differ, which not every objective refuses."""
    reward_B, response = groups.batch.reward.double(), groups.batch.response
    reward_N = reward_B[groups.first_row]
    differs_B = reward_N[response] != reward_B
    return torch.where(groups.mean_rows(differs_B.double()) > 0, torch.nan, reward_N)


def summary(name: str, values: Values, *, error: bool = True) -> dict[str, float]:
    """The mean of independent values, and with `error` its standard error; empty without values."""
    if not len(values):
        return {}
    metrics = {name: float(values.mean())}
    return metrics | {f"{name}_se": standard_error(values)} if error else metrics


def exponential(name: str, logs: Values, *, error: bool = True) -> dict[str, float]:
    """`summary` of e^x over values x. Results are at most the largest float64, 1.8e308."""
    if not len(logs):
        return {}
    scale = float(logs.max())
    metrics = summary(name, np.exp(logs - scale), error=error)  # all values are at most 1
    for key, value in metrics.items():
        if value > 0:  # else 0, or NaN
            metrics[key] = math.exp(min(math.log(value) + scale, LARGEST))
    return metrics
