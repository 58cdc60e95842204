"""The metrics of a step. What isn't known or wasn't measured is None."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from agro.config import RunConfig
from agro.evaluate import Heldout
from agro.policy import Policy
from agro.train.data import Drawn, one_each
from agro.train.diagnostics import diagnostic_beta, distances, fresh_metrics, spreads
from agro.train.micro import MicroBatch
from agro.train.step import Step, collate, streams_of
from agro.types import Batch


def describe_batch(drawn: Drawn, version: int) -> dict[str, Any]:
    """What the samples say before anything is computed on them. `version` is the trainer's."""
    samples, responses = drawn.samples, one_each(drawn.samples)
    rewards = defaultdict(list)
    for s in responses:
        if s.reward is not None:
            rewards[s.prompt_id].append(s.reward)
    parts: dict[str, list[float]] = defaultdict(list)
    for noted in (s.meta.get("reward_parts") for s in responses):
        for name, value in (
            noted.items() if isinstance(noted, dict) else ()
        ):  # an imported log may hold anything
            parts[name] += [value] if isinstance(value, (int, float)) else []
    known = [r for group in rewards.values() for r in group]
    ages = [version - s.oldest_version for s in samples if s.oldest_version >= 0]
    finishes = [s.meta.get("finish") for s in responses if s.meta.get("finish") is not None]
    groups = {s.prompt_id for s in samples}
    replayed = len(groups) - len({s.prompt_id for s in samples if drawn.fresh and s.id in drawn.fresh})
    return {
        "reward_mean": float(np.mean(known)) if known else None,
        "reward_std": float(np.std(known, ddof=1)) if len(known) > 1 else None,
        "reward_parts": {name: float(np.mean(v)) if v else None for name, v in parts.items()} or None,
        "tokens": sum(int(s.mask.sum()) for s in samples if s.mask is not None),
        "sampled_tokens": drawn.sampled_tokens,
        "staleness_mean": float(np.mean(ages)) if ages else None,
        "staleness_max": max(ages) if ages else None,
        "length_mean": sum(int(s.action.sum()) for s in samples if s.action is not None) / len(responses)
        if samples
        else None,
        "truncated_share": finishes.count("length") / len(finishes) if finishes else None,
        "groups": len(groups),
        "groups_equal": sum(min(r) == max(r) for r in rewards.values()),
        "rewards_failed": drawn.failed,
        "dropped": sum(drawn.left_out.values()),
        "dropped_reasons": dict(drawn.left_out),
        "skipped": 0,
        "rolled_back": 0,
        "replay_share": replayed / len(groups) if groups else None,
    }


def describe_step(step: Step, drawn: Drawn, config: RunConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the first pass over a batch shows: the objective, its pull, and on fresh rows KL, regret and sampler against trainer.

    `options`: the objective's, of this step.

    kl_ref is the mean over fresh responses of Σ_t log π − log π_ref, in nats: on other rows that isn't a KL.
    """
    batch, logp = step.batch, step.streams["logp"]
    fresh = torch.tensor(drawn.is_fresh, device=logp.device)
    out: dict[str, Any] = {
        "loss": step.evaluation.loss,
        "objective": step.evaluation.metrics,
        "beta": options.get("beta"),
    }
    if found := spreads(step, config.objective.name, options):
        out["kl_to_reward_spread"] = options["beta"] * found[0] / found[1]
    if fresh.any() and batch.ref_logp is not None:
        rows = fresh.nonzero()[:, 0]
        part = batch.rows(rows)
        out["kl_ref"] = _kl(part, logp[rows], batch.ref_logp[rows])
        if beta := diagnostic_beta(config, options):
            _, regret = distances(part, logp[rows], beta, options.get("average", "sum"))
            out["regret"] = float(regret.mean()) if len(regret) else None
    if fresh.any() and batch.behavior_logp is not None and samples_policy(config):
        off = (logp - batch.behavior_logp)[batch.mask & fresh[:, None]].abs()
        out |= {"logp_diff_mean": off.mean().item(), "logp_diff_max": off.max().item()}
    return out


def samples_policy(config: RunConfig) -> bool:
    """Whether the sampler draws from the policy itself, so that both should give the same log-probs."""
    s = config.sampler
    return s.temperature == config.policy.temperature and not s.top_k and s.top_p == 1 and not s.min_p


def describe_heldout(
    found: Heldout,
    policy: Policy,
    reference: Policy | None,
    config: RunConfig,
    options: Mapping[str, Any],
    micro: MicroBatch,
) -> dict[str, Any]:
    """Held-out reward, and where samples of the policy itself allow it KL to the reference, ½ Var(R) and regret.

    `options`: the objective's, of this step.
    """
    out: dict[str, Any] = {
        "eval_reward": found.mean,
        "eval_reward_se": found.se,
        "eval_n": found.rewards.size - found.unscored,
        "eval_unscored": found.unscored,
    }
    if (
        config.evaluate.kl
        and reference is not None
        and config.evaluate.temperature == config.policy.temperature
    ):
        batch = collate(found.samples, 0).to(policy.device)
        ours, theirs = (streams_of(p, batch, ["logp"], micro)["logp"] for p in (policy, reference))
        out["eval_kl_ref"] = _kl(batch, ours, theirs)
        if beta := diagnostic_beta(config, options):
            out |= fresh_metrics(batch.replace(ref_logp=theirs), ours, beta, options.get("average", "sum"))
    return out


def _kl(batch: Batch, logp: torch.Tensor, ref_logp: torch.Tensor) -> float:
    """Mean over responses of Σ_t log π − log π_ref, in nats."""
    total = (logp - ref_logp)[batch.mask].sum()
    return total.item() / len(batch.response.unique())
