"""The estimator in the real verl: its rewards, its registry and its loss give AGRO's gradient."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from agro import Refused, objectives
from agro.types import Batch

verl = pytest.importorskip("verl", reason="needs verl: make test-integrations")

from verl import DataProto  # noqa: E402 - needs verl
from verl.trainer.config import AlgoConfig  # noqa: E402
from verl.trainer.ppo.core_algos import (  # noqa: E402
    FixedKLController,
    compute_policy_loss_vanilla,
    get_adv_estimator_fn,
)
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage  # noqa: E402
from verl.workers.config import FSDPActorConfig  # noqa: E402

from agro.api.verl import check, residual_advantage  # noqa: E402

BETA, B, T = 0.2, 6, 5
UID = np.array(["b", "a", "b", "a", "a", "b"], dtype=object)


def algorithm(**changes) -> AlgoConfig:
    return AlgoConfig(**{"adv_estimator": "agro", "use_kl_in_reward": True} | changes)


@pytest.fixture
def rows():
    """Log-probs of policy and reference, mask and rewards."""
    generator = torch.Generator().manual_seed(0)
    logp_BT, ref_BT = -torch.rand(2, B, T, generator=generator, dtype=torch.float64)
    mask_BT = torch.arange(T) < torch.tensor([5, 3, 4, 1, 2, 5])[:, None]
    return logp_BT, ref_BT, mask_BT, torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 0.0], dtype=torch.float64)


def test_verls_update_has_agros_gradient(rows) -> None:
    logp_BT, ref_BT, mask_BT, reward_B = rows
    last_BT = mask_BT & ~torch.nn.functional.pad(mask_BT[:, 1:], (0, 1))
    data = DataProto.from_dict(
        tensors={
            "response_mask": mask_BT.long(),
            "token_level_scores": reward_B[:, None] * last_BT,
            "old_log_probs": logp_BT,
            "ref_log_prob": ref_BT,
        },
        non_tensors={"uid": UID},
    )
    data, _ = apply_kl_penalty(data, FixedKLController(BETA), "kl")
    advantage_BT = compute_advantage(data, "agro", config=algorithm()).batch["advantages"]
    live_BT = logp_BT.clone().requires_grad_()
    actor = FSDPActorConfig(strategy="fsdp", rollout_n=3, ppo_micro_batch_size_per_gpu=1)
    loss, _ = compute_policy_loss_vanilla(
        logp_BT, live_BT, advantage_BT, mask_BT, "seq-mean-token-sum", actor
    )
    loss.backward()
    first = torch.nn.functional.pad
    batch = Batch.of(mask=first(mask_BT, (1, 0)), reward=reward_B, group=UID, ref_logp=first(ref_BT, (1, 0)))
    expected = objectives.evaluate("agro", first(logp_BT, (1, 0)), batch, beta=BETA)
    torch.testing.assert_close(live_BT.grad, expected.grad[:, 1:], rtol=1e-6, atol=1e-8)
    assert get_adv_estimator_fn("agro") is residual_advantage


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_kl_in_reward": False}, "algorithm.use_kl_in_reward: expected True"),
        ({"kl_penalty": "k3"}, "algorithm.kl_penalty: expected 'kl' or 'k1'"),
        ({"rollout_correction": {"rollout_is": "token"}}, "rollout_is: expected None"),
        ({"rollout_correction": {"rollout_is": None, "bypass_mode": True}}, "bypass_mode: expected None"),
    ],
)
def test_other_settings_are_refused(changes, message) -> None:
    with pytest.raises(Refused, match=message):
        residual_advantage(torch.zeros(B, T), torch.ones(B, T), UID, algorithm(**changes))


@pytest.mark.parametrize(
    ("index", "message"), [(["a", "b", "b"], "got 1 to a"), (["a", "b", "b", "a", "a"], "3 to a")]
)
def test_groups_of_one_or_of_different_sizes_are_refused(index, message) -> None:
    rewards = torch.zeros(len(index), T)
    with pytest.raises(Refused, match=message):
        residual_advantage(rewards, rewards, index, algorithm())


def test_check_reads_verls_complete_configuration() -> None:
    with pytest.raises(Refused, match="adv_estimator: expected 'agro', got 'gae'"):
        check(generated())
    config = generated()
    config.algorithm.adv_estimator, config.algorithm.use_kl_in_reward = "agro", True
    actor = config.actor_rollout_ref.actor
    with pytest.raises(Refused, match="loss_agg_mode: expected 'seq-mean-token-sum'"):
        check(config)
    actor.loss_agg_mode = "seq-mean-token-sum"
    with pytest.raises(Refused, match="one update per batch, got 256"):
        check(config)
    actor.ppo_mini_batch_size = 1024
    check(config)
    for key, value in (("ppo_epochs", 2), ("use_kl_loss", True), ("entropy_coeff", 0.1)):
        other = copy.deepcopy(config)
        other.actor_rollout_ref.actor[key] = value
        with pytest.raises(Refused, match=f"{key}: expected"):
            check(other)


def generated():
    """verl's defaults."""
    from importlib import resources

    from omegaconf import OmegaConf

    path = resources.files("verl.trainer.config") / "_generated_ppo_trainer.yaml"
    return OmegaConf.create(path.read_text())
