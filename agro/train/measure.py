"""The metrics of a step. What is unknown or wasn't measured is None."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from agro.objectives.reduce import Groups
from agro.rollout import CollectResult
from agro.train.collate import staleness, total_reward
from agro.train.diagnostics import distances, spreads, stored_metrics, unequal
from agro.train.feed import Valid, one_each
from agro.train.phases import Phase
from agro.train.step import Step
from agro.types import Batch


def describe_batch(valid: Valid, collected: CollectResult, version: int) -> dict[str, Any]:
    """Metrics of a step's samples before any forward pass. `version` is the learner's."""
    samples, responses = valid.samples, one_each(valid.samples)
    rewards_of: dict[str, list[float]] = defaultdict(list)
    for s in responses:
        total = total_reward(s)
        if not math.isnan(total):
            rewards_of[s.prompt_id].append(total)
    rewards = [s.reward for s in responses if s.reward is not None]
    fresh = {s.prompt_id for s in samples if s.id in valid.made}
    stored = {s.prompt_id for s in samples if s.id not in valid.made}
    stale = [staleness(s, version) for s in samples]
    known_staleness = [steps for steps in stale if steps is not None]
    parts: dict[str, list[float]] = defaultdict(list)  # an imported log may have anything under this name
    for of_sample in (s.meta.get("reward_parts") for s in responses):
        for name, value in of_sample.items() if isinstance(of_sample, dict) else ():
            parts[name] += [value] if isinstance(value, (int, float)) else []
    ends = [end for s in responses if (end := s.end) != "unknown"]
    actions = sum(int(s.action.sum()) for s in samples if s.action is not None)
    meanings = Counter((s.prompt_id, s.meta.get("meaning")) for s in responses if "meaning" in s.meta)
    return {
        "reward_mean": _mean(rewards),
        "reward_std": float(np.std(rewards, ddof=1)) if len(rewards) > 1 else None,
        "reward_parts": {name: _mean(values) for name, values in parts.items()} or None,
        "tokens": sum(int(s.mask.sum()) for s in samples if s.mask is not None),
        "sampled_tokens": collected.tokens,
        "staleness_mean": _mean(known_staleness),
        "staleness_max": max(known_staleness, default=None),
        "length_mean": actions / len(responses) if responses else None,
        "truncated_share": ends.count("cut") / len(ends) if ends else None,
        "groups": len(fresh | stored),
        "groups_merged": len(fresh & stored),
        "hinted": sum(s.meta.get("hint") is not None for s in responses),
        "experts": sum(s.role == "expert" for s in responses),
        "same_meaning": sum(n for n in meanings.values() if n > 1) if meanings else None,
        "groups_equal": sum(min(r) == max(r) for r in rewards_of.values()),
        "rewards_failed": collected.failed,
        "requests_failed": collected.failed_requests,
        "draft_accepted": collected.draft_accepted,
        **collected.measured,
        "dropped": sum(valid.dropped.values()),
        "dropped_reasons": dict(valid.dropped),
        "skipped": 0,
        "rolled_back": 0,
        "replay_share": len(stored) / (len(fresh) + len(stored)) if samples else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def describe_step(
    step: Step, recent: Sequence[bool], phase: Phase, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Metrics of a step's gradient: of the objective, and on recent samples KL and regret.

    On stored samples also the log-ratios of the best and the worst responses, see `agro.train.diagnostics`.

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
    if not all(recent):
        metrics |= stored_metrics(batch, logp, recent)
    rows = torch.tensor(recent, device=logp.device).nonzero()[:, 0]
    if not len(rows):
        return metrics
    part, logp = batch.rows(rows), logp[rows]
    if part.ref_logp is not None:
        metrics["kl_ref"] = kl_of(part, logp)
        beta = phase.diagnostic_beta(options)
        if beta:
            _, regret = distances(part, logp, beta, options.get("average", "sum"))
            if unequal(Groups.of(part)).any():  # else nothing is known of what could be better
                metrics["regret"] = float(regret.mean())
    return metrics


def logp_differences(step: Step, comparable: Sequence[bool]) -> dict[str, float]:
    """|log π − log μ| of trainer and sampler, over the tokens where both are known.

    Without the metrics that have no such token. For samples of earlier weights a difference also shows how
    far the policy has moved. On fresh ones, of staleness 0, it is rounding.

    Args:
        comparable: [B] the rows where both are of one distribution, see `StepBatch`.
    """
    batch = step.batch
    if batch.behavior_logp is None:
        return {}
    off_BT = (step.streams["logp"] - batch.behavior_logp).abs()
    known_BT = batch.mask & batch.behavior_logp.isfinite()
    compared_BT = known_BT & torch.tensor(comparable, device=off_BT.device)[:, None]
    off, off_fresh = off_BT[compared_BT], off_BT[compared_BT & (batch.age == 0)[:, None]]
    metrics: dict[str, float] = {}
    if len(off):
        metrics |= {"logp_diff_mean": off.mean().item(), "logp_diff_max": off.max().item()}
    if len(off_fresh):
        metrics["logp_diff_fresh"] = off_fresh.mean().item()
    return metrics


def kl_of(batch: Batch, logp: torch.Tensor) -> float:
    """Mean over responses of Σ_t log π − log π_ref, in nats; see `describe_step`."""
    assert batch.ref_logp is not None
    ratio_BT = logp - batch.ref_logp
    is_stale = batch.age > 0
    if not is_stale.any() or batch.behavior_logp is None:
        return ratio_BT[batch.mask].sum().item() / len(batch.response.unique())
    groups = Groups.of(batch)
    log_weight_N = groups.sum_tokens(torch.where(is_stale[:, None], logp - batch.behavior_logp, 0.0))
    weight_N = log_weight_N.softmax(0)
    return float((weight_N * groups.sum_tokens(ratio_BT)).sum())
