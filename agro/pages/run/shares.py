"""Figures of shares: distributions of rewards and lengths, and the sources of the training data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from agro.io.numbers import percent_tick, tick
from agro.pages.run.axes import COLORS, FIRST, MUTED, NICE, PANEL, is_beside, margins, name_axes, style_axes
from agro.pages.run.figures import name_phases
from agro.runs.rundata import RunData, Values

SINGLE = 8  # distinct values that get a bar each
BINS = 24
COLUMNS = 60  # of sources over steps
SHARE = "share of responses"


def histogram(begin: Values, end: Values, unit: str, *, integer: bool = False) -> Figure:
    """Shares of `begin` (gray) and `end` (blue), neither empty. `integer`: the values are whole numbers."""
    figure, axes = share_axes(below=int(not is_beside(unit)))
    values = np.unique(np.concatenate([begin, end]))
    parts = ((begin, MUTED), (end, FIRST))
    if len(values) <= SINGLE and not integer:
        for side, (part, color) in enumerate(parts):
            heights = [(part == v).mean() for v in values]
            axes.bar(np.arange(len(values)) + (side - 0.5) * 0.38, heights, 0.36, color=color)
        axes.set_xticks(range(len(values)), [f"{v:.4g}" for v in values])
        axes.set_xlim(-0.6, max(len(values), 2) - 0.4)
    else:
        edges = bin_edges(values, integer)
        for part, color in parts:
            share = np.histogram(part, edges)[0] / len(part)
            axes.stairs(share, edges, fill=True, color=color, alpha=0.22)
            axes.stairs(share, edges, color=color, linewidth=1.3)
        axes.set_xlim(edges[0], edges[-1])
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=integer))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
    axes.set_ylim(bottom=0)
    name_axes(axes, unit, SHARE)
    return figure


def bin_edges(values: Values, integer: bool) -> Values:
    """Edges of about `BINS` bins over `values`. Bins of whole numbers contain equally many of them."""
    if not integer:
        return np.histogram_bin_edges(values, BINS)
    low, high = float(values.min()), float(values.max())
    width = math.ceil((high - low + 1) / BINS)
    return np.arange(low - 0.5, high + 0.5 + width, width)


def sources(run: RunData, steps: Values, labels: Sequence[int], count: int) -> Figure:
    """Stacked shares of `count` sources over steps.

    Args:
        run: the run, whose phases bound the bins.
        steps: the step of each draw.
        labels: the source of each draw, from 0.
        count: the number of sources.
    """
    figure, axes = share_axes()
    end = max(1, run.steps)
    width = math.ceil(end / COLUMNS)
    bounds = [e for s in run.spans for e in range(s.begins, s.ends, width)]  # no bin spans two phases
    edges = np.array([*bounds, end])
    source_steps = [steps[np.array(labels) == i] for i in range(count)]
    counts = np.array([np.histogram(part, edges + 0.5)[0] for part in source_steps], np.float64)
    total = counts.sum(0)
    shares = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    below = np.zeros_like(total)
    for color, top in zip(COLORS, np.cumsum(shares, 0), strict=False):
        axes.stairs(top, edges, baseline=below, fill=True, color=color, alpha=0.8, linewidth=0)
        below = top
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1)
    rows = name_phases(axes, run, run.column("step"), PANEL)
    axes.set_position(margins(PANEL, [], rows + 1))
    name_axes(axes, "step", SHARE, rows)
    return figure


def share_axes(below: int = 0) -> tuple[Figure, Any]:
    figure = Figure(figsize=PANEL)
    axes: Any = figure.add_axes(margins(PANEL, [], 1, below))
    style_axes(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(percent_tick))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=NICE))
    return figure, axes
