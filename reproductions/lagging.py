"""A trainer whose fresh samples are some updates old."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.models.policy import Policy
from agro.rollout.rollout import Rollout, embedded
from agro.train.learner import Learner
from agro.train.phases import Phase, Position
from agro.train.source import InlineSource, Source


class Lagging(Trainer):
    """`lag`: samples are made with the weights of so many updates ago, at first with those of the start."""

    def __init__(self, config: RunConfig, out: Path, lag: int = 0, resume: bool = False) -> None:
        super().__init__(config, out, resume=resume)
        self.lag = lag

    def _source(self, phase: Phase, position: Position, learner: Learner) -> Source:
        inline = super()._source(phase, position, learner)
        if not self.lag:
            return inline
        assert isinstance(inline, InlineSource)
        return Late(inline, Policy.load(self.config.policy), self.lag)


class Late:
    """Samples with weights of `lag` updates ago.

    No setting of a run does this: `source.sync_every = lag` is 0 to `lag` − 1 updates behind, and with
    `source.kind = "elsewhere"` the staleness depends on the machine, and `data.max_age` is its limit.
    """

    def __init__(self, inline: InlineSource, policy: Policy, lag: int) -> None:
        """`policy`: a copy, whose weights become the earlier ones."""
        self.engine = embedded(policy, version=0)
        rollout = Rollout(policy.encoder, self.engine)
        self.inline = replace(inline, rollout=rollout)
        self.fill = self.inline.fill
        self.policy, self.lag = policy, lag
        self.earlier: deque[tuple[int, dict[str, Tensor]]] = deque()

    @torch.no_grad()
    def publish(self, learner: Learner) -> None:
        if self.earlier and self.earlier[-1][0] == learner.version:
            return
        weights = learner.policy.weights()  # type: ignore[attr-defined]
        now = {name: value.detach().clone() for name, value in weights.items()}
        self.earlier.append((learner.version, now))
        if len(self.earlier) > self.lag + 1:
            self.earlier.popleft()
        version, weights = self.earlier[0]
        for name, value in self.policy.weights().items():
            value.copy_(weights[name])
        self.engine.version = version
