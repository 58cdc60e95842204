"""Outputs of a step's metrics: the run folder, trackers, and the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from agro.runs.by_prompt import HeldOutRewards, write_rewards
from agro.runs.folder import Run
from agro.runs.progress import Progress, responses_text
from agro.runs.track import Trackers
from agro.train.monitors.base import Monitor, View
from agro.types import Sample


class Record(Monitor):
    """metrics.jsonl and copies of it for other programs, and responses and rewards of held-out prompts."""

    def __init__(self, folder: Run, trackers: Trackers) -> None:
        self.folder, self.trackers = folder, trackers
        self.written: HeldOutRewards | None = None

    def after(self, view: View) -> None:
        if view.is_empty:
            return
        self.folder.log(view.metrics)
        if view.held_out:
            self.folder.log_held_out(view.step, view.held_out)
        if view.held_out_rewards is not None and view.held_out_rewards is not self.written:
            # Also after a resume: the file may be of a later step, which is made again.
            write_rewards(self.folder.folder, view.held_out_rewards)
            self.written = view.held_out_rewards
        self.trackers.log(view.metrics)


class Terminal(Monitor):
    """A line per step, and responses every `train.show_every` steps."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.samples: Sequence[Sample] = ()  # that the step trained on

    def receive(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def after(self, view: View) -> None:
        if view.is_empty:
            return
        self.progress.step(view.metrics)
        every = view.phase.config.train.show_every
        if every and view.step and view.at % every == 0 and self.samples:
            self.progress.say(responses_text(view.step, self.samples))
        if view.stop and view.step:
            self.progress.say(f"stopped after step {view.step}: {view.stop}")
