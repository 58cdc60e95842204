"""The protocol of monitors, the step that they observe, and the two monitors that log a run's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from agro.runs.folder import Run
from agro.runs.progress import RunActivity, responses_text
from agro.runs.rundata import HeldOutRewards, write_rewards
from agro.runs.side_by_side import best_of_log
from agro.runs.track import Trackers
from agro.store import Store
from agro.train.phases import Phase
from agro.types import Sample


@dataclass(frozen=True)
class Action:
    """A monitor's request before the weights move, and its reason, with which "stop" ends the run."""

    kind: Literal["go", "skip", "roll back", "stop"] = "go"
    why: str = ""


GO = Action()


@dataclass
class View:
    """One step, as monitors see it. Step 0 is the measurement before the first step."""

    phase: Phase
    step: int  # the run's step
    options: dict[str, Any]  # the objective's, at this step
    metrics: dict[str, Any]  # the step's line of metrics.jsonl; None: unknown
    stop: str = ""  # why the run should end after this step; a monitor may set it
    held_out: Sequence[Sample] = ()  # an evaluation's responses to held-out prompts, or unscored ones
    held_out_rewards: HeldOutRewards | None = None  # of the latest evaluation of these prompts

    @property
    def at(self) -> int:
        """The step's number in its phase, from 1."""
        return self.step - self.phase.begins

    @property
    def was_evaluated(self) -> bool:
        """Whether something was measured on held-out data."""
        return any(v is not None for k, v in self.metrics.items() if k.startswith("eval_"))

    @property
    def is_empty(self) -> bool:
        """Whether this is step 0 and nothing was measured."""
        return self.step == 0 and not self.was_evaluated

    @property
    def last(self) -> bool:
        return self.step == self.phase.ends or bool(self.stop)

    @property
    def is_due(self) -> bool:
        """Whether held-out data are measured at this step."""
        every = self.phase.config.evaluate.every
        return self.step == 0 or self.last or bool(every and self.at % every == 0)


class Monitor:
    """Observes steps. Each method does nothing unless a subclass overrides it. An exception ends the run.

    `name` is the key of its `state` (JSON) in checkpoints; a monitor without state has none.
    """

    name = ""

    def receive(self, samples: Sequence[Sample]) -> None:
        """Receive the samples that a step trains on, before its gradient."""

    def judge(self, view: View) -> Action:
        """Decide whether the weights may move, before the first update, from its gradient's metrics."""
        return GO

    def after(self, view: View) -> None:
        """Observe a completed step; may add to `view.metrics` or set `view.stop`."""

    def state(self) -> Any:
        """The state to store in a checkpoint."""
        return None

    def restore(self, state: Any) -> None:
        """Restore the state from a checkpoint."""

    def close(self) -> None:
        """Called when the run has ended."""


class Record(Monitor):
    """Writes metrics.jsonl, its copies for trackers, and responses and rewards of held-out prompts."""

    def __init__(self, folder: Run, trackers: Trackers, store: Store) -> None:
        self.folder, self.trackers, self.store = folder, trackers, store
        self.written: HeldOutRewards | None = None

    def after(self, view: View) -> None:
        if view.held_out:
            best = partial(best_of_log, self.store, self.folder.id)
            self.folder.log_held_out(view.step, view.held_out, best)
        if view.is_empty:
            return
        self.folder.log(view.metrics)
        if view.held_out_rewards is not None and view.held_out_rewards is not self.written:
            # Also after a resume: the file may be from a later step, which is repeated.
            write_rewards(self.folder.folder, view.held_out_rewards)
            self.written = view.held_out_rewards
        self.trackers.log(view.metrics)


class Terminal(Monitor):
    """Prints a line per step, and responses every `train.show_every` steps."""

    def __init__(self, activity: RunActivity) -> None:
        self.activity = activity
        self.samples: Sequence[Sample] = ()  # the step's

    def receive(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def after(self, view: View) -> None:
        if view.is_empty:
            return
        self.activity.step(view.metrics)
        every = view.phase.config.train.show_every
        if every and view.step and view.at % every == 0 and self.samples:
            self.activity.say(responses_text(view.step, self.samples))
        if view.stop and view.step:
            self.activity.say(f"stopped after step {view.step}: {view.stop}")
