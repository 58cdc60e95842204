"""Warnings about the metrics of steps, each once per phase."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean, median, stdev
from typing import Any, get_args

from agro.objectives import get
from agro.train.diagnostics import DWARFED, dwarfed, toward_reference
from agro.train.monitors.base import Monitor, View
from agro.train.notes import warn_of_metrics

WINDOW = 20  # steps


class Warnings(Monitor):
    """Warns where the metrics show that something is wrong with the settings, and names the way out."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.given: set[str] = set()
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.best: deque[float] = deque(maxlen=WINDOW)  # log-ratios of the best stored responses
        self.limits: deque[float] = deque(maxlen=WINDOW)  # the KL of the best stored responses

    def after(self, view: View) -> None:
        self._of_method(view)
        self._of_spread(view)
        self._of_clip(view)
        self._of_best(view)
        self._of_kl(view)

    def _of_method(self, view: View) -> None:
        found = view.metrics["objective"]
        if found is not None:
            self._warn("method", view, warn_of_metrics(found, view.phase.config.objective.name, view.options))

    def _of_spread(self, view: View) -> None:
        """Not where the method warns of its β itself, nor where the rewards of most groups are equal."""
        metrics, name = view.metrics, view.phase.config.objective.name
        entry = get(name)
        of_options = entry.warnings.of_options(entry.defaults() | view.options)
        if "method" in self.given or of_options is not None:
            return
        mostly_equal = 2 * (metrics["groups_equal"] or 0) > (metrics["groups"] or 0)
        if (metrics["kl_to_reward_spread"] or 0) > DWARFED and not mostly_equal:
            text = dwarfed(metrics["kl_to_reward_spread"], name, view.options, metrics["length_mean"])
            self._warn("spread", view, text)

    def _of_clip(self, view: View) -> None:
        norm, clip = view.metrics["grad_norm"], view.phase.config.train.clip
        if norm is None:
            return
        self.norms.append(norm)
        if len(self.norms) == WINDOW and min(self.norms) > clip:
            text = (
                f"note: each of the last {WINDOW} gradients was clipped (median norm "
                f"{median(self.norms):.3g}, train.clip = {clip:g}). All have the same norm then, and "
                "train.lr alone decides how far a step goes. That is no error; a larger train.clip lets the "
                "gradients differ"
            )
            self._warn("clip", view, text)

    def _of_best(self, view: View) -> None:
        known = view.metrics["log_ratio_best"]
        if known is None:
            return
        self.best.append(known)
        if len(self.best) < WINDOW:
            return
        mean, error = fmean(self.best), stdev(self.best) / math.sqrt(WINDOW)
        if mean + 2 * error < 0:
            text = (
                f"over the last {WINDOW} steps log π/π_ref of the best stored responses is {mean:.3g} on "
                "average: the policy moves away from them. That is right only where even the best ones are "
                f"poor. What to do otherwise: {_way_out(view)}"
            )
            self._warn("best", view, text)

    def _of_kl(self, view: View) -> None:
        """Only in a step on others' samples: those of the run are better than the reference's. Not where the
        rewards aren't used: to imitate the store is to leave a reference that writes otherwise."""
        metrics, entry = view.metrics, get(view.phase.config.objective.name)
        if metrics["staleness_mean"] is not None or "reward" not in entry.needed(view.options):
            return
        if metrics["kl_of_best"] is not None:
            self.limits.append(metrics["kl_of_best"])
        limit = metrics["eval_kl_of_best"]
        if limit is None and self.limits:
            limit = fmean(self.limits)
        if metrics["eval_kl_ref"] is None or limit is None or not view.step:
            return
        kl, error = metrics["eval_kl_ref"], metrics["eval_kl_ref_se"]
        if kl - 2 * _known(error) > limit:
            text = (
                f"eval_kl_ref is {kl:.3g} nats per response. If the reference writes as the store does, a "
                f"policy that writes only the best responses has {limit:.3g} (−log of their share), and more "
                f"KL buys nothing that the store shows. What to do: {_way_out(view)}"
            )
            self._warn("KL", view, text)

    def _warn(self, about: str, view: View, text: str | None) -> None:
        if text and about not in self.given:
            self.given.add(about)
            self.say(f"step {view.step}: {text}")


def _known(error: float | None) -> float:
    """A standard error, 0 where there is none."""
    if error is None or math.isnan(error):
        return 0.0
    return error


def _way_out(view: View) -> str:
    """What keeps a policy that trains on stored data from leaving it."""
    if _may_weigh(view.phase.config.objective.name, view.options):
        return 'objective.weight = "reference"'
    return toward_reference(view.metrics["kl_to_reward_spread"])


def _may_weigh(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the objective could weigh responses by min(1, π/π_ref), and doesn't."""
    entry = get(name)
    option = entry.options.model_fields.get("weight")
    if option is None or "reference" not in get_args(option.annotation):
        return False
    return bool((entry.defaults() | dict(options))["weight"] != "reference")
