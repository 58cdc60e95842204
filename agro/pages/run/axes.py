"""The look of the report's axes: colors, margins, labels, scales. Lines are labeled without legends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from agro.io.numbers import percent_tick, power_tick, tick
from agro.runs.rundata import Values

INK, MUTED, GRID, BAND = "#1b1b1f", "#6b6f76", "#dfe1e5", "#f3f4f6"
FIRST, SECOND = "#0072b2", "#d55e00"
# The colors of Okabe and Ito, which color-blind people can distinguish; neighbors differ most.
COLORS = (FIRST, SECOND, "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
NAMES = ("first", "second", "third", "fourth", "fifth", "sixth")
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", BAND: "band", **dict(zip(COLORS, NAMES, strict=True))}
WIDE, NARROW, PANEL = (7.6, 3.3), (3.7, 2.9), (3.7, 2.1)  # inches
FONT = 8.0  # points
LINE = 1.4 * FONT  # the height of a line of text
NICE = [1, 2, 2.5, 5, 10]  # steps between ticks

Size = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, width, height in fractions of the figure


def css(color: str) -> str:
    """The page's variable for a color, which is lighter or darker with the color scheme."""
    return f"var(--{VARIABLES[color]})"


def label(
    axes: Any, text: str, position: tuple[float, float], offset: tuple[float, float], **style: Any
) -> None:
    """Text at `position`, in fractions of the axes, moved by `offset` points."""
    style = {"color": MUTED, "ha": "left", "va": "bottom", "fontsize": FONT, "parse_math": False} | style
    axes.annotate(text, position, offset, xycoords="axes fraction", textcoords="offset points", **style)


def margins(size: Size, labels: Sequence[str], above: int = 0, below: int = 0) -> Box:
    """The box of axes, with room for `labels` on the right and lines of text above and below."""
    width, height = size[0] * 72, size[1] * 72
    right = max([30.0, *(8 + 0.58 * FONT * len(text) for text in labels)])
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
    """Label both axes: `y` over `above` lines of other text, `x` beside the tick labels or below them."""
    if y:
        style: dict[str, Any] = {"color": INK, "fontweight": "bold"} if bold else {}
        label(axes, y, (0, 1), (0, 4 + above * LINE), **style)
    if is_beside(x):
        label(axes, x, (1, 0), (10, -4), va="top")
    else:
        label(axes, x, (1, 0), (0, -16), ha="right", va="top")


def is_beside(x: str) -> bool:
    """Whether the label of the x axis is short enough to stand beside the tick labels."""
    return len(x) <= 5


def cut(name: str, longest: int = 20) -> str:
    """A name short enough for a figure."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def scale_axes(axes: Any, values: Values, *, log: bool = False, percent: bool = False) -> None:
    """Limits and ticks of the y axis. `log`: logarithmic, linear around 0, where the values span enough."""
    values = values[np.isfinite(values)]
    if log and _scale_log(axes, values):
        return
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=NICE))
    axes.yaxis.set_major_formatter(FuncFormatter(percent_tick if percent else tick))
    low, high = axes.get_ylim()
    low = min(low, 0.0, values.min()) if values.min() < 0 else 0.0
    high = max(high, values.max())
    axes.set_ylim(low, high if high > low else low + 1)


def _scale_log(axes: Any, values: Values) -> bool:
    """Whether the values span enough for a logarithmic scale, which is then set."""
    positive = values[values > 0]
    if not positive.size:
        return False
    low = values.min()
    floor = 10.0 ** math.floor(
        math.log10(np.quantile(positive, 0.05))
    )  # few tiny values don't fill the figure
    if low < 0:
        floor = max(floor, 10.0 ** math.ceil(math.log10(-low)))
    if values.max() <= 20 * floor:
        return False
    bottom = 0.0
    if low < 0:
        bottom = low * 1.3
    elif low >= floor:
        bottom = low * 0.7
    axes.set_yscale("symlog", linthresh=floor)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom, values.max() * 1.4)
    axes.yaxis.set_major_formatter(FuncFormatter(power_tick))
    return True


def name_series(axes: Any, size: Size, ends: Sequence[tuple[str, str, float]]) -> None:
    """Write (label, color, y) at the right end of each series, moved apart where they would overlap."""
    height = size[1] * 72 * axes.get_position().height
    transform = axes.transScale + axes.transLimits
    placed = [(float(transform.transform((0, y))[1]) * height, text, color) for text, color, y in ends]
    placed.sort(key=lambda item: item[0])
    lowest = 0.4 * FONT  # not on the label of the x axis
    for (_, text, color), y in zip(placed, spread_out([y for y, _, _ in placed], 1.25 * FONT), strict=True):
        y = max(y, lowest)
        lowest = y + 1.25 * FONT
        label(axes, text, (1, 0), (5, y), color=color, va="center")


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Rising heights at least `gap` apart, nearest to the given rising ones in least squares.

    After subtracting i · gap from the i-th they only have to be monotone: isotonic regression.
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
