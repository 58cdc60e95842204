"""The runs of `run.py` as a table and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from reproductions import harness
from reproductions.offline.methods import RECIPE, UNBOUNDED

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


def tables(runs: Sequence[Run]) -> str:
    """A row for each setting, as Markdown.

    The accuracies of its seeds, their mean and its standard error, the KL on samples; of the batches at the
    end the log-ratios of the best and the worst responses and the mean of π/π_ref.
    """
    head = (
        "| section | method | settings | accuracy by seed | mean | KL, nats | ρ best | ρ worst | mean e^ρ |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for (section, method, changes), same in settings_of(runs).items():
        ends = [run["accuracy"][-1] for run in same]
        kl = statistics.mean(run["kl_ref"][-1] for run in same)
        of_batches = [_mean_known(same, name) for name in ("log_ratio_best", "log_ratio_worst", "ratio_mean")]
        mean = f"{statistics.mean(ends):.3f}"
        if len(ends) > 1:
            mean += f" ± {statistics.stdev(ends) / len(ends) ** 0.5:.3f}"
        seeds = " ".join(f"{end:.3f}" for end in ends)
        cells = (section, method, " ".join(changes), seeds, mean, f"{kl:.2f}", *of_batches)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean_known(runs: Sequence[Run], name: str) -> str:
    known = [run[name] for run in runs if run.get(name) is not None]
    return f"{statistics.mean(known):.2f}" if known else ""


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
