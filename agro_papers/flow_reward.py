"""A source whose fresh responses get token rewards of a flow, fitted while training.

RLFR (arXiv 2510.10201) as its paper has it: the flow of `agro_papers.flow` is fitted anew every so often to
the hidden states of trusted responses, which change as the policy learns. A response has its token rewards
from the moment that it is in the store. Before the first fit, while no response is trusted, it has none.

The last fit and the ids of the newest responses are in checkpoints, as the state of a monitor.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agro.config import Count, Section, Share, field
from agro.objectives.needs import REWARD_PARTS
from agro.rollout import CollectResult, Rollout
from agro.train.around import Context, SourceWrapper
from agro.train.learner import Learner
from agro.train.monitors import Monitor
from agro.train.phases import derive
from agro.train.source import FillRequest, Source
from agro.train.stored_tensors import from_text, to_text
from agro.types import Sample
from agro_papers.flow import ROWS, FlowReward


class FlowOptions(Section):
    """Token rewards by a flow that is fitted while training, to trusted responses (RLFR, arXiv 2510.10201):
    the newest of the run with a reward of `min_reward`, and those of role "expert" in the store."""

    min_reward: float
    """of a response that is trusted"""
    coef: float = field(0.01, ge=0)
    """reward of a token at most, up or down; it is added to that of the response"""
    threshold: Share = 0.0
    """smaller deviations, in shares of the largest of a response, become 0"""
    every: Count = 20
    """optimizer steps from one fit to the next, each of which begins anew"""
    newest: Count = 256
    """of the run's own responses that may be trusted, and of the experts'"""
    steps: Count = 500
    """updates of a fit, of 256 tokens each"""
    layer: int = -1
    """whose hidden states it reads; negative numbers count from the last layer"""


class FlowRollout(Rollout):
    """Samples as another rollout does, with token rewards where there is a flow."""

    flow: FlowReward | None = None

    def __init__(self, rollout: Rollout, config: FlowOptions) -> None:
        super().__init__(rollout.encoder, rollout.engine, source=rollout.source)
        self.config = config

    def sample(self, *args: Any, **kwargs: Any) -> Iterator[Sample]:
        """See `Rollout.sample`; as many responses at once as the flow reads at once."""
        sampled, flow, config = super().sample(*args, **kwargs), self.flow, self.config
        if flow is None:
            yield from sampled
            return
        while some := list(itertools.islice(sampled, ROWS)):
            yield from flow.reward(some, coef=config.coef, threshold=config.threshold)


class FlowSource(Monitor):
    """Samples in this process, step by step, and fits the flow that rewards tokens."""

    name = "flow"

    def __init__(self, source: Source, context: Context, options: FlowOptions) -> None:
        self.flow, self.policy = options, context.policy
        self.rollout = FlowRollout(context.inline.rollout, options)
        self.sampler = replace(context.inline, rollout=self.rollout)
        self.fitted = -1  # the version of the weights at the last fit
        self.newest: list[int] = []  # ids

    def publish(self, learner: Learner) -> None:
        """Fit the flow to what is trusted, where the last fit is `every` optimizer steps old: the
        run's newest responses with a reward of `min_reward`, and experts' of the store."""
        self.sampler.publish(learner)
        if self.fitted >= 0 and learner.version - self.fitted < self.flow.every:
            return
        store, options = self.sampler.store, self.flow
        own = store.samples(ids=self.newest, skip_damaged=True)
        experts = store.samples(roles=("expert",), skip_damaged=True)
        trusted = [s for s in own if s.reward is not None and s.reward >= options.min_reward]
        trusted += itertools.islice(experts, options.newest)
        if trusted:
            seed = derive(self.sampler.config.train.seed, "flow", learner.version)
            sizes = {"layer": options.layer, "steps": options.steps}
            self.rollout.flow = FlowReward.fit(self.policy, trusted, **sizes, seed=seed)
            self.fitted = learner.version

    def fill(self, wanted: FillRequest) -> CollectResult:
        filled = self.sampler.fill(wanted)
        self.newest = [*self.newest, *filled.ids][-self.flow.newest :]
        auc = None
        if self.rollout.flow is not None:
            samples = list(self.sampler.store.samples(ids=filled.ids, skip_damaged=True))
            auc = ranking(samples, [float(np.nanmean(s)) for s in self.rollout.flow.scores(samples)])
        return replace(filled, measured={**filled.measured, "learned_auc": auc})

    def state(self) -> Any:
        flow = None if self.rollout.flow is None else to_text(self.rollout.flow.flow.state_dict())
        return {"fitted": self.fitted, "newest": self.newest, "tensors": flow}

    def restore(self, state: Any) -> None:
        self.fitted, self.newest = state["fitted"], state["newest"]
        if state["tensors"] is not None:
            tensors = from_text(state["tensors"])
            self.rollout.flow = FlowReward.load(self.policy, self.flow.layer, tensors)


def ranking(samples: Sequence[Sample], errors: Sequence[float]) -> float | None:
    """How often, of two responses to one prompt with unequal rewards, the better one has the smaller error.

    Equal errors count as ½. None where there are no such two. Token rewards are scaled within a response, so
    that their sums say nothing of this.
    """
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample, error in zip(samples, errors, strict=True):
        if sample.reward is not None:
            groups[sample.prompt_id].append((sample.reward, error))
    wins = [
        float(np.sign(high[1] - low[1]) * np.sign(low[0] - high[0])) / 2 + 0.5
        for group in groups.values()
        for low, high in itertools.combinations(group, 2)
        if low[0] != high[0]
    ]
    return float(np.mean(wins)) if wins else None


FLOW_REWARD = SourceWrapper(
    FlowSource,
    FlowOptions,
    needs=frozenset(("samples_current_weights", "shares_engine", "complete_policy", "single_turns")),
    can=lambda inner, options: inner,
    problems=lambda phase, options: {
        "adds rewards of tokens, which the advantage of gdpo would lose": REWARD_PARTS in phase.needs
    },
)
