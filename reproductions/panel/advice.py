"""The table of the guide: which method won, by the data that a job gives to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from reproductions import harness
from reproductions.panel.jobs import JOBS
from reproductions.panel.methods import NOTHING, PUBLISHED

Run = Mapping[str, Any]
GUIDE = harness.ROOT / "docs" / "guide" / "choosing.md"
MADE = "made by reproductions/panel/run.py --record"
IMITATION, DEFAULT = "imitation of the good", "the default"
RATES = (1e-3, 3e-3)


def table(runs: Sequence[Run]) -> str:
    """Held-out reward: a mean over the seeds of a job and over jobs, where all jobs of a row have a run."""
    cells: dict[tuple[str, str, float | None], list[float]] = {}
    for run in runs:
        cells.setdefault((run["job"], run["method"], run["rate"]), []).append(run["reward"] or 0.0)
    rows: dict[str, list[str]] = {}
    for name in JOBS:
        if any((name, DEFAULT, rate) in cells for rate in RATES):
            rows.setdefault(JOBS[name].kind, []).append(name)
    head = ["data", "jobs", "the start", "imitation", "the recipe", "at 3e-3: imitation", "the recipe"]
    lines = []
    for data, jobs in rows.items():
        found = [_over(cells, jobs, NOTHING, None)]
        found += [_over(cells, jobs, name, rate) for rate in RATES for name in (IMITATION, DEFAULT)]
        values = ["–" if value is None else f"{value:.2f}" for value in found]
        lines.append([data, str(len(jobs)), *values, _best_other(cells, jobs)])
    return harness.markdown([*head, "best other, 1e-3"], lines)


def _over(cells: Mapping[Any, Sequence[float]], jobs: Sequence[str], method: str, rate: float | None) -> Any:
    """Mean over the jobs; None unless all of them have the method at this rate."""
    if not all((job, method, rate) in cells for job in jobs):
        return None
    return mean(mean(cells[job, method, rate]) for job in jobs)


def _best_other(cells: Mapping[Any, Sequence[float]], jobs: Sequence[str]) -> str:
    """The best published method that was run on all of these jobs."""
    others = [name for name in PUBLISHED if name not in (NOTHING, IMITATION)]
    found = {name: _over(cells, jobs, name, RATES[0]) for name in others}
    known = {name: value for name, value in found.items() if value is not None}
    if not known:
        return "–"
    best = max(known, key=lambda name: known[name])
    return f"{best} {known[best]:.2f}"
