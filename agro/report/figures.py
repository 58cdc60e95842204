"""The figures of a run, drawn once and coloured by their surroundings.

An SVG's colours become CSS variables, so that a page shows it light or dark; a PNG keeps the light ones.
Blue and vermilion are Okabe and Ito's, which colour-blind people tell apart.
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

from agro.report.metrics import RunData, Span

INK, MUTED, GRID, BAND = "#1b1b1f", "#6b6f76", "#dfe1e5", "#f3f4f6"
FIRST, SECOND = "#0072b2", "#d55e00"
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", BAND: "band", FIRST: "first", SECOND: "second"}
WIDE, NARROW = (7.6, 3.3), (3.7, 2.9)  # inches
PANEL = (3.7, 2.1)
FONT = 8.0  # points

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    label: str
    values: Values  # one a row of the metrics; NaN: a gap
    colour: str = FIRST
    se: Values | None = None  # standard errors
    points: bool = False  # measured now and then: marked, and joined over gaps
    smooth: int = 1  # rows in the running mean that is drawn over the values


def smoothing(rows: int) -> int:
    """An odd number of rows, about a fortieth of the run."""
    return max(1, rows // 40) | 1 if rows >= 40 else 1


def learning_curve(run: RunData, size: tuple[float, float] = WIDE, *, titled: bool = False) -> Figure:
    """Training and held-out reward against steps, phases shaded and named."""
    series = [
        Series("training", run.column("reward_mean"), smooth=smoothing(len(run.rows))),
        Series("held-out", run.column("eval_reward"), SECOND, run.column("eval_reward_se"), points=True),
    ]
    figure = draw(run, series, size, unit="reward", titled=titled)
    _ends(figure.axes[0], run, size)
    return figure


def draw(
    run: RunData,
    series: Sequence[Series],
    size: tuple[float, float] = PANEL,
    *,
    unit: str = "",
    scale: str = "linear",
    percent: bool = False,
    titled: bool = False,
) -> Figure:
    """`series` against the run's steps. `scale`: linear, or log (symmetric around 0, for a 0 is a value too)."""
    steps = run.column("step")
    known = [s for s in series if np.isfinite(s.values).any()]
    figure = Figure(figsize=size)
    labels = [s.label for s in known] if len(known) > 1 else []
    axes = figure.add_axes(margins(size, labels))
    plain_axes(axes)
    axes.set_xlim(0, max(1.0, steps[-1]))
    ends = [_line(axes, steps, s, run.spans) for s in known]
    scale_axes(axes, np.concatenate([s.values for s in known]), scale, percent)
    rows = _phases(axes, run.spans, size)
    axes.set_position(margins(size, labels, rows + (unit != "")))
    if unit:
        axes.annotate(
            unit, (0, 1), (0, 4 + rows * 1.4 * FONT), xycoords="axes fraction", textcoords="offset points",
            color=INK if titled else MUTED, fontsize=FONT, ha="left", va="bottom", fontweight="bold" if titled else None,
        )  # fmt: skip
    axes.annotate(
        "step", (1, 0), (4, -4), xycoords="axes fraction", textcoords="offset points",
        color=MUTED, fontsize=FONT, ha="left", va="top",
    )  # fmt: skip
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


def margins(size: tuple[float, float], labels: Sequence[str], rows: int = 0) -> tuple[float, float, float, float]:
    """Room for tick labels, for names of series on the right and rows of text above: (left, bottom, width, height)."""
    width, height = size[0] * 72, size[1] * 72
    right = max([26.0, *(8 + 0.58 * FONT * len(label) for label in labels)])
    left, bottom, top = 30.0, 20.0, 8 + rows * 1.4 * FONT
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


def _line(axes: Any, steps: Values, s: Series, spans: Sequence[Span]) -> float:
    """Draw one series and return the height of its last point."""
    known = np.isfinite(s.values)
    if s.points:
        x, y = steps[known], s.values[known]
        axes.plot(x, y, color=s.colour, linewidth=1.4, clip_on=False)
        if s.se is not None:
            axes.errorbar(x, y, s.se[known], fmt="none", ecolor=s.colour, elinewidth=1.0, capsize=0, clip_on=False)
        axes.plot(x, y, "o", color=s.colour, markersize=3.6, markeredgewidth=0, clip_on=False)
        return float(y[-1])
    end = math.nan
    for span in spans:  # a phase trains on other data, so no line leads from one to the next
        inside = (steps > (-1 if span is spans[0] else span.begins)) & (steps <= span.ends)
        x, y = steps[inside], s.values[inside]
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


