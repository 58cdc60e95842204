"""AGRO's residual as an advantage in verl. Written for verl 0.9.1.

Importing this module registers the estimator, so that `algorithm.adv_estimator=agro` finds it. With
VERL_USE_EXTERNAL_MODULES=agro.api.verl in the environment, verl imports it in every process.

AGRO's gradient (arXiv 2503.19612, eq. 4, divided by β) is −(1/n) Σ_i (R_i − R̄_{-i}) ∇log π(y_i), with
R = r − β log π/π_ref at the current policy and R̄_{-i} the mean over its prompt's other responses. That is a
policy gradient with advantage R_i − R̄_{-i} at every token of a response. verl computes advantages once per
batch, so the first update on it is exact, for responses of any origin. By later updates on the same batch π
has moved, and both R and verl's importance ratios belong to another loss: `check` refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est

from agro.errors import Refused

NAME = "agro"
KL_IN_REWARD = "verl subtracts β log π/π_ref, token by token, from the rewards"
CORRECTION = "it would weight or drop responses, or take log-probs that aren't the current policy's"
# Settings of verl's configuration under which the update is AGRO's: allowed values, and the reason.
ALGORITHM = {
    "use_kl_in_reward": ((True,), f"{KL_IN_REWARD}; β is algorithm.kl_ctrl.kl_coef"),
    "kl_penalty": (("kl", "k1"), "other penalties aren't the log-ratio"),
    "rollout_correction.rollout_is": ((None,), CORRECTION),
    "rollout_correction.rollout_rs": ((None,), CORRECTION),
    "rollout_correction.bypass_mode": ((None, False), CORRECTION),
}
ACTOR = {
    "ppo_epochs": ((1,), "advantages belong to the policy before the first update"),
    "loss_agg_mode": (("seq-mean-token-sum",), "the gradient is of log π of the complete response"),
    "policy_loss.loss_mode": (("vanilla", "gpg"), "the loss is −advantage · ∇log π in the first update"),
    "use_kl_loss": ((False,), "β log π/π_ref is in the advantage already"),
    "entropy_coeff": ((0,), "AGRO's loss has no entropy term"),
}


def residual_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Return R_i − R̄_{-i} at the tokens of response i, as advantage and as return.

    Args:
        token_level_rewards: [B,T] rewards minus β log π/π_ref of each token, which sum to R.
        response_mask: [B,T] mask of the policy's tokens.
        index: [B] the prompt of each response.
        config: verl's `algorithm` section.

    Raises `Refused` for settings of `config` under which the update isn't AGRO's, for prompts with one
    response or with different numbers of responses, and for non-finite rewards.
    """
    if config is None:
        raise Refused(
            f"adv_estimator {NAME}: expected the algorithm section of verl's configuration, got none"
        )
    _check("algorithm", config, ALGORITHM)
    R_N = token_level_rewards.detach().double().sum(1)
    if not R_N.isfinite().all():
        row = int((~R_N.isfinite()).int().argmax())
        raise Refused(f"adv_estimator {NAME}: row {row}: expected a finite reward, got {float(R_N[row])}")
    names, group = np.unique(np.asarray(index), return_inverse=True)
    group_N = torch.as_tensor(group.reshape(-1), device=R_N.device)
    n_G = torch.bincount(group_N)
    smallest, largest = int(n_G.min()), int(n_G.max())
    if smallest < 2 or smallest < largest:
        raise Refused(
            f"adv_estimator {NAME}: expected two or more responses to each prompt, and equally many, got "
            f"{smallest} to {names[int(n_G.argmin())]} and {largest} to {names[int(n_G.argmax())]}: "
            "verl's mean is over responses, AGRO's over prompts. What to do: "
            "actor_rollout_ref.rollout.n of 2 or more, and no filter of single responses"
        )
    sum_N = torch.zeros_like(n_G, dtype=R_N.dtype).index_add(0, group_N, R_N)[group_N]
    advantage_N = R_N - (sum_N - R_N) / (n_G[group_N] - 1)
    advantage_BT = (advantage_N[:, None] * response_mask).to(token_level_rewards.dtype)
    return advantage_BT, advantage_BT


def check(config: Any) -> None:
    """Raise `Refused` if a run with verl's complete configuration doesn't perform AGRO's update.

    The estimator sees the `algorithm` section alone. Call this before a run to check the actor's and the
    data's sections too.
    """
    estimator = _value(config, "algorithm.adv_estimator")
    if estimator != NAME:
        raise Refused(f"algorithm.adv_estimator: expected {NAME!r}, got {estimator!r}")
    _check("algorithm", config["algorithm"], ALGORITHM)
    actor = "actor_rollout_ref.actor"
    _check(actor, _value(config, actor), ACTOR)
    batch, update = _value(config, "data.train_batch_size"), _value(config, f"{actor}.ppo_mini_batch_size")
    if batch != update:
        raise Refused(
            f"{actor}.ppo_mini_batch_size: expected data.train_batch_size = {batch}, one update per batch, "
            f"got {update}: advantages belong to the policy before the first update"
        )


def _check(section: str, config: Any, allowed: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    for key, (values, reason) in allowed.items():
        value = _value(config, key)
        if value not in values:
            expected = " or ".join(map(repr, values))
            raise Refused(f"{section}.{key}: expected {expected} for {NAME}, got {value!r}: {reason}")


def _value(config: Any, key: str) -> Any:
    """Return the value under a dotted key; None if a section is missing."""
    for name in key.split("."):
        config = None if config is None else config.get(name, None)
    return config


register_adv_est(NAME)(residual_advantage)
