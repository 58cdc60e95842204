"""The panel's result as tables and a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from reproductions import harness
from reproductions.panel.jobs import JOBS
from reproductions.panel.methods import METHODS, NOTHING, RIVAL_BETAS

Run = Mapping[str, Any]
Cell = tuple[str, str]  # job, method
ABOVE = 0.05  # a job on which a default is this far above the simple methods counts as won
DEFAULT, BESIDE_RATES = "the default", (1e-3, 3e-3)
RIVALS = ("FPA", *(f"{name}, β = {beta}" for beta in RIVAL_BETAS for name in ("QRPO", "TBRM")))
BESIDE = (NOTHING, "imitation of the good", "TOPR", "DRO", "DPO", "KTO", *RIVALS, DEFAULT)
BEGIN, END = "<!-- begin: made by run.py --record -->", "<!-- end: made by run.py --record -->"


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


def of_cells(runs: Iterable[Run]) -> dict[Cell, list[Run]]:
    found: dict[Cell, list[Run]] = {}
    for run in runs:
        found.setdefault((run["job"], run["method"]), []).append(run)
    return found


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
    """Held-out reward, KL, rewards with the best rate of each job, the verdict, and who doesn't apply."""
    runs = result["runs"]
    if not runs:
        return "No run is complete."
    rates, cells = chosen_rates(runs), of_cells(runs)
    at_one = {cell: at_rate(found, rates[cell[1]]) for cell, found in cells.items()}
    at_one = {cell: found for cell, found in at_one.items() if found}
    spent = sum(run["cpu_seconds"] + run["measuring_seconds"] for run in runs) / 60
    parts = [
        f"{len(runs)} runs in {spent:.0f} CPU minutes. {_seeds(runs)}",
        "The jobs as they were made. Right: share of right responses in the log. Start: held-out reward.",
        _jobs(result, at_one),
        "The one rate of each method, the best of all jobs with seed 0:",
        _rates(rates, runs),
        "Held-out reward with this rate, mean over seeds ± their standard deviation.",
        _table(at_one, _reward),
        "KL(π ‖ start) with this rate, nats a response, ± the mean standard error of a run.",
        _table(at_one, _kl),
        "Held-out reward with the best rate of each job, seed 0, and that rate.",
        _table({cell: best_rate(found) for cell, found in cells.items()}, _with_rate),
        "Held-out reward at each rate, mean over the seeds that were run.",
        _by_rate(runs),
        *[part for rate in BESIDE_RATES for part in (_about_beside(rate), beside(runs, rate))],
        "Recipes and candidates, by job: how far below the start and below the best simple method (imitation "
        f"of the good, or nothing) they end at worst, and on how many jobs they end at least {ABOVE} above.",
        _verdicts(at_one),
        "Where a method doesn't apply:",
        _reasons(result["missing"]),
    ]
    stopped = [run for run in runs if run["stopped"] or run["reward"] is None]
    if stopped:
        parts += ["Runs that ended early:", "\n".join(f"- {line(run)}" for run in stopped)]
    return "\n\n".join(parts)


def _seeds(runs: Sequence[Run]) -> str:
    counts: dict[int, int] = {}
    for run in runs:
        counts[run["seed"]] = counts.get(run["seed"], 0) + 1
    return "Runs by seed: " + ", ".join(f"{seed}: {count}" for seed, count in sorted(counts.items())) + "."


