"""The arena's result as tables and heat maps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from reproductions import harness
from reproductions.arena import kinds
from reproductions.arena.kinds import KINDS

Run = Mapping[str, Any]
Cell = tuple[str, str]
SETTINGS = ("kind", "rate", "beta", "seed", "validation", "accuracy")  # that runs differ by
SIMPLE = ("sft", "reinforce", "rloo", "agro", *kinds.RECIPES)  # beside the best
BEGIN, END = "<!-- begin: made by run.py --record -->", "<!-- end: made by run.py --record -->"


def line(run: Run) -> str:
    """One run."""
    beta = "" if run["beta"] is None else f", β {run['beta']:g}"
    settings = f"{run['objective']}, {run['kind']}, lr {run['rate']:g}{beta}, seed {run['seed']}"
    if not run["updates"]:
        return f"{settings}: {run['stopped']}"
    end = f"accuracy {run['accuracy']:.3f}, KL {run['kl']:.2f}, {run['cpu_seconds']:.1f} CPU s"
    return f"{settings}: {end}" + (f" ({run['stopped']})" if run["stopped"] else "")


def family(name: str) -> str:
    """The subject of an objective: the module that it is in."""
    return kinds.entry(name).function.__module__.rsplit(".", 1)[-1].replace("_", " ")


def by_family(names: Sequence[str]) -> list[str]:
    """Families in the order of `kinds.names()`, each objective beside its presets."""
    every = kinds.names()
    families = list(dict.fromkeys(map(family, every)))
    base = {name: kinds.entry(name).of or kinds.base(name) for name in names}
    place = {name: i for i, name in enumerate(every)}
    return sorted(names, key=lambda n: (families.index(family(n)), place.get(base[n], 0), place[n]))


def of_cells(runs: Sequence[Run]) -> dict[Cell, list[Run]]:
    """By (objective, kind) the runs with the best settings."""
    found: dict[Cell, list[Run]] = {}
    for run in runs:
        found.setdefault((run["objective"], run["kind"]), []).append(run)
    return {cell: best_settings(of_cell) for cell, of_cell in found.items()}


def best_settings(runs: Sequence[Run]) -> list[Run]:
    """The runs with the settings whose validation is the highest, as a mean over their seeds."""
    same: dict[tuple[float, float | None], list[Run]] = {}
    for run in runs:
        same.setdefault(_settings(run), []).append(run)
    return max(same.values(), key=lambda found: mean(found, "validation"))


def _settings(run: Run) -> tuple[float, float | None]:
    return run["rate"], run["beta"]


def names_of(result: Run) -> list[str]:
    """All that took part somewhere, by family."""
    return by_family(list(dict.fromkeys(row["objective"] for row in (*result["runs"], *result["theory"]))))


def kinds_of(rows: Sequence[Run]) -> list[str]:
    seen = {row["kind"] for row in rows}
    return [kind for kind in KINDS if kind in seen]


def tables(result: Run) -> str:
    """How much was run, and a row for each kind of data. The figure has every objective."""
    best = of_cells(result["runs"])
    if not best:
        return ""
    start = result["start"]["accuracy"]
    return f"{_extent(result)}\n\n{_leaders(best, start)}"


def _extent(result: Run) -> str:
    """How much was run, and what it cost."""
    distinct = {(*(run[key] for key in SETTINGS), run["cpu_seconds"]) for run in result["runs"]}
    minutes = sum(row[-1] for row in distinct) / 60
    seeds = {kind: {r["seed"] for r in result["runs"] if r["kind"] == kind} for kind in KINDS}
    of = ", ".join(f"{kind} {len(found)}" for kind, found in seeds.items() if found)
    theory = sum(end.get("cpu_seconds", 0.0) for end in result["theory"]) / 60
    text = f"{len(distinct)} runs in {minutes:.0f} CPU minutes; seeds by kind: {of}."
    return text + (f" The theory took {theory:.0f} more." if theory else "")


def _leaders(best: Mapping[Cell, Sequence[Run]], start: float) -> str:
    """A row for each kind of data: the three best, named ones, the median, how many end below the start."""
    rows = []
    for kind in kinds_of([runs[0] for runs in best.values()]):
        ends = {name: mean(runs, "accuracy") for (name, of), runs in best.items() if of == kind}
        first = sorted(ends, key=lambda name: -ends[name])[:3]
        named = [f"{ends[name]:.3f}" if name in ends else "–" for name in SIMPLE]
        words = [kind, ", ".join(f"`{name}` {ends[name]:.3f}" for name in first), *named]
        below = sum(end < start for end in ends.values())
        rows.append([*words, f"{statistics.median(ends.values()):.3f}", f"{below} of {len(ends)}"])
    head = ["kind", "the best three", *(f"`{name}`" for name in SIMPLE), "median", "below the start"]
    return harness.markdown(head, rows)


def mean(runs: Sequence[Run], key: str) -> float:
    return statistics.mean(float(run[key]) for run in runs)


def figure(result: Run) -> Figure:
    """Heat maps side by side: accuracy, KL to the reference, and KL to the optimum in theory."""
    names, best = names_of(result), of_cells(result["runs"])
    accuracy = {cell: mean(runs, "accuracy") for cell, runs in best.items()}
    moved = {cell: max(mean(runs, "kl"), 0.0) for cell, runs in best.items()}
    ends = {(e["objective"], e["kind"]): e["kl"] for e in result["theory"] if e["kl"] is not None}
    panels = (
        ("accuracy, best of the grid", accuracy, "YlGnBu", Normalize(0, 1), "{:.2f}"),
        ("KL to the reference, nats", moved, "YlOrRd", LogNorm(0.1, 30), "{:.2g}"),
        ("in theory: KL to the optimum, nats", ends, "YlOrRd", LogNorm(1e-6, 10), "{:.0e}"),
    )
    panels = tuple(panel for panel in panels if panel[1]) or panels[:1]
    of = kinds_of([*result["runs"], *result["theory"]])
    width = 2.5 + len(panels) * max(3.2, 0.6 + 0.5 * len(of))
    found = Figure(figsize=(width, 2.0 + 0.24 * len(names)), layout="constrained")
    for i, (title, cells, colors, norm, form) in enumerate(panels):
        axes = found.add_subplot(1, len(panels), i + 1)
        axes.set_title(title, loc="left", fontsize=10, color=harness.INK, fontweight="bold")
        shown = np.array([[cells.get((name, kind), np.nan) for kind in of] for name in names])
        rows = names if i == 0 else [""] * len(names)
        harness.heat_map(axes, shown, rows, of, form, ScalarMappable(norm, colors))
        _separate_families(axes, names, named=i == len(panels) - 1)
    return found


def _separate_families(axes: Any, names: Sequence[str], named: bool) -> None:
    """A white line between families, and their names at the right."""
    families = [family(name) for name in names]
    for i, name in enumerate(families):
        if i and name != families[i - 1]:
            axes.axhline(i - 0.5, color="white", linewidth=4)
        if named and (i == 0 or name != families[i - 1]):
            middle = i + (families.count(name) - 1) / 2
            axes.annotate(
                name,
                (1.02, middle),
                xycoords=("axes fraction", "data"),
                fontsize=8,
                color=harness.MUTED,
                va="center",
            )
