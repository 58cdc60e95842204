"""The figures of pages: style, metrics against steps, histograms, and rewards against KL.

A figure is drawn once and colored by its page: an SVG's colors become CSS variables, so that it follows the
page's color scheme. A PNG has the light colors.
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
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from agro.io.numbers import percent_tick, power_tick, tick
from agro.runs.rundata import METRICS, PhaseSpan, RunData, Values

INK, MUTED, GRID, BAND = "#1b1b1f", "#6b6f76", "#dfe1e5", "#f3f4f6"
FIRST, SECOND = "#0072b2", "#d55e00"
# The color-blind-safe palette of Okabe and Ito, ordered so that neighbors differ most.
COLORS = (FIRST, SECOND, "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
NAMES = ("first", "second", "third", "fourth", "fifth", "sixth")
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", BAND: "band", **dict(zip(COLORS, NAMES, strict=True))}
WIDE, NARROW, PANEL = (7.6, 3.3), (3.7, 2.9), (3.7, 2.1)  # inches
FONT = 8.0  # points
LINE = 1.4 * FONT  # height of a line of text
NICE = [1, 2, 2.5, 5, 10]  # steps between ticks
BESIDE = 5  # longest x label, in characters, that is placed next to the tick labels

Size = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, width, height in fractions of the figure


def css(color: str) -> str:
    """Return the CSS variable of a color, which depends on the color scheme."""
    return f"var(--{VARIABLES[color]})"


def label(
    axes: Any, text: str, position: tuple[float, float], offset: tuple[float, float], **style: Any
) -> None:
    """Write text at `position`, in fractions of the axes, shifted by `offset` points."""
    style = {"color": MUTED, "ha": "left", "va": "bottom", "fontsize": FONT, "parse_math": False} | style
    axes.annotate(text, position, offset, xycoords="axes fraction", textcoords="offset points", **style)


def margins(size: Size, labels: Sequence[str], above: int = 0, below: int = 0) -> Box:
    """Return the box of axes, with room for `labels` on the right and lines of text above and below."""
    width, height = size[0] * 72, size[1] * 72
    right = max([30.0, *(8 + 0.7 * FONT * len(text) for text in labels)])
    margin, bottom, top = 30.0, 20.0 + below * LINE, 8 + above * LINE
    return margin / width, bottom / height, 1 - (margin + right) / width, 1 - (bottom + top) / height


def style_axes(axes: Any) -> None:
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.spines["bottom"].set_linewidth(0.6)
    axes.tick_params(length=0, labelsize=FONT, labelcolor=MUTED, pad=3)
    axes.patch.set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=NICE))
    axes.xaxis.set_major_formatter(FuncFormatter(tick))


def name_axes(axes: Any, x: str, y: str, above: int = 0, *, bold: bool = False) -> None:
    """Label both axes: `y` above `above` lines of other text, `x` next to the tick labels or below them."""
    if y:
        style: dict[str, Any] = {"color": INK, "fontweight": "bold"} if bold else {}
        label(axes, y, (0, 1), (0, 4 + above * LINE), **style)
    if len(x) <= BESIDE:
        label(axes, x, (1, 0), (10, -4), va="top")
    else:
        label(axes, x, (1, 0), (0, -16), ha="right", va="top")


def cut(name: str, longest: int) -> str:
    """Shorten a name for a figure."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def scale_axes(axes: Any, values: Values, *, log: bool = False, percent: bool = False) -> None:
    """Set limits and ticks of the y axis. `log`: symmetric logarithmic, if the values span enough."""
    values = values[np.isfinite(values)]
    lowest, highest, positive = values.min(), values.max(), values[values > 0]
    if log and positive.size:
        floor = 10.0 ** math.ceil(math.log10(max(positive.min(), -lowest)))  # ticks are powers of 10
        if highest > 10 * floor:
            axes.set_yscale("symlog", linthresh=floor)
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_ylim(lowest * (0.7 if lowest > 0 else 1.4), highest * 1.4)
            axes.yaxis.set_major_formatter(FuncFormatter(power_tick))
            return
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=NICE))
    axes.yaxis.set_major_formatter(FuncFormatter(percent_tick if percent else tick))
    low, high = axes.get_ylim()
    low, high = min(low, lowest) if lowest < 0 else 0.0, max(high, highest)
    axes.set_ylim(low, high if high > low else low + 1)


def name_series(axes: Any, size: Size, ends: Sequence[tuple[str, str, float]]) -> None:
    """Write each (label, color, y) at the right end of its series, moved apart to avoid overlaps."""
    height, gap = size[1] * 72 * axes.get_position().height, 1.25 * FONT
    transform = axes.transScale + axes.transLimits
    placed = [(float(transform.transform((0, y))[1]) * height, text, color) for text, color, y in ends]
    placed.sort(key=lambda item: item[0])
    lowest = 0.4 * FONT  # above the x label
    top = size[1] * 72 * (1 - axes.get_position().y0) - 0.75 * FONT  # of the figure
    highest = top - gap * (len(placed) - 1)  # of the lowest name, with room for the others
    for y, text, color in placed:
        y = max(lowest, min(y, highest))
        label(axes, text, (1, 0), (5, y), color=color, va="center")
        lowest, highest = y + gap, highest + gap


