"""Measurements on data that a phase doesn't train on: fresh responses to held-out prompts, stored groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agro.evaluate import Heldout, heldout
from agro.rewards import Reward
from agro.rollout import Activity, Rollout
from agro.train.collate import collate
from agro.train.diagnostics import diagnostic_beta, fresh_metrics, standard_error
from agro.train.heldout_groups import HeldOutGroups
from agro.train.learner import Learner
from agro.train.log_ratios import log_ratios
from agro.train.measure import kl_of
from agro.train.monitors.base import Monitor, View
from agro.train.notes import warn_of_rewards
from agro.train.phases import Phase, derive
from agro.types import Prompt


class HeldOutPrompts(Monitor):
    """Held-out reward; on samples of the policy itself also KL to the reference, ½ Var(R) and regret.

    Measured at step 0, every `evaluate.every` steps and after the last step of the phase, with the same
    random numbers at every step.
    """

    def __init__(
        self,
        phase: Phase,
        learner: Learner,
        rollout: Rollout,
        reward: Reward,
        prompts: Sequence[Prompt],
        activity: Activity,
        say: Callable[[str], None],
    ) -> None:
        self.phase, self.learner, self.rollout, self.reward = phase, learner, rollout, reward
        self.prompts, self.activity, self.say = prompts, activity, say

    def after(self, view: View) -> None:
        if not is_due(view):
            return
        self.activity.stage("evaluating")
        config = self.phase.config
        sampler = config.sampler.of_policy(config.evaluate.temperature, config.evaluate.n)
        result = heldout(
            self.rollout, self.reward, self.prompts, sampler, derive(config.train.seed, "evaluate")
        )
        if view.step == 0:
            warning = warn_of_rewards(result.rewards, config.objective.name, view.options)
            if warning:
                self.say(warning)
        view.held_out = result.samples
        view.metrics |= self._describe(result, view.options)
        if view.metrics["kl_ref"] is None and view.step:
            view.metrics["kl_ref"] = view.metrics["eval_kl_ref"]

    def _describe(self, result: Heldout, options: dict[str, Any]) -> dict[str, Any]:
        config = self.phase.config
        metrics: dict[str, Any] = {
            "eval_reward": result.mean,
            "eval_reward_se": result.se,
            "eval_n": result.rewards.size - result.unscored,
            "eval_unscored": result.unscored,
        }
        of_policy = config.evaluate.temperature == config.policy.temperature
        if not (config.evaluate.kl and of_policy and self.learner.reference_key is not None):
            return metrics
        batch = collate(result.samples, 0)
        logp, ref_logp = self.learner.logp(batch), self.learner.logp(batch, "reference")
        batch = batch.to(logp.device).replace(ref_logp=ref_logp)
        metrics["eval_kl_ref"] = kl_of(batch, logp)
        by_prompt = log_ratios(batch, logp).reshape(-1, config.evaluate.n).mean(1)
        metrics["eval_kl_ref_se"] = standard_error(by_prompt)
        beta = diagnostic_beta(config, options)
        if beta:
            metrics |= fresh_metrics(batch, logp, beta, options.get("average", "sum"))
        return metrics


class HeldOutLog(Monitor):
    """AUC, and with a β ½ Var(R), within the groups of `data.eval_store`, at the same steps."""

    def __init__(self, phase: Phase, learner: Learner, groups: HeldOutGroups, activity: Activity) -> None:
        self.phase, self.learner, self.groups, self.activity = phase, learner, groups, activity

    def after(self, view: View) -> None:
        if not is_due(view):
            return
        self.activity.stage("evaluating")
        beta = diagnostic_beta(self.phase.config, view.options)
        view.metrics |= self.groups.measure(self.learner, beta, view.options.get("average", "sum"))


def is_due(view: View) -> bool:
    """Whether held-out data are measured at this step."""
    every = view.phase.config.evaluate.every
    return view.step == 0 or view.last or bool(every and view.at % every == 0)
