"""The panel's result as tables and a figure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from reproductions import harness
from reproductions.panel.jobs import JOBS
from reproductions.panel.methods import METHODS, NOTHING, PARTS, PUBLISHED, SHIFTED

Run = Mapping[str, Any]
Cell = tuple[str, str]  # job, method
DEFAULT, IMITATION, RATES = "the default", "imitation of the good", (3e-4, 1e-3, 3e-3)
GUIDE = harness.ROOT / "docs" / "guide" / "choosing.md"
OF_GUIDE = "made by reproductions/panel/run.py --record"
OTHERS = "reward_others"  # mean reward on the held-out prompts that don't choose the rate
# The jobs over which the parts of the default are averaged.
MAIN = ("own", "graded", "better", "worse", "long", "pairs", "stars", "fresh", "mislabeled", "better, noisy")


def line(run: Run) -> str:
    """One run."""
    rate = "" if run["rate"] is None else f", lr {run['rate']:g}"
    reward, kl = number(run["reward"]), number(run["kl"], 2)
    stopped = f" ({run['stopped'].splitlines()[0]:.80})" if run["stopped"] else ""
    spent = run["cpu_seconds"] + run["measuring_seconds"]
    settings = f"{run['job']}, {run['method']}{rate}, seed {run['seed']}"
    return f"{settings}: {reward}, KL {kl}, {spent:.1f} CPU s{stopped}"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def mean(runs: Sequence[Run], key: str = "reward") -> float | None:
    """Over the runs; None where one of them has no value, or there are none."""
    values = [run[key] for run in runs]
    if not values or any(value is None for value in values):
        return None
    return statistics.mean(values)


def at_rate(runs: Sequence[Run], rate: float | None) -> list[Run]:
    return [run for run in runs if run["rate"] in (rate, None)]


def chosen_rates(runs: Sequence[Run]) -> dict[str, float | None]:
    """By method the one rate with the highest mean over all jobs, with seed 0; a run without a value counts
    as 0 here, since a method that ruins the model isn't to win by what it leaves out."""
    found: dict[str, float | None] = {}
    for method in methods_of(runs):
        own = [run for run in runs if run["method"] == method and run["seed"] == 0]
        jobs = {run["job"] for run in own}
        of_rate = {
            rate: [run["reward"] or 0.0 for run in own if run["rate"] == rate]
            for rate in {run["rate"] for run in own}
        }
        complete = {rate: values for rate, values in of_rate.items() if len(values) == len(jobs)}
        best = complete or of_rate
        found[method] = max(best, key=lambda rate: statistics.mean(best[rate])) if best else None
    return found


def methods_of(runs: Iterable[Run]) -> list[str]:
    seen = {run["method"] for run in runs}
    return [name for name in METHODS if name in seen]


def jobs_of(runs: Iterable[Run]) -> list[str]:
    seen = {run["job"] for run in runs}
    return [name for name in JOBS if name in seen]


def tables(result: Run) -> str:
    """The jobs with the default beside imitation, the default without its parts, and all other methods."""
    runs = result["runs"]
    if not runs:
        return "No run is complete."
    spent = sum(run["cpu_seconds"] + run["measuring_seconds"] for run in runs) / 60
    seeds = Counter(run["seed"] for run in runs)
    parts = [
        f"{len(runs)} runs in {spent:.0f} CPU minutes; by seed: "
        + ", ".join(f"{seed}: {seeds[seed]}" for seed in sorted(seeds))
        + ". Held-out reward, the mean over the seeds (how many, where more than one); imitation of the "
        "good at its best rate.",
        _jobs(result),
        "The default changed in one part, less the default, paired by job and seed: the mean over the main "
        "jobs ± its standard error, and the job that loses the most.",
        _parts(runs),
        "Other methods less the default at the same rate, the better one of theirs, on the jobs of both.",
        _others(runs),
    ]
    stopped = [run for run in runs if run["stopped"] or run["reward"] is None]
    if stopped:
        parts += ["Runs that ended early:", "\n".join(f"- {line(run)}" for run in stopped)]
    return "\n\n".join(parts)


