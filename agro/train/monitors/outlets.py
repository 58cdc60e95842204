"""Where a step's metrics go: the run folder, trackers, the terminal; and warnings, each once a phase."""

from __future__ import annotations

from agro.objectives import get
from agro.runs.folder import Run
from agro.runs.progress import Progress, responses_text
from agro.runs.track import Trackers
from agro.train.monitors.base import Monitor, View


class Warnings(Monitor):
    """What the objective says of its own metrics, once a phase."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.given: set[str] = set()

    def after(self, view: View) -> None:
        if view.metrics["objective"] is None:
            return
        for about, text in get(view.phase.config.objective.name).warnings(view.metrics, view.options).items():
            if about not in self.given:
                self.given.add(about)
                self.progress.say(f"step {view.step}: {text}")


class Record(Monitor):
    """metrics.jsonl, and copies of it for other programs."""

    def __init__(self, folder: Run, trackers: Trackers) -> None:
        self.folder, self.trackers = folder, trackers

    def after(self, view: View) -> None:
        self.folder.log(view.metrics)
        self.trackers.log(view.metrics)


class Terminal(Monitor):
    """A line a step, and responses now and then."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def after(self, view: View) -> None:
        self.progress.step(view.metrics)
        every = view.phase.config.train.show_every
        if every and view.step and view.at % every == 0 and view.samples:
            self.progress.say(responses_text(view.step, view.samples))
        if view.stop:
            self.progress.say(f"stopped after step {view.step}: {view.stop}")
