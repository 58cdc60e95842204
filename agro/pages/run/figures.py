"""Metrics against steps, as a figure. It is drawn once and colored by its page.

An SVG's colors become CSS variables, so that a page shows it in both color schemes. A PNG has the light ones.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from numpy.typing import NDArray

from agro.io.numbers import percent, short
from agro.pages.run.axes import (
    BAND,
    FIRST,
    FONT,
    INK,
    LINE,
    PANEL,
    VARIABLES,
    Size,
    css,
    cut,
    is_beside,
    label,
    margins,
    name_axes,
    name_series,
    scale_axes,
    style_axes,
)
from agro.pages.run.hover import HoverColumn, hover
from agro.runs.rundata import PhaseSpan, RunData, Values

UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))  # of time, and their seconds
COLUMNS = 60  # of a figure, at most, that show their values


@dataclass(frozen=True)
class Series:
    """One line of a figure. `values`: one per row of the metrics; NaN is a gap. `se`: their standard errors.

    `points`: measured at some steps only, so marked, and joined over gaps; with `split` not between phases.
    `mark`: the row of a point with a ring around it.
    `smooth`: rows of the running mean that is drawn over the values.
    """

    label: str
    values: Values
    color: str = FIRST
    se: Values | None = None
    points: bool = False
    split: bool = False
    smooth: int = 1
    mark: int | None = None


@dataclass(frozen=True)
class Axis:
    """The x axis. `values`: one per row of the metrics, known and never falling."""

    values: Values
    label: str

    @classmethod
    def steps(cls, run: RunData) -> Axis:
        return cls(run.column("step"), "step")

    @classmethod
    def time(cls, run: RunData) -> Axis | None:
        """The time of the steps up to each row, in a unit that suits it; None where it wasn't measured."""
        total = run.total("seconds")
        if not total:
            return None
        unit, length = next((u for u in UNITS if total >= 3 * u[1]), UNITS[-1])
        return cls(np.nancumsum(run.column("seconds")) / length, unit)


@dataclass(frozen=True)
class Look:
    """How a figure is drawn. `unit`: the label of the y axis."""

    unit: str = ""
    log: bool = False
    percent: bool = False


PLAIN = Look()


def draw(
    run: RunData,
    series: Sequence[Series],
    size: Size = PANEL,
    look: Look = PLAIN,
    axis: Axis | None = None,
) -> Figure:
    """The series that have values, against `axis` (steps by default), with the run's phases."""
    axis = axis or Axis.steps(run)
    shown = [s for s in series if np.isfinite(s.values).any()]
    labels = [s.label for s in shown] if len(shown) > 1 else []
    figure = Figure(figsize=size)
    axes: Any = figure.add_axes(margins(size, labels))
    style_axes(axes)
    axes.set_xlim(0, max(1.0, axis.values[-1]))
    ends = [(s.label, s.color, _line(axes, run, axis.values, s)) for s in shown]
    scale_axes(axes, np.concatenate([s.values for s in shown]), log=look.log, percent=look.percent)
    rows = name_phases(axes, run, axis.values, size)
    above = rows + (look.unit != "")
    axes.set_position(margins(size, labels, above, below=int(not is_beside(axis.label))))
    name_axes(axes, axis.label, look.unit, rows)
    if labels:
        name_series(axes, size, ends)
    return figure


def picture(run: RunData, series: Sequence[Series], name: str, look: Look = PLAIN) -> Markup:
    """The series against steps, as an element of a page that shows their values under the pointer."""
    figure = draw(run, series, PANEL, look)
    return svg(figure, name, hover(figure.axes[0], columns(run, series, look=look)))


