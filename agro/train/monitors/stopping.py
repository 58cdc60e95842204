"""Held-out reward against the best so far: which model is saved, and whether the run continues."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from agro.train.monitors.base import Monitor, View


class Best(Monitor):
    """Saves the best model. Stops the run where held-out reward stops rising or has reached its target."""

    name = "best"

    def __init__(self, keep: Callable[[Mapping[str, Any]], None]) -> None:
        """`keep` saves the current model, with the metrics of the step."""
        self.keep = keep
        self.reward = -math.inf  # the highest eval_reward
        self.step = -1  # its step
        self.waited = 0  # evaluations since then

    def after(self, view: View) -> None:
        rule = view.phase.config.evaluate
        reward = view.metrics["eval_reward"]
        if reward is None or math.isnan(reward):  # not measured, or not scored
            return
        self.waited += 1
        again = view.step == self.step  # step 0 is measured again where a run resumes from it
        if reward > self.reward or again:
            self.reward, self.step, self.waited = reward, view.step, 0
            if rule.keep_best:
                self.keep({**view.metrics, "step": view.step})
        if rule.patience and self.waited >= rule.patience:
            view.stop = (
                f"{self.waited} evaluations without more than {self.reward:.4f}, which step {self.step} had"
            )
        if rule.target is not None and reward >= rule.target:
            view.stop = f"eval_reward is {reward:.4f}, evaluate.target {rule.target:g}"

    def state(self) -> dict[str, Any] | None:
        if self.step < 0:
            return None
        return {"reward": self.reward, "step": self.step, "waited": self.waited}

    def restore(self, state: dict[str, Any]) -> None:
        self.reward, self.step, self.waited = state["reward"], state["step"], state["waited"]