def _jobs(result: Run) -> str:
    cells = harness.grouped(result["runs"], "job", "method")
    rows = []
    for name in (name for name in jobs_of(result["runs"]) if (name, DEFAULT) in cells):
        job = JOBS[name]
        copied = at_best(cells.get((name, IMITATION), []))
        own = [at_rate(cells.get((name, DEFAULT), []), rate) for rate in RATES]
        words = [name + (" (kept)" if job.kept else ""), job.about, _reward(cells.get((name, NOTHING), []))]
        rows.append([*words, _reward(copied), *map(_reward, own)])
    heads = [f"default, {RATES[0]:g}", *(f"{rate:g}" for rate in RATES[1:])]
    return harness.markdown(["job", "data", "start", "imitation", *heads], rows)


def at_best(runs: Sequence[Run]) -> list[Run]:
    """Those at the rate of the highest mean: on the prompts that choose, where all runs have these."""
    key = "reward_choosing" if all("reward_choosing" in run for run in runs) else "reward"
    rates = {run["rate"] for run in runs}
    return max((at_rate(runs, rate) for rate in rates), key=lambda found: mean(found, key) or 0.0, default=[])


def reported(*runs: Run) -> list[float]:
    """The rewards of runs on the same prompts: those that don't choose the rate, where all have these. A run
    without a value counts as 0, since a method that ruins the model isn't to win by what it leaves out."""
    key = OTHERS if all(OTHERS in run for run in runs) else "reward"
    return [run[key] or 0.0 for run in runs]


def paired(runs: Sequence[Run], method: str, rate: float) -> dict[str, list[float]]:
    """By job, for each seed that both have, how far a method ends above the default at one rate."""
    made = {
        (run["job"], run["method"], run["seed"]): run
        for run in runs
        if run["rate"] == rate and run["method"] in (method, DEFAULT)
    }
    return _apart(made, method)


def paired_at_best(runs: Sequence[Run], method: str) -> dict[str, list[float]]:
    """The same with each of both at its best rate of the job, where both were run at all rates."""
    made = {
        (job, name, run["seed"]): run
        for (job, name), found in harness.grouped(runs, "job", "method").items()
        if name in (method, DEFAULT) and {run["rate"] for run in found} >= set(RATES)
        for run in at_best(found)
    }
    return _apart(made, method)


