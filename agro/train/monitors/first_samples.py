"""Whether a sampler's log-probs are those of the distribution that it says it samples from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agro import config
from agro.train.collate import staleness
from agro.train.feed import draws_from
from agro.train.learner import Learner
from agro.train.monitors.base import GO, Action, Monitor, View
from agro.train.monitors.guard import ADVICE
from agro.types import Sample

TRUNCATION = ("top_k", "top_p", "min_p")
COMPARED = 64  # responses
OUTSIDE = 0.01  # share of tokens that the truncation of the trainer may exclude, by rounding at its edge


class FirstSamples(Monitor):
    """Compares the first `COMPARED` fresh responses with the trainer, at the sampler's own settings.

    For samplers at another temperature than the policy's, or with truncation, whose log-probs
    `SamplerMismatch` can't compare: at temperature .5 raw log-probs are 2 nats a token off.
    """

    def __init__(self, rule: config.GuardConfig, temperature: float, learner: Learner) -> None:
        self.rule, self.temperature, self.learner = rule, temperature, learner
        self.compared = 0
        self.fresh: list[Sample] = []

    def receive(self, samples: Sequence[Sample]) -> None:
        fresh = [s for s in samples if self._is_comparable(s)]
        self.fresh = fresh[: COMPARED - self.compared]

    def judge(self, view: View) -> Action:
        if not self.rule.logp_diff or not self.fresh:
            return GO
        off = np.concatenate([self._differences(sample) for sample in self.fresh])
        self.compared += len(self.fresh)
        outside = float(np.isinf(off).mean())
        mean = float(np.ma.masked_invalid(off).mean()) if outside < 1 else np.inf
        if mean <= self.rule.logp_diff and outside <= OUTSIDE:
            return GO
        return Action(
            "stop",
            f"expected the sampler's log-probs of {len(self.fresh)} fresh responses to be the trainer's at "
            f"the sampler's settings, got a difference of {mean:.3g} nats a token, above guard.logp_diff = "
            f"{self.rule.logp_diff:g}, and {outside:.1%} of the tokens outside of its truncation. {ADVICE}",
        )

    def _is_comparable(self, sample: Sample) -> bool:
        if staleness(sample, self.learner.version) != 0 or sample.behavior_logp is None:
            return False
        if sample.sampling is None or not sample.sampling.get("temperature"):  # greedy: a point mass
            return False
        if draws_from(sample, self.temperature, over_kept=False):  # which `SamplerMismatch` compares
            return False
        temperature = sample.sampling["temperature"]
        untruncated = sample.replace(
            sampling={k: v for k, v in sample.sampling.items() if k not in TRUNCATION}
        )
        return draws_from(untruncated, temperature, over_kept=False)

    def _differences(self, sample: Sample) -> np.ndarray:
        assert sample.behavior_logp is not None
        off = np.abs(self.learner.logp_as_sampled(sample) - sample.behavior_logp[sample.action])
        known: np.ndarray = off[~np.isnan(off)]
        return known