@dataclass(frozen=True)
class Series:
    """One line of a figure. `values`: one per row of the metrics; NaN is a gap. `se`: their standard errors.

    `points`: mark each value, for metrics of some steps only, and connect them across gaps, but not across
    phases if `split`. `mark`: the row of a point with a ring around it.
    `smooth`: window of the running mean that is drawn over the values, in rows.
    """

    label: str
    values: Values
    color: str = FIRST
    se: Values | None = None
    points: bool = False
    split: bool = False
    smooth: int = 1
    mark: int | None = None


def heldout(run: RunData, metric: str, label: str = "held-out", color: str = SECOND) -> Series:
    """Return the series of an evaluation metric, with its standard error if there is one."""
    error = f"{metric}_se"
    se = run.column(error) if error in METRICS else None
    split = metric == "eval_kl_ref" and run.policy.reference == "phase"
    return Series(label, run.column(metric), color, se, points=True, split=split, mark=run.mark(metric))


class NotebookFigure(Figure):
    """A figure that notebooks display without `%matplotlib inline`."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        png(self, buffer)
        return buffer.getvalue()


def draw(
    run: RunData,
    series: Sequence[Series],
    size: Size = PANEL,
    unit: str = "",
    *,
    log: bool = False,
    percent: bool = False,
) -> Figure:
    """Plot the series that have values against steps, with the run's phases. `unit`: label of the y axis."""
    steps = run.column("step")
    shown = [s for s in series if np.isfinite(s.values).any()]
    labels = [s.label for s in shown] if len(shown) > 1 else []
    figure = NotebookFigure(figsize=size)
    axes: Any = figure.add_axes(margins(size, labels))
    style_axes(axes)
    axes.set_xlim(0, max(1.0, steps[-1]))
    ends = [(s.label, s.color, _line(axes, run, s)) for s in shown]
    scale_axes(axes, np.concatenate([s.values for s in shown]), log=log, percent=percent)
    named = int(len(run.spans) > 1)
    axes.set_position(margins(size, labels, named + (unit != "")))
    if named:
        name_phases(axes, run, size)
    name_axes(axes, "step", unit, named)
    if labels:
        name_series(axes, size, ends)
    return figure


def svg(figure: Figure, name: str) -> Markup:
    """Render a figure as an inline SVG element: without header and size, colored by CSS variables."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    text = re.sub(r'(<g) id="[^"]*"', r"\1", text)  # ids repeat across figures; nothing refers to them
    head, body = text.split(">", 1)
    text = re.sub(r' (?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", head) + ">" + body
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return Markup(text.strip())


def png(figure: Figure, path: Path | io.BytesIO) -> None:
    for text in figure.findobj(Text):
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    figure.savefig(path, format="png", dpi=200, facecolor="white")


def rows_of_phase(run: RunData, span: PhaseSpan) -> NDArray[np.bool_]:
    """Mask the rows of a phase. An evaluation at step 0 belongs to the first one."""
    steps = run.column("step")
    start = -1 if span.begins == 0 else span.begins
    return (steps > start) & (steps <= span.ends)


def _line(axes: Any, run: RunData, s: Series) -> float:
    """Draw one series and return the height of its last point."""
    x = run.column("step")
    finite = np.isfinite(s.values)
    if s.points:
        parts = [finite & rows_of_phase(run, span) for span in run.spans] if s.split else [finite]
        for part in parts:
            axes.plot(x[part], s.values[part], color=s.color, linewidth=1.4, clip_on=False)
        if s.se is not None:
            error = {"fmt": "none", "ecolor": s.color, "elinewidth": 1.0, "capsize": 0, "clip_on": False}
            axes.errorbar(x[finite], s.values[finite], s.se[finite], **error)
        dots = {"color": s.color, "markersize": 3.6, "markeredgewidth": 0, "clip_on": False}
        axes.plot(x[finite], s.values[finite], "o", **dots)
        if s.mark is not None:
            ring = {"markersize": 9, "markerfacecolor": "none", "markeredgecolor": s.color, "clip_on": False}
            axes.plot(x[s.mark], s.values[s.mark], "o", **ring)
        return float(s.values[finite][-1])
    height = math.nan
    for span in run.spans:  # phases train on different data, so no line connects them
        rows = rows_of_phase(run, span)
        mean = running_mean(s.values[rows], s.smooth)
        if s.smooth > 1:
            axes.plot(x[rows], s.values[rows], color=s.color, linewidth=0.6, alpha=0.35)
        axes.plot(x[rows], mean, color=s.color, linewidth=1.6 if s.smooth > 1 else 1.4)
        gap = np.isnan(np.concatenate([[math.nan], mean, [math.nan]]))
        alone = ~gap[1:-1] & gap[:-2] & gap[2:]
        axes.plot(x[rows][alone], mean[alone], "o", color=s.color, markersize=2.4, markeredgewidth=0)
        height = next(iter(mean[np.isfinite(mean)][::-1]), height)
    return float(height)


def running_mean(values: Values, width: int) -> Values:
    """Average up to `width` finite values around each one. NaN values stay NaN and don't count."""
    rows = np.flatnonzero(np.isfinite(values))
    means = np.full_like(values, math.nan)
    for i, row in enumerate(rows):
        means[row] = values[rows[max(0, i - width // 2) : i + width // 2 + 1]].mean()
    return means


def name_phases(axes: Any, run: RunData, size: Size) -> None:
    """Shade every second phase and write its name above the axes if there is room."""
    extent = max(1.0, run.column("step")[-1])
    letters = size[0] * 72 * axes.get_position().width / (0.6 * FONT)  # that fit above the axes
    for i, span in enumerate(run.spans):
        if i % 2:
            axes.axvspan(span.begins, span.ends, color=BAND, linewidth=0, zorder=0)
        room = int((span.ends - span.begins) / extent * letters)
        if room:
            label(axes, cut(span.name, room), (span.begins / extent, 1), (2, 3), color=INK)


BINS = 24


def histogram(begin: Values, end: Values, unit: str) -> Figure:
    """Plot histograms of `begin` (gray) and `end` (blue), neither of them empty, as shares."""
    figure = Figure(figsize=PANEL)
    axes: Any = figure.add_axes(margins(PANEL, [], 1, below=int(len(unit) > BESIDE)))
    style_axes(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(percent_tick))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=NICE))
    edges = np.histogram_bin_edges(np.concatenate([begin, end]), BINS)
    for values, color in ((begin, MUTED), (end, FIRST)):
        heights = np.histogram(values, edges)[0] / len(values)
        axes.stairs(heights, edges, fill=True, color=color, alpha=0.22)
        axes.stairs(heights, edges, color=color, linewidth=1.3)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=NICE))
    name_axes(axes, unit, "share of responses")
    return figure


