"""The rule for a step that explodes.

A step explodes when |loss| is above `guard.loss` times the median |loss| of the last `guard.window` steps, or
when kl_ref is above `guard.kl`. Both are measured before the weights move. The median needs `LEAST` steps. A
median of 0, which is common where rewards are rare, is ignored. The actions:

- "skip": the update is skipped; train.max_skipped in a row stop the run.
- "stop": the run ends as refused, with a checkpoint of the step before.
- "rollback": weights and optimizer return to the last checkpoint, and the learning rate is halved from there
  on; the order of the data continues. After `guard.rollbacks` of them the next one stops the run.

A gradient that isn't finite is skipped whatever the rule. The guard also stops a run whose sampler and
trainer have different log-probs. Another monitor follows a held-out metric: which model is saved, and when
the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from agro import config
from agro.errors import Refused
from agro.runs.problems import toward_reference
from agro.runs.rundata import FOLLOWED
from agro.train.collate import staleness
from agro.train.feed import draws_from
from agro.train.learner import Learner
from agro.train.monitors import GO, Action, Monitor, View
from agro.types import Sample

LEAST = 5
TRUNCATION = ("top_k", "top_p", "min_p")
COMPARED = 64  # responses
OUTSIDE = 0.01  # share of tokens that the truncation of the trainer may exclude, by rounding at its edge
ADVICE = (
    "What to look at: whether the server reports log-probs of what it samples from, not raw ones (vLLM: "
    "--logprobs-mode processed_logprobs); whether new weights arrive there (of a tied output layer too); "
    "whether both have the same model, tokenizer and chat template, temperature, top-p and min-p, and dtype. "
    "Where they differ on purpose: raise guard.logp_diff, or 0 for no limit"
)


class Guard(Monitor):
    """Judges by |loss| and kl_ref, and by the log-probs of fresh responses. Its state is that of one phase.

    At staleness 0 trainer and sampler have the same weights, so that log π is log μ up to rounding (a mean of
    about 1e-6 nats a token in float32, .01 in bfloat16). A larger difference is a mistake of the setup, and
    training would go on with responses of another policy.

    `logp_diff_fresh` compares no samplers at another temperature than the policy's, or with truncation: at
    temperature .5 raw log-probs are 2 nats a token off. Of these the first `COMPARED` fresh responses are
    compared at the sampler's own settings.
    """

    name = "guard"

    def __init__(
        self, rule: config.GuardConfig, phase: str, learner: Learner | None = None, temperature: float = 1.0
    ) -> None:
        """`learner`: where the sampler doesn't share its weights, `temperature` being the policy's."""
        self.rule, self.phase, self.learner, self.temperature = rule, phase, learner, temperature
        self.losses: tuple[float, ...] = ()  # |loss| of the last steps, the latest last
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
            f"{reason}. What to do: look at the samples (agro store show), then start a new run with {way}, "
            "or raise the limit of the guard",
        )

    def _mismatch(self, off_fresh: float | None) -> str:
        """How trainer and sampler differ on fresh responses, or "". `off_fresh`: see `logp_differences`."""
        limit = self.rule.logp_diff
        if limit and off_fresh is not None and off_fresh > limit:
            return (
                "expected equal log-probs of sampler and trainer on fresh responses (staleness 0), got "
                f"logp_diff_fresh = {off_fresh:.3g} nats a token, above guard.logp_diff = {limit:g}"
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
            f"expected the sampler's log-probs of {len(self.fresh)} fresh responses to be the trainer's at "
            f"the sampler's settings, got a difference of {mean:.3g} nats a token, above guard.logp_diff = "
            f"{limit:g}, and {outside:.1%} of the tokens outside of its truncation"
        )

    def _is_comparable(self, sample: Sample) -> bool:
        if self.learner is None or staleness(sample, self.learner.version) != 0:
            return False
        if sample.behavior_logp is None or sample.sampling is None:
            return False
        # Not a greedy one, which has a point mass, and none that `logp_diff_fresh` compares.
        temperature = sample.sampling.get("temperature")
        if not temperature or draws_from(sample, self.temperature, over_kept=False):
            return False
        settings = {k: v for k, v in sample.sampling.items() if k not in TRUNCATION}
        return draws_from(sample.replace(sampling=settings), temperature, over_kept=False)

    def _explosion(self, loss: float, kl: float | None) -> str:
        """Why the step explodes, or "". `kl` None: not measured."""
        rule, usual = self.rule, median(self.losses) if len(self.losses) >= LEAST else 0.0
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


class Best(Monitor):
    """Saves the best model by the held-out metric that the phase follows, see `evaluate.metric`.

    Stops the run where the metric stops improving or has reached `evaluate.target`, and where the KL to the
    reference has reached `evaluate.target_kl`. It comes after the monitors that measure.
    """

    name = "best"

    def __init__(self, keep: Callable[[str, Mapping[str, Any]], None]) -> None:
        """`keep` saves the current model, with the name of the metric and the metrics of the step."""
        self.keep = keep
        self.value: float | None = None  # the best one
        self.step = -1  # its step
        self.waited = 0  # evaluations since then

    def after(self, view: View) -> None:
        rule, name, reasons = view.phase.config.evaluate, view.phase.config.followed, []
        value = view.metrics.get(name) if name is not None else None
        decides = rule.keep_best or rule.patience or rule.target is not None
        if name is not None and value is not None and not math.isnan(value):
            sign = -1 if FOLLOWED[name].lower else 1  # times a value: more is better
            self.waited += 1
            is_repeated = view.step == self.step  # step 0 is measured again where a run resumes from it
            if is_repeated or self.value is None or sign * value > sign * self.value:
                self.value, self.step, self.waited = value, view.step, 0
                if rule.keep_best:
                    self.keep(name, {**view.metrics, "step": view.step})
            if rule.target is not None and sign * value >= sign * rule.target:
                reasons.append(f"{name} is {value:.4f}, evaluate.target {rule.target:g}")
            elif rule.patience and self.waited >= rule.patience:
                best = f"{name} = {self.value:.4f}, which step {self.step} had"
                reasons.append(f"{self.waited} evaluations without better than {best}")
        elif view.step == 0 and name not in (None, "eval_reward") and decides:
            # A reward may be known at the next step; what stored groups don't have stays so.
            raise Refused(
                f"evaluate.metric: {name} can't be measured on these held-out groups, but keep_best, "
                "patience or target follow it. eval_auc needs responses of different rewards in a group. "
                "What to do: hold out more groups (data.hold_out, data.eval_store), or another metric"
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
