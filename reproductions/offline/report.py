"""The runs of `run.py` as a table and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from reproductions import harness
from reproductions.offline.methods import RECIPE, UNBOUNDED

ON_PAGE = ("fresh, the recipe", "fresh, the group's mean", "fresh, RLOO", "fresh, REINFORCE")

Run = Mapping[str, Any]


def line(run: Run) -> str:
    """The end of one run."""
    words = (run["section"], run["method"], *run["changes"], f"seed {run['seed']}")
    end = f"{run['accuracy'][-1]:.3f} ± {run['accuracy_se'][-1]:.3f}, KL {run['kl_ref'][-1]:.2f}"
    return f"{', '.join(words)}: {end}, {run['cpu_seconds'] or 0:.0f} CPU s"


def settings_of(runs: Sequence[Run]) -> dict[tuple[str, str, tuple[str, ...]], list[Run]]:
    """The runs that differ in their seed alone."""
    found: dict[tuple[str, str, tuple[str, ...]], list[Run]] = {}
    for run in runs:
        found.setdefault((run["section"], run["method"], tuple(run["changes"])), []).append(run)
    return found


def fresh_table(runs: Sequence[Run], peers: Sequence[Run]) -> str:
    """Accuracy by seed on fresh samples, a row for each method and a column for each rate, beside TRL's own.

    `peers`: the recorded runs of TRL's trainers on the same task, without a table of its samples' KL.
    """
    rates = ("1e-4", "3e-4")
    lines = []
    fresh = [run for run in runs if run["section"] == "fresh"]
    for method in [name for name in dict.fromkeys(run["method"] for run in fresh) if name in ON_PAGE]:
        own = [run for run in fresh if run["method"] == method]
        by_rate = [[run for run in own if f"train.lr={rate}" in run["changes"]] for rate in rates]
        cells = [_by_seed([run["accuracy"][-1] for run in same]) for same in by_rate]
        last = by_rate[-1]
        cells.append(f"{statistics.mean(run['kl_ref'][-1] for run in last):.2f}" if last else "–")
        lines.append([method.removeprefix("fresh, "), *cells])
    for trainer in ("rloo", "grpo"):
        own = [run for run in peers if run["settings"]["trainer"] == trainer]
        ends = [(run["settings"]["lr"], run["held_out_accuracy"][-1]["accuracy"]) for run in own]
        cells = [_by_seed([end for lr, end in ends if lr == float(rate)]) for rate in rates]
        lines.append([f"TRL 1.16 itself, {trainer.upper()} (512 held-out sums)", *cells, "–"])
    return harness.markdown(["method", "lr 1e-4", "lr 3e-4", "KL at 3e-4"], lines)


def _by_seed(ends: Sequence[float]) -> str:
    if not ends:
        return "–"
    text = ", ".join(f"{end:.3f}" for end in ends)
    if len(ends) < 3:
        return text
    return f"{text}: {statistics.mean(ends):.3f} ± {statistics.stdev(ends):.3f}"


def best_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """By method of the section "methods" the runs with its best settings, by their mean."""
    best: dict[str, list[Run]] = {}
    for (section, method, _), same in settings_of(runs).items():
        if section == "methods" and _mean(same) > _mean(best.get(method, [])):
            best[method] = same
    return best


def _mean(runs: Sequence[Run]) -> float:
    """Of settings that were continued with further seeds; one trial counts less than these."""
    ends = [run["accuracy"][-1] for run in runs]
    return statistics.mean(ends) + len(ends) if ends else -1.0


def figure(runs: Sequence[Run]) -> Figure:
    """Held-out accuracy of each method at its best settings: a point a seed, a line at their mean."""
    best = best_of(runs)
    found = Figure(figsize=(7.0, 1.2 + 0.3 * len(best)), layout="constrained")
    axes = harness.axes(found, (1, 1, 1), "held-out accuracy after training on the log alone", 1)
    names = sorted(best, key=lambda name: statistics.mean(run["accuracy"][-1] for run in best[name]))
    for y, name in enumerate(names):
        ends = [run["accuracy"][-1] for run in best[name]]
        color = harness.COLORS[0] if name in (RECIPE, UNBOUNDED) else harness.MUTED
        axes.scatter(ends, [y] * len(ends), s=18, color=color, alpha=0.7, linewidths=0)
        axes.plot([statistics.mean(ends)] * 2, [y - 0.3, y + 0.3], color=color, linewidth=2.0)
    start = runs[0]["accuracy"][0]
    axes.axvline(start, color=harness.MUTED, linewidth=0.8, linestyle=":")
    axes.text(start + 0.01, len(names) - 0.5, "before", fontsize=7, color=harness.MUTED)
    # Without the option of a name, which may not be the best.
    plain = [name.partition(", β")[0].partition(", b")[0] for name in names]
    axes.set_yticks(range(len(names)), plain)
    axes.grid(axis="x", color=harness.GRID, linewidth=0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("")
    return found
