"""What TRL and verl call objectives and options, for the answers to such names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

# Options of theirs: what sets the same here. As of TRL 1.16 and verl 0.9.1.
OPTIONS = {
    "loss_type": "objective.name",
    "loss_mode": "objective.name",
    "adv_estimator": "objective.name",
    "advantage_estimator": "objective.name",
    "epsilon": "clip = [LOW, HIGH]",
    "epsilon_low": "clip = [LOW, HIGH]",
    "epsilon_high": "clip = [LOW, HIGH]",
    "clip_ratio": "clip = [LOW, HIGH]",
    "clip_ratio_low": "clip = [LOW, HIGH]",
    "clip_ratio_high": "clip = [LOW, HIGH]",
    "cliprange": "clip = [LOW, HIGH]",
    "clip_ratio_c": "dual_clip",
    "delta": "dual_clip",
    "kl_coef": "beta",
    "kl_loss_coef": "beta",
    "scale_rewards": "std",
    "norm_adv_by_std_in_grpo": "std",
    "loss_agg_mode": "average",
    "use_kl_loss": "beta above 0",
    "num_iterations": "train.updates",
    "ppo_epochs": "train.updates",
    "num_generations": "sampler.n",
    "rollout_n": "sampler.n",
    "max_completion_length": "sampler.max_new",
    "learning_rate": "train.lr",
    "reference_free": 'an objective without a reference, such as "rloo" with beta = 0',
}
# Names of theirs without an entry of their own.
ELSEWHERE = {
    "bnpo": 'grpo with average = "token"',
    "ppo": 'grpo (its clip without a value network) or prefix_consistency, which learns values; "gae" has no '
    "counterpart",
    "gae": "prefix_consistency, which learns the value of each prefix",
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
    "spo": 'rloo with baseline = "stored" and data.value_half_life (recipe one_response)',
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
    *(
        "echo",
        "sdft",
        "clip_cov",
        "kl_cov",
        "grpo_passk",
        "gdpo",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    ),
    *("orpo", "cpo", "simpo", "xpo", "nash_md", "bco", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("exo_pair", "nca_pair", "apo_down", "discopop"),
)


def plain(name: str) -> str:
    """Lower case, letters and digits alone: "Dr.GRPO" and "dr_grpo" are the same."""
    return re.sub(r"[^a-z0-9*]", "", name.lower())


def option(key: str, value: Any) -> str:
    """What sets an option of theirs here, and to what where its value is a method's name; "" where nothing
    does."""
    ours = OPTIONS.get(key, "")
    if ours != "objective.name" or not isinstance(value, str):
        return f"{ours} sets it here" if ours else ""
    words = _elsewhere(value)
    if not words:
        return f'{ours} = "{value}" sets it here, if `agro objectives` lists it'
    name = words.split()[0].rstrip(",")
    return f'{ours} = "{name}" sets it here' + (f" ({words})" if words != name else "")


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
    near = difflib.get_close_matches(name, known, 1, 0.6)
    return f"did you mean {near[0]}?" if near else ""


def _elsewhere(name: str) -> str:
    """What `ELSEWHERE` has for a name in any spelling; "" for a name that isn't there."""
    return {plain(peer): ours for peer, ours in ELSEWHERE.items()}.get(plain(name), "")
