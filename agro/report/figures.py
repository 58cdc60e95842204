"""The figures of a run, drawn once and coloured by their surroundings.

An SVG's colours become CSS variables, so that a page shows it light or dark; a PNG keeps the light ones.
The colours of series are Okabe and Ito's, which colour-blind people tell apart.
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
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from agro.report.metrics import RunData, Span, Values

INK, MUTED, GRID, BAND = "#1b1b1f", "#6b6f76", "#dfe1e5", "#f3f4f6"
FIRST, SECOND = "#0072b2", "#d55e00"
COLOURS = (FIRST, SECOND, "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # neighbours differ most
NAMES = ("first", "second", "third", "fourth", "fifth", "sixth")
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", BAND: "band", **dict(zip(COLOURS, NAMES, strict=True))}
WIDE, NARROW = (7.6, 3.3), (3.7, 2.9)  # inches
PANEL = (3.7, 2.1)
FONT = 8.0  # points


@dataclass(frozen=True)
class Series:
    label: str
    values: Values  # one a row of the metrics; NaN: a gap
    colour: str = FIRST
    se: Values | None = None  # standard errors
    points: bool = False  # measured now and then: marked, and joined over gaps
    split: bool = False  # such points aren't joined over the ends of phases
    smooth: int = 1  # rows in the running mean that is drawn over the values


@dataclass(frozen=True)
class Axis:
    """What lies to the right. `values`: one a row of the metrics, never falling, known in all."""

    values: Values
    label: str

    @classmethod
    def steps(cls, run: RunData) -> Axis:
        return cls(run.column("step"), "step")


def draw(
    run: RunData,
    series: Sequence[Series],
    size: tuple[float, float] = PANEL,
    *,
    axis: Axis | None = None,
    unit: str = "",
    scale: str = "linear",
    percent: bool = False,
    titled: bool = False,
) -> Figure:
    """`series` against steps, unless `axis` says otherwise. `scale`: linear, or log (symmetric around 0, a value too)."""
    axis = axis or Axis.steps(run)
    known = [s for s in series if np.isfinite(s.values).any()]
    figure = Figure(figsize=size)
    labels = [s.label for s in known] if len(known) > 1 else []
    axes = figure.add_axes(margins(size, labels))
    plain_axes(axes)
    axes.set_xlim(0, max(1.0, axis.values[-1]))
    ends = [_line(axes, run, axis.values, s) for s in known]
    scale_axes(axes, np.concatenate([s.values for s in known]), scale, percent)
    rows = phases(axes, run, axis.values, size)
    axes.set_position(margins(size, labels, rows + (unit != ""), below=int(not beside(axis.label))))
    name_axes(axes, axis.label, unit, rows, bold=titled)
    if len(known) > 1:
        name_series(axes, size, [(s, y) for s, y in zip(known, ends, strict=True)])
    return figure


def svg(figure: Figure, name: str) -> str:
    """The figure as an element of a page: no header, no width, colours from the page's variables."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    text = re.sub(r'(<g) id="[^"]*"', r"\1", text)  # the same in every figure; nothing refers to them
    text = (
        re.sub(r' (?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", text[: text.index(">")])
        + text[text.index(">") :]
    )
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.strip()


def png(figure: Figure, path: Path) -> None:
    for text in figure.findobj(Text):
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    figure.savefig(path, format="png", dpi=200, facecolor="white")


def margins(
    size: tuple[float, float], labels: Sequence[str], rows: int = 0, below: int = 0
) -> tuple[float, float, float, float]:
    """(left, bottom, width, height) with room for tick labels, names of series on the right, rows of text above and below."""
    width, height = size[0] * 72, size[1] * 72
    right = max([30.0, *(8 + 0.58 * FONT * len(label) for label in labels)])
    left, bottom, top = 30.0, 20.0 + below * 1.4 * FONT, 8 + rows * 1.4 * FONT
    return left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height


def plain_axes(axes: Any) -> None:
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.spines["bottom"].set_linewidth(0.6)
    axes.tick_params(length=0, labelsize=FONT, labelcolor=MUTED, pad=3)
    axes.patch.set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(short))


