"""The trainer of `agro train` and `agro.Trainer`: it runs, forecasts a run, and reports its result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from agro.api.plan import Machine, plan, time_line
from agro.config import TrainConfig
from agro.io.files import writing
from agro.models.pretrained import LARGE, parameters
from agro.pages.run import report
from agro.pages.run.card import push, write_cards
from agro.pages.run.verdict import Verdict
from agro.runs.problems import problems
from agro.runs.rundata import Outcome, RunData, load_run
from agro.runs.side_by_side import SideBySide, short_text
from agro.store import Store
from agro.store.location import exists
from agro.train.process_group import rank, world_size
from agro.train.trainer import BaseTrainer, notes

SHOWN, LONGEST = 2, 160  # prompts shown on the terminal, and characters of each text


class Trainer(BaseTrainer):
    """Train by `config` in the run folder `out`, and write the page and the cards; see `BaseTrainer`."""

    forecasts = True  # whether to measure and report the time of a large model's run before its first step

    def run(self) -> Path:
        """Run to the end and return the run folder. Raises `Refused` before any compute for invalid data."""
        folder = super().run()
        if rank() == 0:
            self.ended_well = present(self.out, self.config.train, self.activity.say)
        return folder

    def plan(self) -> dict[str, Any]:
        """Forecast `run`: load and check everything, and write nothing; see `agro.api.plan`."""
        with self.loaded() as machine:
            report = plan(self.config, machine)
            return {**report, "notes": [*self.notes, *notes(machine.policy, self.prompts, self.config)]}

    @contextmanager
    def loaded(self) -> Iterator[Machine]:
        """Yield the loaded run for a plan to measure, checked as for training."""
        print("loading, checking and measuring", file=sys.stderr, flush=True)
        self._prepare()
        path = self.location
        if self.reward is not None:
            self.reward.close()
        with Store.open(path, read_only=True) if exists(path) else nullcontext() as store:
            if store is not None:
                store.split.use(self.clusters)
            policy, reference = self._load()
            yield Machine(policy, reference, self.prompts, self.eval_prompts, store)

    def _train(self) -> None:
        """Report the run's time first if its model is so large that the first step may be slow."""
        is_alone = world_size() == 1
        if self.forecasts and not self.resume and is_alone and parameters(self.policy.model) >= LARGE:
            data = (self.prompts, self.eval_prompts, self.store)
            self.activity.say(time_line(plan(self.config, Machine(self.policy, self.reference, *data))))
        super()._train()


def present(folder: Path, train: TrainConfig, say: Callable[[str], None]) -> bool:
    """Report problems and the best step, write the page and the cards, and upload the model.

    If the page fails, the others follow and then its error is raised. Returns whether the run ended well:
    without a problem that makes its numbers meaningless.
    """
    ended_well, failure = False, None
    with writing(folder):
        try:
            ended_well = summarize(load_run(folder), say)
            report(folder)
        except Exception as error:  # noqa: BLE001 cards and upload follow, then it is raised
            failure = error
        write_cards(folder)
        address = push(folder / "model", train)
        if address:
            say(f"uploaded to {address}")
        if failure is not None:
            say(f"the report failed, the model is complete; try again with: agro report {folder}")
            raise failure
    return ended_well


def summarize(run: RunData, say: Callable[[str], None]) -> bool:
    """Report the problems, whether the model improved, and the best measurement.

    Returns whether no problem contradicts the measurement.
    """
    report, outcome, shown = problems(run), Outcome.of(run), SideBySide.of(run.folder, run.config)
    for problem in report:
        say(f"problem: {problem.text}" + (f". {problem.detail}" if problem.detail else ""))
    ended_well = not any(problem.serious for problem in report)
    say(Verdict.of(run).sentence)
    if shown is not None:
        say("\n".join([shown.about, *short_text(shown, SHOWN, LONGEST)]))
    if outcome is not None:
        say(outcome.text if ended_well else f"measured nevertheless: {outcome.text}")
    return ended_well
