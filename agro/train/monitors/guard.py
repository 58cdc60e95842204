"""Guards against steps that explode, and monitors that select the best model and warn.

A step explodes if |loss| is above `guard.loss` times the median |loss| of the last `guard.window` steps, or
if kl_ref is above `guard.kl`. Both are measured before the weights move. The median needs `MIN_STEPS` steps.
A median of 0, which is common if rewards are rare, is ignored. The actions:

- "skip": the update is skipped; train.max_skipped in a row stop the run.
- "stop": the run ends as refused, with a checkpoint of the previous step.
- "rollback": weights and optimizer return to the last checkpoint, and the learning rate is halved from then
  on; the order of the data continues. After `guard.rollbacks` rollbacks the next one stops the run.

An update whose gradient isn't finite is skipped under any rule. The guard also stops a run whose sampler and
trainer have different log-probs. Another monitor follows a held-out metric to save the best model and to end
the run. Two others warn: about metrics, once per topic and phase, and about steps from which nothing can be
learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from agro import config
from agro.errors import Refused
from agro.objectives.needs import REWARD, grouping
from agro.runs.problems import DWARFED, PATIENCE, WINDOW, phase_problems, toward_reference, way_out
from agro.train.collate import staleness
from agro.train.feed import draws_from
from agro.train.learner import Learner
from agro.train.monitors import GO, Action, Monitor, View
from agro.train.phases import Phase
from agro.types import Sample

MIN_STEPS = 5
TRUNCATION = ("top_k", "top_p", "min_p")
COMPARED = 64  # number of responses
OUTSIDE = 0.01  # share of tokens that the trainer's truncation may exclude, by rounding at its edge
ADVICE = (
    "What to check: whether the server reports log-probs of its sampling distribution, not raw ones (vLLM: "
    "--logprobs-mode processed_logprobs); whether new weights arrive there (also a tied output layer's); "
    "whether both have the same model, tokenizer and chat template, temperature, top-p and min-p, and dtype. "
    "If they differ on purpose: raise guard.logp_diff, or set 0 for no limit"
)


class Guard(Monitor):
    """Judges by |loss| and kl_ref, and by the log-probs of fresh responses. Its state covers one phase.

    At staleness 0 trainer and sampler have the same weights, so log π equals log μ up to rounding (a mean of
    about 1e-6 nats per token in float32, .01 in bfloat16). A larger difference means a mistake in the setup:
    training would continue on another policy's responses.

    `logp_diff_fresh` excludes samplers with truncation or another temperature than the policy's: at
    temperature .5 raw log-probs are 2 nats per token off. For these, the guard compares the first `COMPARED`
    fresh responses at the sampler's own settings.
    """

    name = "guard"

    def __init__(
        self, rule: config.GuardConfig, phase: str, learner: Learner | None = None, temperature: float = 1.0
    ) -> None:
        """`learner`: None if the sampler shares its weights. `temperature`: the policy's."""
        self.rule, self.phase, self.learner, self.temperature = rule, phase, learner, temperature
        self.losses: tuple[float, ...] = ()  # |loss| of recent steps, the latest last
        self.rollbacks = 0
        self.compared = 0
        self.fresh: list[Sample] = []  # to compare

    def receive(self, samples: Sequence[Sample]) -> None:
        self.fresh = [s for s in samples if self._is_comparable(s)][: COMPARED - self.compared]

    def judge(self, view: View) -> Action:
        rule, loss = self.rule, view.metrics["loss"]
        mismatch = self._mismatch(view.metrics["logp_diff_fresh"])
        if mismatch:
            return Action("stop", f"{mismatch}. {ADVICE}")
        reason = self._explosion(loss, view.metrics["kl_ref"])
        if not reason:
            self.losses = () if rule.loss is None else (*self.losses, abs(loss))[-rule.window :]
            return GO
        if rule.action == "skip":
            return Action("skip", reason)
        if rule.action == "rollback" and self.rollbacks < rule.rollbacks:
            self.losses = ()
            self.rollbacks += 1
            return Action("roll back", reason)
        way = "a lower train.lr"
        if "guard.kl" in reason:  # a larger β keeps a KL low, but it raises a loss such as ½ Var(R)
            way = toward_reference(view.metrics["kl_to_reward_spread"])
        return Action(
            "stop",
            f"{reason}. What to do: inspect the samples (agro store show), then start a new run with {way}, "
            "or raise the guard's limit",
        )

    def _mismatch(self, off_fresh: float | None) -> str:
        """Describe how trainer and sampler differ on fresh responses, or "". `off_fresh`: logp_diff_fresh."""
        limit = self.rule.logp_diff
        if limit and off_fresh is not None and off_fresh > limit:
            return (
                "expected equal log-probs of sampler and trainer on fresh responses (staleness 0), got "
                f"logp_diff_fresh = {off_fresh:.3g} nats per token, above guard.logp_diff = {limit:g}"
            )
        if not limit or not self.fresh or self.learner is None:
            return ""
        logp = np.concatenate([self.learner.logp_as_sampled(sample) for sample in self.fresh])
        recorded = [s.behavior_logp[s.action] for s in self.fresh if s.behavior_logp is not None]
        off = np.abs(logp - np.concatenate(recorded))
        off = off[~np.isnan(off)]
        self.compared += len(self.fresh)
        outside = float(np.isinf(off).mean())
        mean = float(np.ma.masked_invalid(off).mean()) if outside < 1 else np.inf
        if mean <= limit and outside <= OUTSIDE:
            return ""
        return (
            f"expected equal log-probs of sampler and trainer on {len(self.fresh)} fresh responses at the "
            f"sampler's settings, got a difference of {mean:.3g} nats per token (guard.logp_diff = "
            f"{limit:g}) and {outside:.1%} of the tokens outside its truncation (at most {OUTSIDE:.0%})"
        )

    def _is_comparable(self, sample: Sample) -> bool:
        if self.learner is None or staleness(sample, self.learner.version) != 0:
            return False
        if sample.behavior_logp is None or sample.sampling is None:
            return False
        # Not a greedy response, whose distribution is a point mass, nor one that `logp_diff_fresh` compares.
        temperature = sample.sampling.get("temperature")
        if not temperature or draws_from(sample, self.temperature, over_kept=False):
            return False
        settings = {k: v for k, v in sample.sampling.items() if k not in TRUNCATION}
        return draws_from(sample.replace(sampling=settings), temperature, over_kept=False)

    def _explosion(self, loss: float, kl: float | None) -> str:
        """Why the step explodes, or "". `kl` None: not measured."""
        rule, usual = self.rule, median(self.losses) if len(self.losses) >= MIN_STEPS else 0.0
        if rule.loss is not None and usual and abs(loss) > rule.loss * usual:
            return (
                f"|loss| is {abs(loss):.4g}, above guard.loss = {rule.loss:g} times its median of {usual:.4g}"
            )
        if rule.kl is not None and kl is not None and kl > rule.kl:
            return f"kl_ref is {kl:.4g} nats per response, above guard.kl = {rule.kl:g}"
        return ""

    def state(self) -> dict[str, Any]:
        return {"phase": self.phase, "losses": self.losses, "rollbacks": self.rollbacks}

    def restore(self, state: dict[str, Any]) -> None:
        self.rollbacks = state["rollbacks"]
        if state["phase"] == self.phase:
            self.losses = tuple(state["losses"])


