"""The parts of a reward: what each has of the reward's variance, and their means on held-out responses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from agro.config import RewardConfig
from agro.rewards.shaping import shares
from agro.train.feed import one_each
from agro.train.monitors.base import Monitor, View
from agro.types import Sample


class RewardParts(Monitor):
    """`reward_shares` of what a step trains on, and `eval_reward_parts` where held-out rewards are measured.

    A part of weight 0 is measured beside those that are optimized: where the two part, the run's problems say
    so (`agro.runs.problems`).
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.samples: Sequence[Sample] = ()

    def receive(self, samples: Sequence[Sample]) -> None:
        self.samples = one_each(samples)

    def after(self, view: View) -> None:
        if view.step:
            view.metrics["reward_shares"] = shares(self.samples, self.config)
        if view.held_out:
            view.metrics |= _means(one_each(view.held_out))


def _means(responses: Sequence[Sample]) -> dict[str, Any]:
    """Of each part the mean over prompts, and its standard error."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in responses:
        for name, value in sample.meta.get("reward_parts", {}).items():
            if value is not None:
                values[name][sample.prompt_id].append(value)
    mean: dict[str, float] = {}
    error: dict[str, float | None] = {}
    for name, of_prompts in values.items():
        by_prompt = np.array([np.mean(of_prompt) for of_prompt in of_prompts.values()])
        mean[name], n = float(by_prompt.mean()), len(by_prompt)
        error[name] = float(by_prompt.std(ddof=1) / np.sqrt(n)) if n > 1 else None
    return {"eval_reward_parts": mean, "eval_reward_parts_se": error}
