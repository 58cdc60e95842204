"""A source that trains the draft model of speculative decoding on the policy's responses, so that it follows
the policy.

On-policy, as in arXiv 2410.03804. Responses and their log-probs are the policy's, whatever the draft
proposes. The newest trained draft is stored next to the checkpoints.
"""

from __future__ import annotations

from typing import Any

from agro.config import Count, Positive, Section
from agro.io.files import complete_folder
from agro.objectives import get
from agro.rollout import CollectResult
from agro.train.around import Context, SourceWrapper
from agro.train.collate import collate
from agro.train.learner import Learner, Local
from agro.train.monitors import Monitor
from agro.train.source import Copies, FillRequest, Source
from agro_papers.drafted import Drafted

NEWEST = 256  # most responses that the draft is trained on at once
UPDATES = 4  # updates on these
OPTIONS = get("sft").resolve("sft", {})


class DraftOptions(Section):
    """How the draft model is trained."""

    every: Count = 1
    """optimizer steps between trainings of the draft model, on the responses since the last one"""
    lr: Positive = 1e-3
    """learning rate of the draft model"""


class DraftSource(Monitor):
    """Samples in this process, and trains the engine's draft model."""

    name = "draft"

    def __init__(self, source: Source, context: Context, options: DraftOptions) -> None:
        config, engine = context.inline.config, context.inline.rollout.engine
        assert isinstance(engine, Drafted), "other engines are refused"
        self.sampler, self.store, self.options = source, context.store, options
        self.check = context.inline.activity.check
        self.learner = Local(engine.draft, None, context.say)
        self.copies = Copies(context.folder, context.store, "draft")
        self.newest: list[int] = []  # ids of responses sampled since the draft was trained
        self.trained = -1  # the policy's version at that time
        changes = {"lr": options.lr, "weights_average": None, "offload": ()}
        train = config.train.model_copy(update=changes)
        self.settings = config.model_copy(update={"train": train})
        self.learner.enter(self.settings, began=None, resumed=None)

    def publish(self, learner: Learner) -> None:
        self.sampler.publish(learner)
        if self.newest and learner.version - max(0, self.trained) >= self.options.every:
            self._train(learner.version)

    def fill(self, wanted: FillRequest) -> CollectResult:
        filled = self.sampler.fill(wanted)
        self.newest = [*self.newest, *filled.ids][-NEWEST:]
        return filled

    def state(self) -> Any:
        return {"trained": self.trained, "newest": self.newest}

    def restore(self, state: Any) -> None:
        self.trained, self.newest = state["trained"], state["newest"]
        if self.trained >= 0:
            folder = self.copies.folder(self.trained)
            self.learner.load(folder, self.trained)
            self.learner.enter(self.settings, began=None, resumed=folder)

    def _train(self, version: int) -> None:
        samples = list(self.store.samples(ids=self.newest, skip_damaged=True))
        batch = collate(samples, version)
        for _ in range(UPDATES):
            self.learner.gradient(batch, "sft", OPTIONS, self.check)
            self.learner.move(self.options.lr)
        self.learner.policy.zero_grad()
        self.trained, self.newest = version, []
        self.copies.until(version)
        with complete_folder(self.copies.folder(version)) as folder:
            self.learner.save(folder)
        self.copies.prune(version)


TRAINED_DRAFT = SourceWrapper(
    DraftSource,
    DraftOptions,
    needs=frozenset(("samples_current_weights", "shares_engine", "shares_weights", "complete_policy")),
    can=lambda inner, options: inner,
    problems=lambda phase, options: {
        'needs engine.kind = "drafted": there is no draft to train': phase.config.engine.kind != "drafted"
    },
)