def _apart(made: Mapping[tuple[str, str, int], Run], method: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for (job, name, seed), run in made.items():
        if name == method and (job, DEFAULT, seed) in made:
            ours, theirs = reported(made[job, DEFAULT, seed], run)
            found.setdefault(job, []).append(theirs - ours)
    return found


def _parts(runs: Sequence[Run]) -> str:
    """A row for each change: at each rate, and with both at their best rates of the job."""
    rows = []
    for part in (*PARTS, SHIFTED):
        at_rates = [paired(runs, part, rate) for rate in RATES]
        if any(at_rates):
            rows.append([part, *map(_over_jobs, [*at_rates, paired_at_best(runs, part)])])
    return harness.markdown(["change", *(f"lr {rate:g}" for rate in RATES), "each at its best rate"], rows)


def _over_jobs(apart: Mapping[str, Sequence[float]]) -> str:
    """The mean over the main jobs ± its standard error, the jobs and runs, and the job that loses most."""
    means = {job: statistics.mean(values) for job, values in apart.items() if job in MAIN}
    if not means:
        return "–"
    error = f" ± {statistics.stdev(means.values()) / math.sqrt(len(means)):.3f}" if len(means) > 1 else ""
    worst = min(means, key=means.__getitem__)
    count = sum(len(apart[job]) for job in means)
    mean_of_jobs = f"{statistics.mean(means.values()):+.3f}{error}"
    return f"{mean_of_jobs}<br>jobs: {len(means)}, runs: {count}; {worst} {means[worst]:+.2f}"


def _others(runs: Sequence[Run]) -> str:
    """Of each method the rate at which it is nearest to the default or furthest ahead of it."""
    rows = []
    for method in methods_of(runs):
        if method in (NOTHING, DEFAULT, *PARTS) or method not in PUBLISHED:
            continue
        of_rate = {
            rate: [statistics.mean(apart) for apart in paired(runs, method, rate).values()] for rate in RATES
        }
        known = {rate: ends for rate, ends in of_rate.items() if ends}
        if known:
            rate = max(known, key=lambda rate: statistics.mean(known[rate]))
            ends = known[rate]
            span = f"{min(ends):+.3f}…{max(ends):+.3f}" if len(ends) > 1 else ""
            rows.append([method, f"{rate:g}", str(len(ends)), f"{statistics.mean(ends):+.3f}", span])
    return harness.markdown(["method", "lr", "jobs", "mean", "by job"], rows)


def _reward(runs: Sequence[Run]) -> str:
    several = f" ({len(runs)})" if len(runs) > 1 else ""
    key = OTHERS if all(OTHERS in run for run in runs) else "reward"
    return number(mean(runs, key)) + several


def above_start(cells: Mapping[Cell, Sequence[Run]], method: str) -> dict[str, float]:
    """By job how far a method ends above the start; where it has no value it counts as 0."""
    found: dict[str, float] = {}
    for (job, name), runs in cells.items():
        before = mean(cells.get((job, NOTHING), []))
        if name == method and before is not None:
            found[job] = (mean(runs) or 0.0) - before
    return found


def advice(runs: Sequence[Run]) -> str:
    """The table of the guide, by the data that a job gives to train on.

    Held-out reward: a mean over the seeds of a job and over jobs, where all jobs of a row have a run.
    """
    cells, rates = harness.grouped(runs, "job", "method", "rate"), RATES[1:]
    rows: dict[str, list[str]] = {}
    for name in JOBS:
        if any((name, DEFAULT, rate) in cells for rate in rates):
            rows.setdefault(JOBS[name].kind, []).append(name)
    head = ["data", "jobs", "the start", "imitation", "the recipe", "at 3e-3: imitation", "the recipe"]
    lines = []
    for data, jobs in rows.items():
        found = [_over(cells, jobs, NOTHING, None)]
        found += [_over(cells, jobs, name, rate) for rate in rates for name in (IMITATION, DEFAULT)]
        values = ["–" if value is None else f"{value:.2f}" for value in found]
        lines.append([data, str(len(jobs)), *values, _best_other(cells, jobs)])
    return harness.markdown([*head, "best other, 1e-3"], lines)


def _over(cells: Mapping[Any, Sequence[Run]], jobs: Sequence[str], method: str, rate: float | None) -> Any:
    """Mean over the jobs; None unless all of them have the method at this rate."""
    if not all((job, method, rate) in cells for job in jobs):
        return None
    means = (statistics.mean(run["reward"] or 0.0 for run in cells[job, method, rate]) for job in jobs)
    return statistics.mean(means)


def _best_other(cells: Mapping[Any, Sequence[Run]], jobs: Sequence[str]) -> str:
    """The best published method that was run on all of these jobs."""
    others = [name for name in PUBLISHED if name not in (NOTHING, IMITATION)]
    found = {name: _over(cells, jobs, name, RATES[1]) for name in others}
    known = {name: value for name, value in found.items() if value is not None}
    if not known:
        return "–"
    best = max(known, key=lambda name: known[name])
    return f"{best} {known[best]:.2f}"


def figure(result: Run) -> Figure:
    """A heat map: how far each method ends above the start, at the best rate of each job."""
    runs = result["runs"]
    cells = {cell: at_best(found) for cell, found in harness.grouped(runs, "job", "method").items()}
    jobs = [job for job in jobs_of(runs) if (job, DEFAULT) in cells]
    methods = [name for name in methods_of(runs) if name not in (NOTHING, *PARTS)]
    shown = np.full((len(methods), len(jobs)), math.nan)
    for i, method in enumerate(methods):
        for job, above in above_start(cells, method).items():
            if job in jobs:
                shown[i, jobs.index(job)] = above
    size = (2.5 + 0.62 * max(1, len(jobs)), 1.6 + 0.28 * max(1, len(methods)))
    found = Figure(figsize=size, layout="constrained")
    axes = found.add_subplot(1, 1, 1)
    axes.set_title("held-out reward above the start's", loc="left", fontsize=10, color=harness.INK)
    colors = ScalarMappable(Normalize(-0.6, 0.6), "RdBu")
    harness.heat_map(axes, shown, methods, jobs, "{:+.2f}", colors)
    return found
