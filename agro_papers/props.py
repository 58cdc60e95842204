"""PROPS: a source whose sampler learns to write what the newest responses lack.

As in arXiv 2311.08290: before each step the sampler φ starts as the policy π and is trained on the newest
responses, whoever wrote them, by the objective `props`, which makes each less probable until its ratio to π
is below 1 − ε. Responses that are too frequent for π lose most. So the responses of several steps together
resemble samples of π more than as many independent ones, and a step may draw all of them (`data.replay`).

Samples record the log-probs of φ. φ is a function of π and of these responses, whose ids are in checkpoints.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from agro.config import Count, Positive, Section, field
from agro.models.reference import duplicate
from agro.objectives import get
from agro.objectives.reduce import Groups
from agro.rollout import CollectResult
from agro.rollout.rollout import embedded
from agro.train.around import Context, SourceWrapper
from agro.train.collate import collate
from agro.train.learner import Learner, Local
from agro.train.monitors import Monitor
from agro.train.source import FillRequest, Source
from agro.types import Batch, Sample


class PropsOptions(Section):
    """How the copy of the policy is trained before each step. It isn't the policy: samples have its
    log-probs."""

    newest: Count = 256
    """number of the run's newest responses that it is trained on"""
    updates: Count = 32
    """most optimizer steps on these"""
    lr: Positive = 1e-3
    """learning rate"""
    clip: float = field(0.3, gt=0, lt=1)
    """ε: a token isn't made less probable than (1 − ε) times its probability under the policy"""
    target_kl: Positive = 0.1
    """distance to the policy at which the updates stop, nats per token; the paper: 0.1 or 0.01. If it is
    small, the sampler hardly compensates for what is missing"""


class PropsSource(Monitor):
    """Samples in this process with a copy of the policy that is trained before each step."""

    name = "props"

    def __init__(self, source: Source, context: Context, options: PropsOptions) -> None:
        current = context.inline  # samples by the policy itself, whose engine monitors use
        config, rollout = current.config, current.rollout
        self.current, self.policy, self.props = current, context.policy, options
        self.proposal = duplicate(context.policy)
        engine = embedded(self.proposal, -1, fused=config.engine.fused)
        adapted = replace(rollout, engine=engine, marks={"adapted": self.name})
        self.adapted = replace(current, rollout=adapted, weights=None)
        self.learner = Local(self.proposal, None, context.say)
        self.newest: list[int] = []  # ids
        self.measured: dict[str, float | None] = {}

    def publish(self, learner: Learner) -> None:
        """Train the sampler again if the policy has moved."""
        self.current.publish(learner)
        engine = self.adapted.rollout.engine
        if engine.version == learner.version:
            return
        live = self.policy.weights()
        with torch.no_grad():
            for name, weight in self.proposal.weights().items():
                weight.copy_(live[name])
        samples = list(self.current.store.samples(ids=self.newest, skip_damaged=True))
        self.measured = {"aggregate_kl": None, "proposal_kl": None}
        if samples:
            batch = collate(samples, learner.version)
            batch = batch.replace(ref_logp=learner.logp(batch))
            aggregate = aggregate_kl(samples, batch)
            self.measured = {"aggregate_kl": aggregate, "proposal_kl": self._train(batch)}
        engine.version = learner.version

    def fill(self, wanted: FillRequest) -> CollectResult:
        filled = self.adapted.fill(wanted)
        self.newest = [*self.newest, *filled.ids][-self.props.newest :]
        return replace(filled, measured={**filled.measured, **self.measured})

    def state(self) -> Any:
        return {"newest": self.newest}

    def restore(self, state: Any) -> None:
        self.newest = state["newest"]

    def _train(self, batch: Batch) -> float:
        """Train the sampler on the batch; return its distance from the policy, in nats per token."""
        config = self.current.config
        changes = {"lr": self.props.lr, "weights_average": None, "offload": (), "optimizer": "adamw"}
        train = config.train.model_copy(update=changes)
        self.learner.enter(config.model_copy(update={"train": train}), began=None, resumed=None)
        options = get("props").resolve("props", {"clip": self.props.clip})
        check = self.current.activity.check
        kl = 0.0
        for _ in range(self.props.updates):
            step = self.learner.gradient(batch, "props", options, check)
            kl = distance(step.streams["logp"], batch)
            if kl > self.props.target_kl:
                break
            self.learner.move(self.props.lr)
        self.proposal.zero_grad()
        return kl


def distance(logp: torch.Tensor, batch: Batch) -> float:
    """Mean over tokens of w − 1 − log w, w = φ/π: KL(π ‖ φ) on samples of π, in nats per token."""
    assert batch.ref_logp is not None
    log_w = (logp - batch.ref_logp.to(logp.device))[batch.mask.to(logp.device)]
    return float((log_w.exp() - 1 - log_w).mean())


def aggregate_kl(samples: Sequence[Sample], batch: Batch) -> float:
    """KL(p̂ ‖ π) of all responses together, in nats: p̂ is a response's share of those to its prompt.

    The mean over responses of log p̂ − log π. For n independent samples of π among K responses it is about
    (K − 1)/2n. If hardly any response occurs twice, it means nothing.
    """
    assert batch.ref_logp is not None
    texts = [(s.prompt_id, tuple(s.tokens.tolist())) for s in samples if s.tokens is not None]
    count, of_prompt = Counter(texts), Counter(prompt for prompt, _ in texts)
    logp_N = Groups.of(batch).sum_tokens(batch.ref_logp)
    differences = [
        math.log(count[text] / of_prompt[text[0]]) - float(logp)
        for text, logp in zip(texts, logp_N, strict=True)
    ]
    return math.fsum(differences) / len(differences)


PROPS = SourceWrapper(
    PropsSource,
    PropsOptions,
    needs=frozenset(("samples_current_weights", "shares_engine", "shares_weights", "complete_policy")),
    can=lambda inner, options: inner - {"samples_current_weights"},
    problems=lambda phase, options: {
        "excludes [policy.lora]: all weights of its copy are trained": phase.config.policy.lora is not None
    },
)
