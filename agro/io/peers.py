"""What TRL and verl call objectives and options, for the answers to such names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agro.errors import Refused
from agro.io.nearest import nearest

# Settings of TRL that mean the same here: accepted, with a note.
ALIASES = {
    "num_generations": "sampler.n",
    "learning_rate": "train.lr",
    "beta": "objective.beta",
    "max_completion_length": "sampler.max_new",
    "num_train_epochs": "train.epochs",
    "reward_funcs": "reward.name",
    "train_dataset": "data.prompts",
    "loss_type": "objective.name",
    "max_steps": "train.steps",
    "warmup_steps": "train.warmup",
    "lr_scheduler_type": "train.schedule",
    "max_grad_norm": "train.clip",
    "save_steps": "train.checkpoint_every",
    "save_total_limit": "train.keep",
    "eval_steps": "evaluate.every",
    "num_iterations": "train.updates",
    "run_name": "track.name",
    "bf16": "policy.dtype",
    "logging_steps": "",
}
UNUSED = {"logging_steps": "every step is written to metrics.jsonl"}  # taken, without an effect
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")  # train.groups × sampler.n
# Options of their losses: the option of an objective here. As of TRL 1.16 and verl 0.9.1.
OPTIONS = {
    "loss_type": "objective.name",
    "loss_mode": "objective.name",
    "adv_estimator": "objective.name",
    "advantage_estimator": "objective.name",
    **dict.fromkeys(("epsilon", "epsilon_low", "epsilon_high"), "clip = [LOW, HIGH]"),
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high", "cliprange"), "clip = [LOW, HIGH]"),
    "clip_ratio_c": "dual_clip",
    "delta": "dual_clip",
    "kl_coef": "beta",
    "kl_loss_coef": "beta",
    "scale_rewards": "std",
    "norm_adv_by_std_in_grpo": "std",
    "loss_agg_mode": "average",
    "use_kl_loss": "beta above 0",
    "desirable_weight": "desirable",
    "undesirable_weight": "undesirable",
    "reference_free": 'an objective without a reference, such as "rloo" with beta = 0',
}
# Their other arguments, those of transformers' TrainingArguments among them: the setting here.
SETTINGS = {
    **{name: ours for name, ours in ALIASES.items() if name != "loss_type" and ours},
    **dict.fromkeys(BATCH, "train.groups, in prompts,"),
    "ppo_epochs": "train.updates",
    "rollout_n": "sampler.n",
    "generation_batch_size": "train.groups, in prompts,",
    "weight_decay": "train.weight_decay",
    "optim": "train.optimizer",
    "adam_beta1": "train.adam_betas = [BETA1, BETA2]",
    "adam_beta2": "train.adam_betas = [BETA1, BETA2]",
    "adam_epsilon": "train.adam_eps",
    "seed": "train.seed",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "max_length": "train.max_length",
    "log_completions": "train.show_every",
    "hub_model_id": "train.push",
    "hub_private_repo": "train.push_private",
    "temperature": "sampler.temperature",
    "top_p": "sampler.top_p",
    "top_k": "sampler.top_k",
    "min_p": "sampler.min_p",
    "num_generations_eval": "evaluate.n",
    "load_best_model_at_end": "evaluate.keep_best",
    "metric_for_best_model": "evaluate.metric",
    "report_to": "track.to",
    "model_name_or_path": "policy.model",
    "fp16": 'policy.dtype = "mixed"',
    "warmup_ratio": "train.warmup, in steps,",
    "attn_implementation": "policy.attention",
    "ref_model": "policy.reference_model",
    "sync_ref_model": 'policy.reference = "ema" or "periodic"',
    "ref_model_mixup_alpha": "policy.reference_decay",
    "ref_model_sync_steps": "policy.reference_every",
    "precompute_ref_log_probs": "policy.cache_reference",
    "peft_config": "policy.lora",
    "chat_template_kwargs": "policy.chat.options",
    "use_vllm": 'engine.kind = "vllm"; "server" where it runs already',
    "vllm_server_base_url": "engine.url",
    "max_tool_calling_iterations": "environment.max_turns",
    "reward_weights": "the weight in each of reward.functions",
    "eval_dataset": "data.eval_prompts",
    "output_dir": "--out, or out of agro.train,",
    "resume_from_checkpoint": "--resume, or resume of agro.train,",
}
# Names of theirs without an entry of their own.
ELSEWHERE = {
    "bnpo": 'grpo with average = "token"',
    "gae": "ppo",
    "vanilla": "grpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp",
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
    "remax": "reinforce with a number or the group's mean as its baseline",
    "gpg": "reinforce",
    "sigmoid": "dpo",
    "hinge": "slic",
    "robust": "dpo with label_smoothing above 0",
    "gkd": "distill",
    "opd": "distill",
    "minillm": "distill",
    "tapered": "topr",
    "a*po": "apo",
    "apo_zero": "kto, dpo or apo (A*PO), which is another method",
    "spo": 'rloo with baseline = "stored", normalize and data.value_half_life (recipe one_response)',
    "optimal_token_baseline": "otb",
    "tir_optimal_token_baseline": "otb",
    "gspo_token": "gspo, whose gradient is the same where all tokens of a response have one advantage",
    "llamarl": "aipo",
    "async_rlhf": "online_dpo",
    "mbrcsl": "reward_conditioned",
    "bfs_prover": "middle_band",
    "trajectory_balance": "vargrad",
    "tba": "vargrad",
}
# Without a counterpart here: an objective whose name is alike would be another method.
ABSENT = (
    *("echo", "sdft", "clip_cov", "kl_cov", "grpo_passk"),
    *("orpo", "cpo", "simpo", "xpo", "nash_md", "bco", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("exo_pair", "nca_pair", "apo_down", "discopop"),
)


def plain(name: str) -> str:
    """Lower case, letters and digits alone: "Dr.GRPO" and "dr_grpo" are the same."""
    return re.sub(r"[^a-z0-9*]", "", name.lower())


def option(key: str, value: Any) -> str:
    """What sets an option of theirs in an objective, and to what where its value is a method's name; "" where
    nothing does."""
    ours = OPTIONS.get(key) or SETTINGS.get(key, "")
    if ours == f"objective.{key}":  # which this objective doesn't have
        return ""
    if ours != "objective.name" or not isinstance(value, str):
        return f"{ours} sets it here" if ours else ""
    words = _elsewhere(value)
    if not words:
        return f'{ours} = "{value}" sets it here, if `agro objectives` lists it'
    name = words.split()[0].rstrip(",")
    return f'{ours} = "{name}" sets it here' + (f" ({words})" if words != name else "")


def near_alias(name: str) -> str | None:
    """The accepted name of TRL's that a name is a slip of; beta is an option here too."""
    return nearest(name, [alias for alias in (*ALIASES, *BATCH) if alias != "beta"], 0.85)