@dataclass(eq=False)
class Best(Monitor):
    """Saves the best model by the held-out metric that the phase follows, see `RunConfig.followed`.

    Stops the run if the metric stops improving, or if the KL to the reference reaches `evaluate.target_kl`.
    It runs after the monitors that measure.
    """

    name = "best"

    keep: Callable[[str, Mapping[str, Any]], None]
    """Saves the current model, given the name of the metric and the step's metrics."""
    value: float | None = None  # the best value
    step: int = -1  # its step
    waited: int = 0  # number of evaluations since then

    def after(self, view: View) -> None:
        rule, name, reasons = view.phase.config.evaluate, view.phase.config.followed, []
        value = view.metrics.get(name) if name is not None else None
        if name is not None and value is not None and not math.isnan(value):
            self.waited += 1
            is_repeated = view.step == self.step  # step 0 is measured again if a run resumes from it
            if is_repeated or self.value is None or value > self.value:
                self.value, self.step, self.waited = value, view.step, 0
                if rule.keep_best:
                    self.keep(name, {**view.metrics, "step": view.step})
            if rule.patience and self.waited >= rule.patience:
                best = f"{name} = {self.value:.4f} of step {self.step}"
                reasons.append(f"{self.waited} evaluations in a row didn't exceed {best}")
        elif view.step == 0 and name == "eval_auc" and (rule.keep_best or rule.patience):
            # A reward may become known at a later step; stored groups don't change.
            raise Refused(
                "evaluate.keep_best and evaluate.patience follow eval_auc, which can't be measured on these "
                "held-out groups: it needs responses of different rewards in a group. What to do: hold out "
                "more groups (data.hold_out, data.eval_store)"
            )
        kl = view.metrics["eval_kl_ref"]
        if rule.target_kl is not None and kl is not None and kl >= rule.target_kl:
            reasons.append(
                f"eval_kl_ref is {kl:.4g} nats per response, evaluate.target_kl {rule.target_kl:g}"
            )
        view.stop = "; ".join(reasons) or view.stop

    def state(self) -> dict[str, Any] | None:
        if self.step < 0:
            return None
        return {"value": self.value, "step": self.step, "waited": self.waited}

    def restore(self, state: dict[str, Any]) -> None:
        self.value, self.step, self.waited = state["value"], state["step"], state["waited"]


REPEAT_EVERY = 100  # consecutive steps after which a warning is repeated


