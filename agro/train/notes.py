"""What is said of a policy and its prompts before a run begins: not wrong, but perhaps not what was meant."""

from __future__ import annotations

from collections.abc import Sequence

from agro.config import RunConfig
from agro.generation import left_aside
from agro.policy import Policy
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
    return found