def columns(
    run: RunData, series: Sequence[Series], axis: Axis | None = None, look: Look = PLAIN
) -> list[HoverColumn]:
    """The values of up to `COLUMNS` rows: those where a series of points was measured, else evenly spread."""
    axis = axis or Axis.steps(run)
    shown = [s for s in series if np.isfinite(s.values).any()]
    known_rows = np.flatnonzero(np.any([np.isfinite(s.values) for s in shown], axis=0))
    measured = np.flatnonzero(np.any([np.isfinite(s.values) & s.points for s in shown], axis=0))
    lines_drawn = [_smoothed(run, s) for s in shown]
    hover_columns = []
    for part in np.array_split(known_rows, min(COLUMNS, len(known_rows))):
        row = int(next((r for r in reversed(part) if r in measured), part[len(part) // 2]))
        title = f"step {run.rows[row]['step']}"
        if axis.label != "step":
            title += f", {short(axis.values[row])} {axis.label}"
        lines = []
        for s, values in zip(shown, lines_drawn, strict=True):
            if np.isfinite(values[row]):
                value = percent(values[row], 1) if look.percent else short(values[row])
                lines.append((f"{s.label} {value}" if len(shown) > 1 else value, css(s.color)))
        hover_columns.append(HoverColumn(float(axis.values[row]), title, tuple(lines)))
    return hover_columns


def _smoothed(run: RunData, s: Series) -> Values:
    """The values of a series as its line has them: a running mean within each phase."""
    values = s.values.copy()
    if not s.points:
        for span in run.spans:
            rows = rows_of_phase(run, span)
            values[rows] = running_mean(values[rows], s.smooth)
    return values


def svg(figure: Figure, name: str, over: str = "") -> Markup:
    """The figure as an element of a page: no header, no size, colors from the page's variables.

    `over`: elements that are drawn over it.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    text = re.sub(r'(<g) id="[^"]*"', r"\1", text)  # the same in every figure; nothing refers to them
    head, body = text.split(">", 1)
    text = re.sub(r' (?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", head) + ">" + body
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return Markup(text.strip().removesuffix("</svg>") + over + "</svg>")


def png(figure: Figure, path: Path) -> None:
    for text in figure.findobj(Text):
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    figure.savefig(path, format="png", dpi=200, facecolor="white")


def rows_of_phase(run: RunData, span: PhaseSpan) -> NDArray[np.bool_]:
    """The rows of a phase. An evaluation at step 0 belongs to the first one."""
    steps = run.column("step")
    start = -1 if span.begins == 0 else span.begins
    return (steps > start) & (steps <= span.ends)


def _line(axes: Any, run: RunData, x: Values, s: Series) -> float:
    """Draw one series and return the height of its last point."""
    if s.points:
        return _points(axes, run, x, s)
    end, means = math.nan, _smoothed(run, s)
    for span in run.spans:  # a phase trains on other data, so no line joins two of them
        rows = rows_of_phase(run, span)
        mean = means[rows]
        if s.smooth > 1:
            axes.plot(x[rows], s.values[rows], color=s.color, linewidth=0.6, alpha=0.35)
        axes.plot(x[rows], mean, color=s.color, linewidth=1.6 if s.smooth > 1 else 1.4)
        gap = np.isnan(np.concatenate([[math.nan], mean, [math.nan]]))
        alone = ~gap[1:-1] & gap[:-2] & gap[2:]
        axes.plot(x[rows][alone], mean[alone], "o", color=s.color, markersize=2.4, markeredgewidth=0)
        finite = mean[~np.isnan(mean)]
        if finite.size:
            end = float(finite[-1])
    return end


def _points(axes: Any, run: RunData, x: Values, s: Series) -> float:
    finite = np.isfinite(s.values)
    parts = [finite]
    if s.split:
        parts = [finite & rows_of_phase(run, span) for span in run.spans]
    for part in parts:
        axes.plot(x[part], s.values[part], color=s.color, linewidth=1.4, clip_on=False)
    x_known, y = x[finite], s.values[finite]
    if s.se is not None:
        error = {"fmt": "none", "ecolor": s.color, "elinewidth": 1.0, "capsize": 0, "clip_on": False}
        axes.errorbar(x_known, y, s.se[finite], **error)
    axes.plot(x_known, y, "o", color=s.color, markersize=3.6, markeredgewidth=0, clip_on=False)
    if s.mark is not None:
        ring = {"markersize": 9, "markerfacecolor": "none", "markeredgecolor": s.color, "clip_on": False}
        axes.plot(x[s.mark], s.values[s.mark], "o", **ring)
    return float(y[-1])


def running_mean(values: Values, width: int) -> Values:
    """The mean of up to `width` known values around each one. Unknown ones stay unknown and don't count."""
    rows = np.flatnonzero(np.isfinite(values))
    means = np.full_like(values, math.nan)
    for i, row in enumerate(rows):
        means[row] = values[rows[max(0, i - width // 2) : i + width // 2 + 1]].mean()
    return means


def name_phases(axes: Any, run: RunData, x: Values, size: Size) -> int:
    """Shade every second phase and name each above the axes. Returns the lines that the names take."""
    if len(run.spans) < 2:
        return 0
    extent = max(1.0, x[-1])
    points = size[0] * 72 * axes.get_position().width
    free = [0.0, 0.0, 0.0]  # where each line of names is free, in points
    used, ends = 0, 0.0
    for i, span in enumerate(run.spans):
        begins, ends = ends, float(x[rows_of_phase(run, span)][-1])
        if i % 2:
            axes.axvspan(begins, ends, color=BAND, linewidth=0, zorder=0)
        name = cut(span.name)
        width = 0.6 * FONT * (len(name) + 1)
        start = min(begins / extent * points, max(0.0, points - width))
        row = next((r for r, end in enumerate(free) if start >= end - 0.01), len(free) - 1)
        free[row], used = start + width, max(used, row + 1)
        label(axes, name, (start / points, 1), (2, 3 + row * LINE), color=INK)
    return used
