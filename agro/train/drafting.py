"""A source that trains the draft model of its engine on what the policy writes (`sampler.draft_every`).

On-policy distillation: maximum likelihood of the policy's own responses moves the draft towards the policy,
as KL(π ‖ q) is their mean −log q, less the entropy of π. So the draft follows the policy, and more of what it
proposes is accepted. Responses don't depend on it (`agro.rollout.engines.drafted`).

The architecture of Mixture of Attentions (arXiv 2410.03804) isn't here: the draft is a causal language model,
trained on-policy as theirs is. Its weights and its optimizer are in RUN/weights/draft until no checkpoint
needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agro.io.files import complete_folder
from agro.objectives import get
from agro.rollout import CollectResult
from agro.runs.folder import Run
from agro.train.collate import collate
from agro.train.lagging import Copies
from agro.train.learner import Learner, Local
from agro.train.monitors import Monitor
from agro.train.source import FillRequest, InlineSource

NEWEST = 256  # responses that the draft is trained on at once, at most
UPDATES = 4  # of these
OPTIONS = get("sft").resolve("sft", {})


class DraftSource(Monitor):
    """Samples in this process, and trains the draft model of the engine."""

    name = "draft"

    def __init__(self, sampler: InlineSource, folder: Run, say: Callable[[str], None]) -> None:
        config, engine = sampler.config, sampler.rollout.engine
        assert config.sampler.draft is not None
        from agro.rollout.engines.hf import HF

        assert isinstance(engine, HF), "settings of a draft are refused for other engines"
        self.sampler, self.config = sampler, config
        self.learner = Local(engine.draft(config.sampler.draft), None, say)
        self.copies = Copies(folder, sampler.store, "draft")
        self.newest: list[int] = []  # ids of what was sampled since the draft was trained
        self.trained = -1  # the version of the policy when it was
        changes = {"lr": config.sampler.draft_lr, "weights_average": None, "offload": ()}
        train = config.train.model_copy(update=changes)
        self.settings = config.model_copy(update={"train": train})
        self.learner.enter(self.settings, began=None, resumed=None)

    def publish(self, learner: Learner) -> None:
        self.sampler.publish(learner)
        every = self.config.sampler.draft_every
        assert every is not None
        if self.newest and learner.version - max(0, self.trained) >= every:
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
        samples = list(self.sampler.store.samples(ids=self.newest, skip_damaged=True))
        batch = collate(samples, version)
        for _ in range(UPDATES):
            self.learner.gradient(batch, "sft", OPTIONS, self.sampler.activity.check)
            self.learner.move(self.config.sampler.draft_lr)
        self.learner.policy.zero_grad()
        self.trained, self.newest = version, []
        self.copies.until(version)
        with complete_folder(self.copies.folder(version)) as folder:
            self.learner.save(folder)
        self.copies.prune(version)