def _jobs(result: Run, cells: Mapping[Cell, Sequence[Run]]) -> str:
    lines = [
        "| job | task | data | responses | right | mean reward | start |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in jobs_of(result["runs"]):
        job, facts = JOBS[name], result["facts"][name]
        kept = " (kept)" if job.kept else ""
        begun = number(mean(cells.get((name, NOTHING), [])))
        words = [f"{name}{kept}", job.task.about, job.about, str(facts.get("responses", "–"))]
        words += [number(facts.get("right")), number(facts.get("mean")), begun]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def _rates(rates: Mapping[str, float | None], runs: Sequence[Run]) -> str:
    lines = ["| method | lr | rates that were run | settings |", "|---|---|---|---|"]
    for name in methods_of(runs):
        tried = sorted({run["rate"] for run in runs if run["method"] == name and run["rate"]})
        rate = rates[name]
        chosen = "–" if rate is None else f"{rate:g}"
        of_all = ", ".join(f"{rate:g}" for rate in tried)
        lines.append(f"| {name} | {chosen} | {of_all} | {METHODS[name].about} |")
    return "\n".join(lines)


def _table(cells: Mapping[Cell, Sequence[Run]], form: Callable[[Sequence[Run]], str]) -> str:
    """A row for each method, a column for each job."""
    runs = [run for found in cells.values() for run in found]
    jobs = jobs_of(runs)
    lines = [f"| method | {' | '.join(jobs)} |", "|---" * (len(jobs) + 1) + "|"]
    for method in methods_of(runs):
        words = [form(cells[job, method]) if (job, method) in cells else "" for job in jobs]
        lines.append(f"| {method} | {' | '.join(words)} |")
    return "\n".join(lines)


def _by_rate(runs: Sequence[Run]) -> str:
    """A row for each method at each of the rates that it was run at, on more than half of its jobs."""
    jobs, cells = jobs_of(runs), of_cells(runs)
    lines = [f"| method, lr | {' | '.join(jobs)} |", "|---" * (len(jobs) + 1) + "|"]
    for method in methods_of(runs):
        own = {job: cells[job, method] for job in jobs if (job, method) in cells}
        rates = sorted({run["rate"] for found in own.values() for run in found if run["rate"]})
        for rate in rates if len(rates) > 1 else ():
            found = {job: [run for run in same if run["rate"] == rate] for job, same in own.items()}
            if 2 * sum(map(bool, found.values())) > len(own):
                words = [number(mean(found[job])) if found.get(job) else "" for job in jobs]
                lines.append(f"| {method}, {rate:g} | {' | '.join(words)} |")
    return "\n".join(lines)


def _about_beside(rate: float) -> str:
    return (
        "Objectives of others on logs, beside the default and the simple methods: held-out reward, the mean "
        f"over the seeds that were run, all at lr {rate:g}, on the jobs on which one of FPA, QRPO and TBRM "
        "was run. The best one of a job is in bold; the last column has the mean less the default's, over "
        "the jobs that a method has."
    )


def beside(runs: Sequence[Run], rate: float) -> str:
    """A row for each method, at one rate."""
    cells = of_cells(run for run in at_rate(runs, rate) if run["method"] in BESIDE)
    found = {cell: mean(same) for cell, same in cells.items()}
    jobs = [job for job in jobs_of(runs) if any((job, method) in found for method in RIVALS)]
    best = {job: max(found.get((job, method)) or 0.0 for method in BESIDE) for job in jobs}
    lines = [f"| method | {' | '.join(jobs)} | to the default |", "|---" * (len(jobs) + 2) + "|"]
    for method in BESIDE:
        own = {job: found[job, method] or 0.0 for job in jobs if (job, method) in found}
        if not own:
            continue
        words = [_emphasized(own.get(job), best[job]) for job in jobs]
        both = [job for job in own if (job, DEFAULT) in found]
        apart = [own[job] - (found[job, DEFAULT] or 0.0) for job in both]
        to_default = f"{statistics.mean(apart):+.3f} ({len(apart)})" if apart else "–"
        lines.append(f"| {method} | {' | '.join(words)} | {to_default} |")
    return "\n".join(lines)


def _emphasized(value: float | None, best: float) -> str:
    if value is None:
        return ""
    return f"**{value:.3f}**" if value == best else f"{value:.3f}"


def _reward(runs: Sequence[Run]) -> str:
    text = number(mean(runs))
    if len(runs) == 1 or text == "–":
        return text
    return f"{text} ± {statistics.stdev(run['reward'] for run in runs):.3f}"


def _kl(runs: Sequence[Run]) -> str:
    return f"{number(mean(runs, 'kl'), 2)} ± {number(mean(runs, 'kl_error'), 2)}"


def best_rate(runs: Sequence[Run]) -> list[Run]:
    """The run with seed 0 whose reward is the highest."""
    first = [run for run in runs if run["seed"] == 0]
    return [max(first, key=lambda run: run["reward"] or 0.0)] if first else []


def _with_rate(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    rate = runs[0]["rate"]
    return number(runs[0]["reward"]) + ("" if rate is None else f" ({rate:g})")


def differences(cells: Mapping[Cell, Sequence[Run]], method: str) -> dict[str, tuple[float, float]]:
    """By job how far a method ends above the start, and above the best simple method. Where it has no value
    it counts as 0; jobs without the start or another simple method are left out of what needs them."""
    found: dict[str, tuple[float, float]] = {}
    simple = [name for name, of in METHODS.items() if of.simple]
    for (job, name), runs in cells.items():
        if name != method:
            continue
        reached = mean(runs) or 0.0
        before = mean(cells.get((job, NOTHING), []))
        known = [mean(cells[job, other]) for other in simple if (job, other) in cells]
        best = max((value for value in known if value is not None), default=None)
        if before is not None and best is not None:
            found[job] = reached - before, reached - best
    return found


def _verdicts(cells: Mapping[Cell, Sequence[Run]]) -> str:
    head = "| method | jobs | worst to the start | worst to the best simple one | mean to it "
    lines = [head + f"| jobs ≥ {ABOVE} above |", "|---|---|---|---|---|---|"]
    for method in methods_of(run for found in cells.values() for run in found):
        if METHODS[method].simple:
            continue
        by_job = differences(cells, method)
        if not by_job:
            continue
        worst = [min(by_job, key=lambda job: by_job[job][i]) for i in (0, 1)]
        words = [f"{by_job[job][i]:+.3f} ({job})" for i, job in enumerate(worst)]
        average = statistics.mean(apart for _, apart in by_job.values())
        won = sum(apart >= ABOVE for _, apart in by_job.values())
        lines.append(f"| {method} | {len(by_job)} | {' | '.join(words)} | {average:+.3f} | {won} |")
    return "\n".join(lines)


def _reasons(missing: Sequence[Mapping[str, str]]) -> str:
    found: dict[tuple[str, str], list[str]] = {}
    for row in missing:
        found.setdefault((row["method"], row["why"]), []).append(row["job"])
    lines = ["| method | why | jobs |", "|---|---|---|"]
    lines += [f"| {method} | {why} | {', '.join(jobs)} |" for (method, why), jobs in found.items()]
    return "\n".join(lines)


def figure(result: Run) -> Figure:
    """A heat map: how far each method ends above the start, at its one rate."""
    runs = result["runs"]
    rates, cells = chosen_rates(runs), of_cells(runs)
    at_one = {cell: at_rate(found, rates[cell[1]]) for cell, found in cells.items()}
    jobs = jobs_of(runs)
    methods = [name for name in methods_of(runs) if name != NOTHING]
    shown = np.full((len(methods), len(jobs)), math.nan)
    for i, method in enumerate(methods):
        for job, (above, _) in differences(at_one, method).items():
            shown[i, jobs.index(job)] = above
    size = (2.5 + 0.62 * max(1, len(jobs)), 1.6 + 0.28 * max(1, len(methods)))
    found = Figure(figsize=size, layout="constrained")
    axes = found.add_subplot(1, 1, 1)
    axes.set_title("held-out reward above the start's", loc="left", fontsize=10, color=harness.INK)
    norm = Normalize(-0.6, 0.6)
    axes.imshow(np.clip(shown, -0.6, 0.6), cmap="RdBu", norm=norm, aspect="auto", interpolation="none")
    for (y, x), value in np.ndenumerate(shown):
        text = "–" if math.isnan(value) else f"{value:+.2f}"
        color = "white" if abs(value) > 0.4 else harness.INK
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(range(len(jobs)), jobs, fontsize=8, rotation=30, ha="left")
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return found
