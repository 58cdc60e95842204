"""The trainer of `agro train` and `agro.Trainer`: a run, and what people read of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from agro.config import TrainConfig
from agro.io.files import writing
from agro.pages.run import report
from agro.runs.card import push, write_cards
from agro.runs.problems import problems
from agro.runs.rundata import Outcome, RunData, load_run
from agro.runs.side_by_side import SideBySide, short_text
from agro.runs.verdict import Verdict
from agro.store import Store
from agro.store.location import exists
from agro.train.monitors.warnings import notes
from agro.train.process_group import rank
from agro.train.trainer import BaseTrainer

SHOWN, LONGEST = 2, 160  # prompts on the terminal, and characters of a text


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


def present(folder: Path, train: TrainConfig, say: Callable[[str], None]) -> bool:
    """What was wrong, where the run was best, page, cards and upload.

    A page that fails doesn't keep back the others; then its error is raised. Returns whether the run ended
    well: without a problem that is more important than its numbers.
    """
    failure: Exception | None = None
    ended_well = True
    with writing(folder):
        try:
            ended_well = summarize(load_run(folder), say)
            report(folder)
        except Exception as error:  # noqa: BLE001
            failure = error
        write_cards(folder)
        address = push(folder / "model", train)
        if address:
            say(f"uploaded to {address}")
        if failure is not None:
            say(f"only the report failed; try again with: agro report {folder}")
            raise failure
    return ended_well


def summarize(run: RunData, say: Callable[[str], None]) -> bool:
    """The problems, whether the model got better, and the best measurement.

    Returns whether no problem contradicts the measurement.
    """
    report, outcome = problems(run), Outcome.of(run)
    for problem in report:
        say(f"problem: {problem.text}" + (f". {problem.detail}" if problem.detail else ""))
    ended_well = not any(problem.serious for problem in report)
    say(Verdict.of(run).sentence)
    shown = SideBySide.load(run.folder)
    if shown is not None:
        say("\n".join([shown.about, *short_text(shown, SHOWN, LONGEST)]))
    if outcome is not None:
        say(outcome.text if ended_well else f"measured all the same: {outcome.text}")
    return ended_well