def method(name: str) -> str:
    """The objective that one of their losses is here; a name that is known nowhere stays.

    Raises `Refused` for one that is an objective with an option here.
    """
    words = _elsewhere(name)
    if " " in words:
        raise Refused(f'loss_type = "{name}" is {words} here; set objective.name, and what it says')
    return words or name


def setting(key: str, value: Any) -> str:
    """What sets an argument of theirs in a configuration, as `option`, with its section."""
    if key in SETTINGS:
        return f"{SETTINGS[key]} sets it here"
    answer = option(key, value)
    has_section = answer.startswith(("objective.", "an objective"))
    return answer if has_section or not answer else f"objective.{answer}"


def objective(name: str, known: Mapping[str, str]) -> str:
    """What to use for an objective that isn't known by this name; "" where nothing is near.

    `known`: by name what other libraries call it.
    """
    same = {plain(own): own for own in known}
    if plain(name) in same:
        return f"did you mean {same[plain(name)]}?"
    if _elsewhere(name):
        return f"here it is {_elsewhere(name)}"
    if plain(name) in {plain(peer) for peer in ABSENT}:
        return "it has no counterpart here; see docs/methods.md"
    for own, called in known.items():
        if plain(name) in {plain(word) for word in re.findall(r'"([^"]+)"', called)}:
            return f"here it is {own}"
    near = nearest(name, known, 0.6)
    return f"did you mean {near}?" if near else ""


def _elsewhere(name: str) -> str:
    """What `ELSEWHERE` has for a name in any spelling; "" for a name that isn't there."""
    return {plain(peer): ours for peer, ours in ELSEWHERE.items()}.get(plain(name), "")
