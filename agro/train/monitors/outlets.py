"""Outputs of a step's metrics: the run folder, trackers, the terminal, and warnings."""

from __future__ import annotations

from agro.runs.folder import Run
from agro.runs.progress import Progress, responses_text
from agro.runs.track import Trackers
from agro.train.diagnostics import DWARFED, dwarfed
from agro.train.monitors.base import Monitor, View
from agro.train.notes import warn_of_metrics


class Warnings(Monitor):
    """Warnings about a step's metrics, each once per phase."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.given: set[str] = set()

    def after(self, view: View) -> None:
        name, metrics = view.phase.config.objective.name, view.metrics
        if (metrics["kl_to_reward_spread"] or 0) > DWARFED:
            text = dwarfed(metrics["kl_to_reward_spread"], name, view.options, metrics["length_mean"])
            self._warn("spread", view, text)
        of_method = None
        if metrics["objective"] is not None:
            of_method = warn_of_metrics(metrics["objective"], name, view.options)
        if of_method:
            self._warn("method", view, of_method)

    def _warn(self, about: str, view: View, text: str) -> None:
        if about not in self.given:
            self.given.add(about)
            self.progress.say(f"step {view.step}: {text}")


class Record(Monitor):
    """metrics.jsonl, and copies of it for other programs."""

    def __init__(self, folder: Run, trackers: Trackers) -> None:
        self.folder, self.trackers = folder, trackers

    def after(self, view: View) -> None:
        if view.is_empty:
            return
        self.folder.log(view.metrics)
        self.trackers.log(view.metrics)


class Terminal(Monitor):
    """A line per step, and responses every `train.show_every` steps."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def after(self, view: View) -> None:
        if view.is_empty:
            return
        self.progress.step(view.metrics)
        every = view.phase.config.train.show_every
        if every and view.step and view.at % every == 0 and view.samples:
            self.progress.say(responses_text(view.step, view.samples))
        if view.stop and view.step:
            self.progress.say(f"stopped after step {view.step}: {view.stop}")
