"""The TRL arguments that AGROTrainer refuses, and what to do instead. Written for TRL 1.16.0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from agro.errors import Refused
from agro.objectives import get

RATIOS = "AGRO has no importance ratios and no clipping"
ENTROPY = "AGRO's loss has no entropy term"
# Arguments of GRPO's loss without a counterpart in AGRO's. They must keep TRL's default.
WITHOUT_COUNTERPART = {
    "loss_type": "AGROTrainer has one loss; options={'average': 'token'} takes means over tokens",
    "multi_objective_aggregation": "the reward is the weighted sum, by reward_weights",
    "mask_truncated_completions": "leaving completions out changes their group; reward them lower instead",
    "sync_ref_model": "the optimum belongs to one reference; agro train has policy.reference = 'periodic'",
    "neftune_noise_alpha": "log-probs must be the same in every forward pass",
    **dict.fromkeys(["epsilon", "epsilon_high", "delta", "importance_sampling_level"], RATIOS),
    **dict.fromkeys(["off_policy_mask_threshold", "use_bias_correction_kl"], RATIOS),
    **dict.fromkeys(["sapo_temperature_neg", "sapo_temperature_pos"], RATIOS),
    **dict.fromkeys(["vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"], RATIOS),
    **dict.fromkeys(["top_entropy_quantile", "entropy_coef", "use_adaptive_entropy"], ENTROPY),
}


def check_arguments(args: Any, options: Mapping[str, Any]) -> None:
    """Raise `Refused` for arguments without a counterpart in AGRO's loss, and for unknown options."""
    if args is None or args.scale_rewards != "none":
        got = "no args" if args is None else repr(args.scale_rewards)
        raise Refused(
            f"scale_rewards: expected 'none', got {got}: β is in units of the reward, and a reward divided "
            "by its group's spread has another optimum. What to do: GRPOConfig(scale_rewards='none', beta=…)"
        )
    defaults = {field.name: field.default for field in fields(args)}
    for name, advice in WITHOUT_COUNTERPART.items():
        value = getattr(args, name)
        if value != defaults[name]:
            raise Refused(f"{name}: expected TRL's default {defaults[name]!r}, got {value!r}: {advice}")
    if args.use_vllm and args.vllm_importance_sampling_correction:
        raise Refused(f"vllm_importance_sampling_correction: expected False, got True: {RATIOS}")
    if "beta" in options:
        raise Refused(
            f"options: beta: expected it in args, as GRPOConfig(beta=…), got {options['beta']} here"
        )
    get("agro").resolve("agro", {"beta": args.beta, **options})
    if args.num_generations_eval == 1:
        raise Refused("num_generations_eval: expected 2 or more for a group's variance, got 1")
    n, size = args.num_generations, args.per_device_train_batch_size
    if size % n:
        raise Refused(
            f"per_device_train_batch_size: expected a multiple of num_generations = {n}, since a gradient "
            f"needs complete groups, got {size}"
        )


def check_model(trainer: Any) -> None:
    """Raise `Refused` for a model whose loss has other terms, or whose log-probs are random."""
    if trainer._is_vlm:
        raise Refused(
            "processing_class: expected a tokenizer, got an image processor: AGROTrainer trains on text"
        )
    if trainer.aux_loss_enabled:
        raise Refused("router_aux_loss_coef: expected 0.0: AGRO's loss has no router term")
    for name, module in trainer.model.named_modules():
        values = {"p": module.p} if isinstance(module, nn.Dropout) else vars(module)
        for key, value in values.items():
            if isinstance(value, float) and value > 0 and (key == "p" or "drop" in key):
                raise Refused(
                    f"model: {name}.{key}: expected no dropout, got {value}: log-probs must be the same in "
                    "every forward pass. What to do: disable_dropout=True, and 0.0 for attention_dropout in "
                    "the model's configuration"
                )