def name_axes(axes: Any, right: str, up: str, rows: int = 0, *, bold: bool = False) -> None:
    """The unit above the axes, over `rows` of other text, and what lies to the right under their right end."""
    if up:
        axes.annotate(
            up,
            (0, 1),
            (0, 4 + rows * 1.4 * FONT),
            xycoords="axes fraction",
            textcoords="offset points",
            color=INK if bold else MUTED,
            fontsize=FONT,
            ha="left",
            va="bottom",
            fontweight="bold" if bold else None,
        )
    there = beside(right)
    axes.annotate(
        right,
        (1, 0),
        (10, -4) if there else (0, -16),
        xycoords="axes fraction",
        textcoords="offset points",
        color=MUTED,
        fontsize=FONT,
        ha="left" if there else "right",
        va="top",
    )


def cut(name: str, longest: int = 20) -> str:
    """A name that somebody gave, short enough for a figure."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def beside(label: str) -> bool:
    """Whether what lies to the right is said beside the tick labels; a longer text stands under them."""
    return len(label) <= 5


def inside(run: RunData, span: Span) -> NDArray[np.bool_]:
    """The rows of a phase; an evaluation at step 0 is the first one's."""
    steps = run.column("step")
    return (steps > (-1 if span.begins == 0 else span.begins)) & (steps <= span.ends)


def _line(axes: Any, run: RunData, right: Values, s: Series) -> float:
    """Draw one series and return the height of its last point."""
    known = np.isfinite(s.values)
    if s.points:
        x, y = right[known], s.values[known]
        for part in [known & inside(run, span) for span in run.spans] if s.split else [known]:
            axes.plot(right[part], s.values[part], color=s.colour, linewidth=1.4, clip_on=False)
        if s.se is not None:
            axes.errorbar(
                x, y, s.se[known], fmt="none", ecolor=s.colour, elinewidth=1.0, capsize=0, clip_on=False
            )
        axes.plot(x, y, "o", color=s.colour, markersize=3.6, markeredgewidth=0, clip_on=False)
        return float(y[-1])
    end = math.nan
    for span in run.spans:  # a phase trains on other data, so no line leads from one to the next
        x, y = right[inside(run, span)], s.values[inside(run, span)]
        bold = running_mean(y, s.smooth)
        if s.smooth > 1:
            axes.plot(x, y, color=s.colour, linewidth=0.6, alpha=0.35)
        axes.plot(x, bold, color=s.colour, linewidth=1.4 if s.smooth == 1 else 1.6)
        gap = np.isnan(np.concatenate([[math.nan], bold, [math.nan]]))
        alone = ~gap[1:-1] & gap[:-2] & gap[2:]
        axes.plot(x[alone], bold[alone], "o", color=s.colour, markersize=2.4, markeredgewidth=0)
        last = bold[~np.isnan(bold)][-1:]
        end = float(last[0]) if last.size else end
    return end