class Signal(Monitor):
    """Warns about consecutive steps without a signal (`no_signal`) and about an unmet share of replay."""

    def __init__(self, phase: Phase, say: Callable[[str], None]) -> None:
        self.phase, self.say = phase, say
        self.uses_rewards = REWARD in phase.needs
        self.compares_groups = self.uses_rewards and grouping(phase.needs) is not None
        self.in_a_row = 0
        self.missed_in_a_row = 0

    def after(self, view: View) -> None:
        if not view.step:
            return
        reason, missing = self._why(view.metrics), view.metrics["replay_missing"] or 0
        view.metrics["no_signal"] = reason
        self.in_a_row = self.in_a_row + 1 if reason else 0
        self.missed_in_a_row = self.missed_in_a_row + 1 if missing else 0
        if reason and self._is_time(self.in_a_row):
            mean, groups = view.metrics["reward_mean"], view.metrics["groups"]
            mean_reward = "" if mean is None else f" (mean reward {mean:.3g})"
            if reason == "all rewards are equal":
                mean_reward = f" (each is {mean:.6g}, in {groups} groups)"
            self.say(
                f"step {view.step}: nothing can be learned, {self.in_a_row} steps in a row: "
                f"{reason}{mean_reward}. What to do: {way_out(reason, self.phase.config.data)}"
            )
        if missing and self._is_time(self.missed_in_a_row):
            data, requested = self.phase.config.data, self.phase.stored_groups(view.at - 1)
            keys = ("roles", "sources", "min_reward", "max_age", "max_uses", "best_of_group", "spread")
            limits = {key: getattr(data, key) for key in keys}
            choice = [f"data.{key} = {x}" for key, x in limits.items() if x is not None and x is not False]
            way = "a lower data.replay, or more prompts: a step draws each group of the store once"
            if choice:
                way = f"check the choice by {', '.join(choice)}, or lower data.replay"
            self.say(
                f"step {view.step}: data.replay = {data.replay} requests {requested} groups of the store, "
                f"but again only {requested - missing} could be drawn; the others are sampled. What to do: "
                f"{way}"
            )

    def _is_time(self, in_a_row: int) -> bool:
        patience = min(PATIENCE, self.phase.ends - self.phase.begins)
        return in_a_row == patience or in_a_row % REPEAT_EVERY == 0

    def _why(self, metrics: Mapping[str, Any]) -> str | None:
        """A key of `WAYS_OUT`; None if something can be learned, or if that is unknown."""
        groups = metrics["groups"]
        if groups == 0:
            return "no valid response"
        is_equal, has_no_gradient = metrics["groups_equal"] == groups, metrics["grad_norm"] == 0
        # An objective of single responses may learn from a reward of 0, such as KTO from a thumb down.
        if self.uses_rewards and (self.compares_groups or has_no_gradient):
            if is_equal and metrics["reward_mean"] == 0 and not metrics["reward_std"]:
                return "all rewards are 0"
            if metrics["reward_std"] == 0:
                return "all rewards are equal"
        if self.compares_groups and is_equal:
            return "equal rewards within groups"
        return "a gradient of 0" if has_no_gradient else None


class Warnings(Monitor):
    """Warns if the metrics show a problem with the settings, and names the way out."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.topics: set[str] = set()  # warned about already
        self.rows: list[dict[str, Any]] = []  # the metrics of the phase's first step and its latest ones

    def after(self, view: View) -> None:
        metrics, entry, config = view.metrics, view.phase.entry, view.phase.config
        options = entry.defaults() | view.options
        if metrics["objective"] is not None:
            self._warn("method", view.step, entry.warnings.metrics_warning(metrics["objective"], options))
        # Check the spread of βρ, unless the method warns about its β or most groups have equal rewards.
        warns_itself = "method" in self.topics or entry.warnings.options_warning(options) is not None
        mostly_equal = 2 * (metrics["groups_equal"] or 0) > (metrics["groups"] or 0)
        ratio, length = metrics["kl_to_reward_spread"] or 0.0, metrics["length_mean"]
        if not warns_itself and not mostly_equal and ratio > DWARFED:
            way = "a smaller objective.beta"
            if entry.averages(view.options) == "sum":
                way += f" (about 1/length, {1 / length:.2g}, if rewards go from 0 to 1)"
                if "average" in entry.options.model_fields:
                    way += ', or objective.average = "token"'
            beta = f"β = {view.options['beta']:.3g}, responses of {length:.0f} tokens"
            text = (
                f"within groups the spread of βρ is {ratio:.3g} times that of the rewards (1 at the optimum),"
                f" so updates mainly follow the log-ratios: {beta}. What to do: {way}"
            )
            self._warn("spread", view.step, text)
        # Report what the run's page would report if the phase ended here.
        self.rows.append(metrics)
        limit = config.train.warmup + config.evaluate.every + 2 * WINDOW  # rows that `phase_problems` reads
        if len(self.rows) > limit:
            del self.rows[1]
        if view.was_evaluated or view.at % WINDOW == 0:
            for problem in phase_problems(self.rows, config):
                self._warn(problem.title, view.step, problem.detail)

    def _warn(self, topic: str, step: int, text: str | None) -> None:
        if text and topic not in self.topics:
            self.topics.add(topic)
            self.say(f"step {step}: {text}")
