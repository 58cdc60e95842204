"""Where a run was best by the held-out metric that it follows, and where it ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agro.io.numbers import fixed
from agro.runs.metrics import FOLLOWED
from agro.runs.rundata import Measurement, RunData


@dataclass(frozen=True)
class Outcome:
    """The best of several measurements, and the latest. `has_model`: the model of the best is in best/."""

    metric: str
    best: Measurement
    latest: Measurement
    at_end: bool  # whether the latest one is of the run's last step
    has_model: bool

    @classmethod
    def of(cls, run: RunData) -> Outcome | None:
        """None where the metric was measured less than twice."""
        metric, row = run.followed, run.best_row
        if metric is None or row is None:
            return None
        measured = np.flatnonzero(np.isfinite(run.column(metric)))
        if len(measured) < 2:
            return None
        best, latest = (_measured(run, metric, int(index)) for index in (row, measured[-1]))
        has_model = run.best_model is not None and (run.best_model.metric, run.best_model.measured.step) == (
            metric,
            best.step,
        )
        return cls(metric, best, latest, latest.step == run.steps, has_model)

    @property
    def title(self) -> str:
        """The metric for people."""
        return FOLLOWED[self.metric].title

    @property
    def text(self) -> str:
        """One line for the terminal."""
        best = f"best {self.metric} {fixed(self.best.value)} at step {self.best.step}"
        if self.best.step == self.latest.step:
            return f"{best}, the last measurement"
        end = "the end" if self.at_end else f"step {self.latest.step}"
        return f"{best}; {end} {fixed(self.latest.value)}"


def _measured(run: RunData, metric: str, row: int) -> Measurement:
    values = run.rows[row]
    return Measurement(values[metric], values.get(f"{metric}_se"), values["step"])