def _ends(axes: Any, run: RunData, size: tuple[float, float]) -> None:
    """The held-out reward in numbers where phases begin and end, the last first; none over another or on its line."""
    steps, values = run.column("step"), run.column("eval_reward")
    bounds = {s.begins for s in run.spans} | {s.ends for s in run.spans}
    to_axes, box = axes.transScale + axes.transLimits, axes.get_position()
    width, height = 2.8 * FONT, 1.3 * FONT
    placed: list[tuple[float, float]] = []
    known = np.flatnonzero(np.isfinite(values))
    for at in range(len(known) - 1, -1, -1):
        step, value = steps[known[at]], values[known[at]]
        if step not in bounds:
            continue
        x, y = to_axes.transform((step, value)) * (size[0] * 72 * box.width, size[1] * 72 * box.height)
        last = step == run.spans[-1].ends
        other = known[max(0, at - 1) if last else min(at + 1, len(known) - 1)]  # where the line beside the number leads
        above = y < 1.5 * FONT or values[other] < value
        corner = (x - width if last else x, y if above else y - height)
        if any(abs(corner[0] - a) < width and abs(corner[1] - b) < height for a, b in placed):
            continue
        placed.append(corner)
        axes.annotate(
            f"{value:.2f}", (step, value), (-3 if last else 3, 5 if above else -5), textcoords="offset points",
            color=SECOND, fontsize=FONT, fontweight="bold", ha="right" if last else "left", va="bottom" if above else "top",
        )  # fmt: skip


def scale_axes(axes: Any, values: Values, scale: str, percent: bool) -> None:
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    if scale == "log" and positive.size and values.min() >= 0 and values.max() > 20 * positive.min():
        floor = 10.0 ** math.floor(math.log10(positive.min()))
        axes.set_yscale("symlog", linthresh=floor)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0 if values.min() == 0 else max(floor, values.min() * 0.7), values.max() * 1.4)
        axes.yaxis.set_major_formatter(FuncFormatter(_power))
        return
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    low, high = (
        min(0.0, *axes.get_ylim(), values.min()) if values.min() < 0 else 0.0,
        max(values.max(), axes.get_ylim()[1]),
    )
    axes.set_ylim(low, high if high > low else low + 1)
    axes.yaxis.set_major_formatter(FuncFormatter(_percent if percent else _short))


def _short(value: float, _: Any = None) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{round(value, 10):g}"


def _percent(value: float, _: Any = None) -> str:
    return f"{round(100 * value, 8):g}%"


def _power(value: float, _: Any = None) -> str:
    if value == 0:
        return "0"
    return f"{value:g}" if 1e-3 <= value < 1e4 else f"1e{math.floor(math.log10(value) + 0.5)}"


def _phases(axes: Any, spans: Sequence[Span], size: tuple[float, float]) -> int:
    """Shade every second phase and name each above the axes; the number of rows that the names take."""
    if len(spans) < 2:
        return 0
    last = max(1.0, spans[-1].ends)
    points = size[0] * 72 * axes.get_position().width
    free = [0.0, 0.0, 0.0]  # where each row of names is free, in points
    used = 0
    for i, span in enumerate(spans):
        if i % 2:
            axes.axvspan(span.begins, span.ends, color=BAND, linewidth=0, zorder=0)
        width = 0.6 * FONT * (len(span.name) + 1)
        start = min(span.begins / last * points, max(0.0, points - width))
        row = next((r for r, end in enumerate(free) if start >= end - 0.01), len(free) - 1)
        free[row], used = start + width, max(used, row + 1)
        axes.annotate(
            span.name, (start / points, 1), (2, 3 + row * 1.4 * FONT), xycoords="axes fraction", textcoords="offset points",
            color=INK, fontsize=FONT, ha="left", va="bottom", parse_math=False,
        )  # fmt: skip
    return used


def name_series(axes: Any, size: tuple[float, float], ends: Sequence[tuple[Series, float]]) -> None:
    """Name each series at its end on the right, moved apart where they would overlap."""
    height = size[1] * 72 * axes.get_position().height
    to_axes = axes.transScale + axes.transLimits
    heights_of = [float(to_axes.transform((0, y))[1]) * height for _, y in ends]
    placed = sorted(zip(heights_of, [s for s, _ in ends], strict=True), key=lambda item: item[0])
    heights = apart([at for at, _ in placed], 1.25 * FONT)
    for at, (_, s) in zip(heights, placed, strict=True):
        axes.annotate(
            s.label, (1, 0), (5, at), xycoords="axes fraction", textcoords="offset points",
            color=s.colour, fontsize=FONT, ha="left", va="center",
        )  # fmt: skip


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
