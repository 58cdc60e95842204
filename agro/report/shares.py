"""Figures of shares: how rewards and lengths are spread, and where what was trained on comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from agro.report.figures import (
    COLOURS,
    FIRST,
    MUTED,
    PANEL,
    Axis,
    beside,
    margins,
    name_axes,
    percent_of,
    phases,
    plain_axes,
    short,
)
from agro.report.metrics import RunData, Values

SINGLE = 8  # distinct values that get a bar of their own
BINS = 24
COLUMNS = 60  # of sources over steps


def spread(
    begin: Values, end: Values, unit: str, *, whole: bool = False, size: tuple[float, float] = PANEL
) -> Figure:
    """Shares of `begin` (grey) and `end` (blue), neither empty. `whole`: the values are whole numbers."""
    figure, axes = _shares(size, below=int(not beside(unit)))
    values = np.unique(np.concatenate([begin, end]))
    if len(values) <= SINGLE and not whole:
        for side, (part, colour) in enumerate(((begin, MUTED), (end, FIRST))):
            heights = [(part == v).mean() for v in values]
            axes.bar(np.arange(len(values)) + (side - 0.5) * 0.38, heights, 0.36, color=colour)
        axes.set_xticks(range(len(values)), [f"{v:.4g}" for v in values])
        axes.set_xlim(-0.6, max(len(values), 2) - 0.4)
    else:
        edges = bins(values, whole)
        for part, colour in ((begin, MUTED), (end, FIRST)):
            share = np.histogram(part, edges)[0] / len(part)
            axes.stairs(share, edges, fill=True, color=colour, alpha=0.22)
            axes.stairs(share, edges, color=colour, linewidth=1.3)
        axes.set_xlim(edges[0], edges[-1])
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole))
        axes.xaxis.set_major_formatter(FuncFormatter(short))
    axes.set_ylim(bottom=0)
    name_axes(axes, unit, "share of responses")
    return figure


def bins(values: Values, whole: bool) -> Values:
    """Edges that hold all `values`, about `BINS` bins; of whole numbers each holds equally many."""
    low, high = float(values.min()), float(values.max())
    if whole:
        width = math.ceil((high - low + 1) / BINS)
        return np.arange(low - 0.5, high + 0.5 + width, width)
    return np.histogram_bin_edges(values, BINS)


def sources(
    run: RunData, steps: Values, labels: Sequence[int], count: int, size: tuple[float, float] = PANEL
) -> Figure:
    """Shares of `count` sources over steps, stacked. `labels`: of each draw its source, from 0; `steps`: its step."""
    figure, axes = _shares(size)
    last = max(1, run.spans[-1].ends)
    width = math.ceil(last / COLUMNS)
    edges = np.array(
        [*(e for s in run.spans for e in range(s.begins, s.ends, width)), last]
    )  # none lies over two phases
    counts = np.array(
        [np.histogram(steps[np.array(labels) == i], edges + 0.5)[0] for i in range(count)], np.float64
    )
    total = counts.sum(0)
    tops = np.cumsum(np.divide(counts, total, out=np.zeros_like(counts), where=total > 0), 0)
    below = np.zeros_like(total)
    for i, top in enumerate(tops):
        axes.stairs(top, edges, baseline=below, fill=True, color=COLOURS[i], alpha=0.8, linewidth=0)
        below = top
    axes.set_xlim(0, last)
    axes.set_ylim(0, 1)
    rows = phases(axes, run, run.column("step"), size)
    axes.set_position(margins(size, [], rows + 1))
    name_axes(axes, Axis.steps(run).label, "share of responses", rows)
    return figure


def _shares(size: tuple[float, float], below: int = 0) -> tuple[Figure, Any]:
    figure = Figure(figsize=size)
    axes: Any = figure.add_axes(margins(size, [], 1, below))
    plain_axes(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(percent_of))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    return figure, axes
