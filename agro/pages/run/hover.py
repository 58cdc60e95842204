"""Values that a figure of a page shows under the pointer, without a script.

Each column of a figure is an invisible rectangle with a line and a card, which the page's style shows while
the pointer, or a finger, is on the rectangle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import escape

from agro.pages.run.axes import FONT

NEAREST = 1.5  # points between two columns, at least
LINE = 1.3 * FONT
WIDTH = 0.56 * FONT  # of a character
PADDING = 4.0


@dataclass(frozen=True)
class HoverColumn:
    """What is shown at `x`, in the units of the axis: a title and lines of (text, CSS color)."""

    x: float
    title: str
    lines: tuple[tuple[str, str], ...]


def hover(axes: Any, columns: Sequence[HoverColumn]) -> str:
    """The columns of one pair of axes as elements of the figure's SVG, whose unit is a point."""
    figure = axes.get_figure()
    width, height = figure.get_figwidth() * 72, figure.get_figheight() * 72
    box = axes.get_position()
    top, bottom = height * (1 - box.y1), height * (1 - box.y0)
    axes.get_xlim()  # brings the transformation up to date
    placed: list[tuple[float, HoverColumn]] = []
    for column in sorted(columns, key=lambda c: c.x):
        x = float(axes.transData.transform((column.x, 0.0))[0]) * 72 / figure.dpi
        if not placed or x >= placed[-1][0] + NEAREST:
            placed.append((x, column))
    if not placed:
        return ""
    bounds = [width * box.x0 - PADDING]
    bounds += [(a + b) / 2 for (a, _), (b, _) in pairwise(placed)]
    bounds.append(width * box.x1 + PADDING)
    parts = []
    for (x, column), (begin, end) in zip(placed, pairwise(bounds), strict=True):
        size = f'width="{end - begin:.1f}" height="{bottom - top:.1f}"'
        area = f'<rect class="hit" x="{begin:.1f}" y="{top:.1f}" {size}/>'
        line = f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>'
        parts.append(f'<g class="at">{area}{line}{_card(column, x, top, width)}</g>')
    return "".join(parts)


def _card(column: HoverColumn, x: float, top: float, width: float) -> str:
    """The text beside the line, on the side where it has room."""
    texts = [(column.title, "var(--ink)"), *column.lines]
    card_width = max(len(text) for text, _ in texts) * WIDTH + 2 * PADDING
    begin = x + 5
    if begin + card_width > width:
        begin = max(0.0, x - 5 - card_width)
    card_height = len(texts) * LINE + PADDING
    size = f'width="{card_width:.1f}" height="{card_height:.1f}"'
    parts = [f'<rect class="card" x="{begin:.1f}" y="{top:.1f}" {size} rx="2"/>']
    for number, (text, color) in enumerate(texts, 1):
        y = top + number * LINE
        parts.append(f'<text x="{begin + PADDING:.1f}" y="{y:.1f}" fill="{color}">{escape(text)}</text>')
    return "".join(parts)