DOTS = 200  # maximal number of dots of training rewards against KL


def smoothing(rows: int) -> int:
    """Return an odd window of about a fortieth of the run, in rows."""
    return rows // 40 | 1 if rows >= 40 else 1


def reward_series(run: RunData) -> tuple[Series, Series]:
    """Return the series of training and held-out reward."""
    width = smoothing(len(run.rows))
    return Series("training", run.column("reward_mean"), smooth=width), heldout(run, "eval_reward")


def learning_curve(run: RunData, size: Size = WIDE) -> Figure:
    """Plot training and held-out reward against steps, with the phases."""
    return draw(run, reward_series(run), size, METRICS["reward_mean"].unit)


def kl_pairs(run: RunData) -> list[tuple[Series, Values]]:
    """Return (rewards, KL) of fresh training responses and of held-out ones, each if some row has both."""
    kls = run.training_kl, run.column("eval_kl_ref")
    return [(s, kl) for s, kl in zip(reward_series(run), kls) if np.isfinite(s.values + kl).any()]


def against_kl(run: RunData, size: Size = WIDE) -> Figure:
    """Plot reward against KL: a dot per few training steps, and a path through the held-out measurements,
    which restarts in each phase with its own reference."""
    pairs = kl_pairs(run)
    labels = [s.label for s, _ in pairs] if len(pairs) > 1 else []
    figure = Figure(figsize=size)
    axes: Any = figure.add_axes(margins(size, labels, 1, below=1))
    style_axes(axes)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=NICE))
    paths = [np.full(len(run.rows), True)]
    if run.policy.reference == "phase":
        paths = [rows_of_phase(run, span) for span in run.spans]
    together = math.ceil(len(run.rows) / DOTS)
    for s, kl in pairs:
        finite = np.isfinite(s.values + kl)
        style: dict[str, Any] = {"color": s.color, "markeredgewidth": 0, "clip_on": False}
        if s.points:
            for rows in paths:
                x, y = kl[finite & rows], s.values[finite & rows]
                axes.plot(x, y, "-o", linewidth=1.2, markersize=3.6, **style)
            continue
        x, y = kl[finite], s.values[finite]
        starts = range(0, len(x), together)
        means = [np.array([values[k : k + together].mean() for k in starts]) for values in (x, y)]
        axes.plot(*means, "o", markersize=2.8, alpha=0.55, **style)
    scale_axes(axes, np.concatenate([s.values[np.isfinite(kl)] for s, kl in pairs]))
    low, high = axes.get_xlim()
    axes.set_xlim(min(0.0, low), high)
    name_axes(axes, "KL, nats per response", "reward")
    if labels:
        ends = [(s.label, s.color, float(s.values[np.isfinite(s.values + kl)][-1])) for s, kl in pairs]
        name_series(axes, size, ends)
    return figure
