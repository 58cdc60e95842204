"""The trainer of `agro train` and `agro.Trainer`: a run, and what people read of it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from agro.pages.saving import present
from agro.store import Store
from agro.store.location import exists
from agro.train.monitors.warnings import notes
from agro.train.process_group import rank
from agro.train.trainer import BaseTrainer


class Trainer(BaseTrainer):
    """Train as `config` says, in the run folder `out`, and write page and cards; see `BaseTrainer`."""

    def run(self) -> Path:
        """Run to the end and return the run folder. Raises `Refused` before any compute for invalid data."""
        folder = super().run()
        if rank() == 0:
            self.present()
        return folder

    def present(self) -> None:
        """Write the page and the cards of a run that has ended, and upload its model where that is set."""
        self.ended_well = present(self.out, self.config.train, self.progress.say)

    def plan(self) -> dict[str, Any]:
        """What `run` would do. All is loaded and checked, nothing is written; see `agro.api.plan.plan`."""
        from agro.api.plan.plan import plan

        def say(text: str) -> None:
            print(text, file=sys.stderr, flush=True)

        say("loading and checking")
        path = self._prepare()
        if self.reward is not None:
            self.reward.close()
        with Store.open(path, read_only=True) if exists(path) else nullcontext() as store:
            policy, reference = self._load()
            report = plan(self.config, policy, reference, self.prompts, self.eval_prompts, store, say)
            return {**report, "notes": [*self.notes, *notes(policy, self.prompts, self.config)]}