def running_mean(values: Values, width: int) -> Values:
    """The mean of up to `width` known values around each. Unknown ones stay unknown and don't count."""
    rows = np.flatnonzero(np.isfinite(values))
    out = np.full_like(values, math.nan)
    for i, row in enumerate(rows):
        out[row] = values[rows[max(0, i - width // 2) : i + width // 2 + 1]].mean()
    return out


def scale_axes(axes: Any, values: Values, scale: str, percent: bool) -> None:
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    if scale == "log" and positive.size:
        floor = 10.0 ** math.floor(
            math.log10(np.quantile(positive, 0.05))
        )  # a few tiny values don't take up the figure
        if values.min() < 0:
            floor = max(floor, 10.0 ** math.ceil(math.log10(-values.min())))
        if values.max() > 20 * floor:
            low = (
                values.min() * 1.3 if values.min() < 0 else 0 if values.min() < floor else values.min() * 0.7
            )
            axes.set_yscale("symlog", linthresh=floor)
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_ylim(low, values.max() * 1.4)
            axes.yaxis.set_major_formatter(FuncFormatter(_power))
            return
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    low, high = (
        min(0.0, *axes.get_ylim(), values.min()) if values.min() < 0 else 0.0,
        max(values.max(), axes.get_ylim()[1]),
    )
    axes.set_ylim(low, high if high > low else low + 1)
    axes.yaxis.set_major_formatter(FuncFormatter(percent_of if percent else short))


def short(value: float, _: Any = None) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{round(value, 10):g}"


def percent_of(value: float, _: Any = None) -> str:
    return f"{round(100 * value, 8):g}%"


def _power(value: float, _: Any = None) -> str:
    if value == 0:
        return "0"
    return f"{value:g}" if 1e-3 <= abs(value) < 1e4 else f"1e{math.floor(math.log10(value) + 0.5)}"


def phases(axes: Any, run: RunData, right: Values, size: tuple[float, float]) -> int:
    """Shade every second phase and name each above the axes; the number of rows that the names take."""
    if len(run.spans) < 2:
        return 0
    last = max(1.0, right[-1])
    points = size[0] * 72 * axes.get_position().width
    free = [0.0, 0.0, 0.0]  # where each row of names is free, in points
    used, ends = 0, 0.0
    for i, span in enumerate(run.spans):
        begins, ends = ends, float(right[inside(run, span)][-1])
        if i % 2:
            axes.axvspan(begins, ends, color=BAND, linewidth=0, zorder=0)
        name = cut(span.name)
        width = 0.6 * FONT * (len(name) + 1)
        start = min(begins / last * points, max(0.0, points - width))
        row = next((r for r, end in enumerate(free) if start >= end - 0.01), len(free) - 1)
        free[row], used = start + width, max(used, row + 1)
        axes.annotate(
            name,
            (start / points, 1),
            (2, 3 + row * 1.4 * FONT),
            xycoords="axes fraction",
            textcoords="offset points",
            color=INK,
            fontsize=FONT,
            ha="left",
            va="bottom",
            parse_math=False,
        )
    return used


def name_series(axes: Any, size: tuple[float, float], ends: Sequence[tuple[Series, float]]) -> None:
    """Name each series at its end on the right, moved apart where they would overlap."""
    height = size[1] * 72 * axes.get_position().height
    to_axes = axes.transScale + axes.transLimits
    heights_of = [float(to_axes.transform((0, y))[1]) * height for _, y in ends]
    placed = sorted(zip(heights_of, [s for s, _ in ends], strict=True), key=lambda item: item[0])
    gap = 1.25 * FONT
    heights = apart([at for at, _ in placed], gap)
    for i in range(len(heights)):  # none on the name of the axis
        heights[i] = max(heights[i], 0.4 * FONT if i == 0 else heights[i - 1] + gap)
    for at, (_, s) in zip(heights, placed, strict=True):
        axes.annotate(
            s.label,
            (1, 0),
            (5, at),
            xycoords="axes fraction",
            textcoords="offset points",
            color=s.colour,
            fontsize=FONT,
            ha="left",
            va="center",
        )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """The rising heights nearest to the given rising ones, in squares, that lie `gap` apart at least.

    Less i · gap each, they need only not fall: neighbours that do are averaged, again and again.
    """
    blocks: list[tuple[float, int]] = []
    for i, height in enumerate(heights):
        mean, n = height - i * gap, 1
        while blocks and blocks[-1][0] > mean:
            other, m = blocks.pop()
            mean, n = (mean * n + other * m) / (n + m), n + m
        blocks.append((mean, n))
    level = [mean for mean, n in blocks for _ in range(n)]
    return [x + i * gap for i, x in enumerate(level)]
