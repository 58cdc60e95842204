"""What is said of a policy and its prompts before a run begins: not wrong, but perhaps not what was meant."""

from __future__ import annotations

from collections.abc import Sequence

from agro.config import RunConfig
from agro.generation import left_aside
from agro.policy import Policy
from agro.train.check import has_groups_to_measure, measures_consistency
from agro.train.schedule import options_at
from agro.types import Prompt


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
        if objective.name == "agro_onpolicy" and options.get("likelihood_ratio", 1.0) == 1.0 and options["beta"] < 0.5:
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
