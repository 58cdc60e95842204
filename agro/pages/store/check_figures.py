"""Figures of the page of a store: counts and shares, from numbers that are counted already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from agro.io.numbers import count, tick
from agro.pages.run.axes import COLORS, FIRST, css, is_beside, name_axes
from agro.pages.run.figures import svg
from agro.pages.run.shares import SHARE, share_axes
from agro.pages.store.spread import BINS, Spread

MOST = 4  # series of a figure
MOST_BARS = 16
Key = tuple[tuple[str, str], ...]


def sizes(groups: Mapping[int, int]) -> Markup:
    """The share of groups by their number of responses."""
    total = sum(groups.values())
    figure, axes = share_axes(below=1)
    if len(groups) <= MOST_BARS:
        names = sorted(groups)
        axes.bar(range(len(names)), [groups[n] / total for n in names], 0.7, color=FIRST)
        axes.set_xticks(range(len(names)), [str(n) for n in names])
        axes.set_xlim(-0.8, max(len(names), 2) - 0.2)
    else:
        values, weights = np.array(sorted(groups)), np.array([groups[n] / total for n in sorted(groups)])
        edges = np.linspace(values[0] - 0.5, values[-1] + 0.5, BINS + 1)
        axes.stairs(np.histogram(values, edges, weights=weights)[0], edges, fill=True, color=FIRST, alpha=0.6)
    axes.set_ylim(bottom=0)
    name_axes(axes, "responses in a group", "share of groups")
    return svg(figure, "group sizes")


def spreads(series: Mapping[str, Spread], unit: str, title: str, *, log: bool = False) -> Markup:
    """Shares of each of the series, which have the same edges; bars where all have few distinct values."""
    figure, axes = share_axes(below=int(not is_beside(unit)))
    shown = list(series.values())[:MOST]
    values = sorted({value for spread in shown for value in spread.values})
    if values and len(values) <= 2 * MOST and all(spread.values for spread in shown):
        _bars(axes, shown, values)
    else:
        _stairs(axes, shown, log=log)
    axes.set_ylim(bottom=0)
    name_axes(axes, unit, SHARE)
    return svg(figure, title)


def group_shares(spread: Spread, unit: str) -> Markup:
    """Shares of groups by a number from 0 to 1."""
    figure, axes = share_axes()
    _fill(axes, np.array(spread.bins) / spread.count, np.array(spread.edges), FIRST)
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    _scale(axes, log=False)
    name_axes(axes, unit, "share of groups")
    return svg(figure, unit)


def key(series: Mapping[str, Spread]) -> Key:
    """Colors and names of the series, the first `MOST`; empty for a single one."""
    if len(series) < 2:
        return ()
    shown = list(series.items())[:MOST]
    return tuple((css(COLORS[i]), f"{name:.40}, {count(s.count)}") for i, (name, s) in enumerate(shown))


def densities(series: Mapping[str, Any], unit: str, title: str, *, log: bool = False) -> Markup:
    """Shares of arrays of numbers, in common bins."""
    finite = {name: values[np.isfinite(values)] for name, values in series.items()}
    every = np.concatenate(list(finite.values()))
    if log:
        edges = np.geomspace(every.min(), every.max() * (1 + 1e-9), BINS + 1)
    else:
        edges = np.histogram_bin_edges(every, BINS)
    figure, axes = share_axes(below=int(not is_beside(unit)))
    for color, values in zip(COLORS, finite.values(), strict=False):
        _fill(axes, np.histogram(values, edges)[0] / max(len(values), 1), edges, color)
    axes.set_xlim(edges[0], edges[-1])
    _scale(axes, log=log)
    axes.set_ylim(bottom=0)
    name_axes(axes, unit, "share")
    return svg(figure, title)


def _bars(axes: Any, shown: Sequence[Spread], values: Sequence[float]) -> None:
    width = 0.8 / len(shown)
    for i, (spread, color) in enumerate(zip(shown, COLORS, strict=False)):
        heights = [spread.values[value] / spread.count for value in values]
        positions = np.arange(len(values)) + (i - (len(shown) - 1) / 2) * width
        axes.bar(positions, heights, 0.95 * width, color=color)
    axes.set_xticks(range(len(values)), [f"{value:.4g}" for value in values])
    axes.set_xlim(-0.6, max(len(values), 2) - 0.4)


def _stairs(axes: Any, shown: Sequence[Spread], *, log: bool) -> None:
    edges = np.array(shown[0].edges, np.float64)
    bins = np.array([spread.bins for spread in shown], np.float64)
    used = np.flatnonzero(bins.sum(0))
    start, end = used[0], used[-1] + 1
    for spread, counts, color in zip(shown, bins, COLORS, strict=False):
        _fill(axes, counts[start:end] / max(spread.count, 1), edges[start : end + 1], color)
    axes.set_xlim(edges[start], edges[end])
    _scale(axes, log=log)


def _fill(axes: Any, share: Any, edges: Any, color: str) -> None:
    axes.stairs(share, edges, fill=True, color=color, alpha=0.22)
    axes.stairs(share, edges, color=color, linewidth=1.3)


def _scale(axes: Any, *, log: bool) -> None:
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(tick))


def names(series: Mapping[str, Any]) -> Key:
    """Colors and names of series."""
    return tuple((css(color), name) for color, name in zip(COLORS, series, strict=False))
