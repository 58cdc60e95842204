"""What is said of a policy, its prompts and the trap of on-policy AGRO: not wrong, but perhaps not what was meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.config import RunConfig
from agro.generation import left_aside
from agro.policy import Policy
from agro.train.check import has_groups_to_measure, measures_consistency
from agro.train.schedule import options_at
from agro.types import Prompt


def trap(rewards: NDArray[np.float64], objective: str, options: Mapping[str, Any]) -> str | None:
    """What the rewards [M,n] of M prompts at the start say of on-policy AGRO's trap; None where it isn't at stake or known.

    μ₃/(2β Var) of each prompt by the unbiased estimates of both moments, which need n ≥ 3.
    """
    c = options.get("likelihood_ratio", 1.0)
    if objective != "agro_onpolicy" or c == "adaptive" or not c * options["beta"] or rewards.shape[1] < 3:
        return None
    differ = rewards[
        rewards.max(1) > rewards.min(1)
    ]  # a prompt with an unscored response, NaN, isn't among them
    if not len(differ):
        return None
    n, off = differ.shape[1], differ - differ.mean(1, keepdims=True)
    ratio = n / (n - 2) * (off**3).sum(1) / (off**2).sum(1) / (2 * options["beta"])
    return (
        f"on {(c * ratio > 1).sum()} of {len(differ)} held-out prompts whose {n} rewards differ (of {len(rewards)}) μ₃/(2β Var) of the rewards "
        f"is above {1 / c:.3g} (median {np.median(ratio):.3g}): there agro_onpolicy lowers the reward at first. "
        'likelihood_ratio = "adaptive" keeps clear of it'
    )


def trapped(share: float) -> str:
    """What a step says of the trap; `share`: the metric `reversed_share`."""
    return (
        f"in {share:.0%} of the groups whose rewards differ the best response is pushed down: β is below what on-policy AGRO needs "
        'at this success rate. What to do: objective.likelihood_ratio = "adaptive", a larger β, or agro'
    )


def notes(policy: Policy, prompts: Sequence[Prompt], config: RunConfig) -> list[str]:
    found = []
    texts = sum(isinstance(p.text, str) for p in prompts)
    if texts and policy.tokenizer.chat_template and not config.policy.chat.wrap:
        found.append(
            f"{texts} of {len(prompts)} prompts are plain text and go to the model as they are, though its tokenizer has a chat "
            "template; policy.chat.wrap = true makes user messages of them"
        )
    aside = left_aside(policy.model, config.sampler)
    if prompts and aside:
        found.append(
            f"the model's generation_config asks for {', '.join(aside)}; [sampler] decides, and these aren't taken over"
        )
    for name in config.phase_names:
        objective = config.phase(name).objective
        options = options_at(objective.options, 0)
        if (
            objective.name == "agro_onpolicy"
            and options.get("likelihood_ratio", 1.0) == 1.0
            and options["beta"] < 0.5
        ):
            found.append(
                f"phase {name}: agro_onpolicy falls where rewards are rare: with rewards of 0 and 1 the reward rises from the reference only "
                f"on prompts that it solves more often than ½ − β = {0.5 - options['beta']:.3g} of the time (the metric reversed_share counts "
                'the others); likelihood_ratio = "adaptive" keeps clear of it'
            )
    phases = {name: config.phase(name) for name in config.phase_names}
    unmeasured = [n for n, p in phases.items() if has_groups_to_measure(p) and not measures_consistency(p)]
    if unmeasured:
        found.append(
            f"phase {', '.join(unmeasured)}: without a β that pulls to the reference ½ Var(R) and regret aren't measured; "
            "evaluate.beta (reward per nat) switches them on"
        )
    return found
