"""The learning curve, against steps, responses and KL."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from agro.io.numbers import short
from agro.pages.run.axes import (
    FONT,
    INK,
    MUTED,
    NICE,
    SECOND,
    WIDE,
    Size,
    css,
    cut,
    label,
    margins,
    name_axes,
    name_series,
    scale_axes,
    style_axes,
)
from agro.pages.run.figures import Axis, Look, Series, draw, rows_of_phase, svg
from agro.pages.run.hover import HoverColumn, hover
from agro.runs.metrics import METRICS
from agro.runs.rundata import RunData, Values

DOTS = 200  # of the training rewards against KL


def smoothing(rows: int) -> int:
    """An odd number of rows, about a fortieth of the run."""
    return rows // 40 | 1 if rows >= 40 else 1


def reward_series(run: RunData) -> tuple[Series, Series]:
    """Training and held-out reward."""
    training = Series("training", run.column("reward_mean"), smooth=smoothing(len(run.rows)))
    errors = run.column("eval_reward_se")
    mark = run.mark("eval_reward")
    return training, Series("held-out", run.column("eval_reward"), SECOND, errors, points=True, mark=mark)


def learning_curve(run: RunData, size: Size = WIDE, *, axis: Axis | None = None) -> Figure:
    """Training and held-out reward against steps, or another axis, with the phases."""
    axis = axis or Axis.steps(run)
    look = Look(METRICS["reward_mean"].unit)
    figure = draw(run, reward_series(run), size, look, axis)
    _label_values(figure.axes[0], run, axis.values, size)
    return figure


def kl_pairs(run: RunData) -> list[tuple[Series, Values]]:
    """(rewards, KL) of fresh training responses and of held-out ones, where some row has both."""
    training, heldout = reward_series(run)
    pairs = [(training, run.training_kl), (heldout, run.column("eval_kl_ref"))]
    return [(s, kl) for s, kl in pairs if np.isfinite(s.values + kl).any()]


def against_kl(run: RunData, size: Size = WIDE) -> Markup:
    """The figure of `kl_figure`, which shows the values of the held-out measurements under the pointer."""
    figure, parts = kl_figure(run, size)
    over = ""
    for axes, rows in zip(figure.axes, parts, strict=True):
        columns = []
        for s, kl in kl_pairs(run):
            if s.points:
                columns = [_column(run, s, kl, int(row)) for row in np.flatnonzero(_known(s, kl, rows))]
        over += hover(axes, columns)
    return svg(figure, f"Reward against KL {size}", over)


def _column(run: RunData, s: Series, kl: Values, row: int) -> HoverColumn:
    lines = ((f"{s.label} {short(s.values[row])}", css(s.color)), (f"KL {short(kl[row])}", css(MUTED)))
    return HoverColumn(float(kl[row]), f"step {run.rows[row]['step']}", lines)


def kl_figure(run: RunData, size: Size = WIDE) -> tuple[Figure, list[NDArray[np.bool_]]]:
    """Reward against KL: a dot for every few training steps, a path through the held-out measurements.

    A phase that has a reference of its own has axes of its own. Returns also the rows of each axes.
    """
    pairs = kl_pairs(run)
    split = run.config.policy.reference == "phase" and len(run.spans) > 1
    parts = [("", np.full(len(run.rows), True))]
    if split:
        parts = [(span.name, rows_of_phase(run, span)) for span in run.spans]
    parts = [part for part in parts if any(_known(s, kl, part[1]).any() for s, kl in pairs)]
    labels = [s.label for s, _ in pairs] if len(pairs) > 1 else []
    figure = Figure(figsize=size)
    x, bottom, width, height = margins(size, labels, 1 + split, below=1)
    gap = 14 / (size[0] * 72)
    each = (width - gap * (len(parts) - 1)) / len(parts)
    rewards = np.concatenate([s.values[np.isfinite(kl)] for s, kl in pairs])
    for i, (name, rows) in enumerate(parts):
        axes: Any = figure.add_axes((x + i * (each + gap), bottom, each, height))
        style_axes(axes)
        axes.xaxis.set_major_locator(MaxNLocator(max(3, 6 // len(parts)), steps=NICE))
        for s, kl in pairs:
            selected = _known(s, kl, rows)
            _path(axes, s, kl[selected], s.values[selected], together=math.ceil(len(kl) / DOTS))
        scale_axes(axes, rewards)
        low, high = axes.get_xlim()
        axes.set_xlim(min(0.0, low), high)
        label(axes, cut(name), (0, 1), (0, 3), color=INK)
        axes.tick_params(labelleft=i == 0)
        is_last = i + 1 == len(parts)
        name_axes(axes, "KL, nats per response" if is_last else "", "" if i else "reward", int(split))
    top = max(axes.get_ylim()[1] for axes in figure.axes)
    for axes in figure.axes:
        axes.set_ylim(top=top)
    if labels:
        ends = [(s.label, s.color, float(s.values[np.isfinite(s.values + kl)][-1])) for s, kl in pairs]
        name_series(figure.axes[-1], size, ends)
    return figure, [rows for _, rows in parts]


def _known(s: Series, kl: Values, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return rows & np.isfinite(s.values + kl)


def _path(axes: Any, s: Series, x: Values, y: Values, together: int) -> None:
    """Points joined in order of steps, or dots that are means over `together` steps."""
    style: dict[str, Any] = {"color": s.color, "markeredgewidth": 0, "clip_on": False}
    if s.points:
        axes.plot(x, y, "-o", linewidth=1.2, markersize=3.6, **style)
        return
    starts = range(0, len(x), together)
    x, y = (np.array([values[i : i + together].mean() for i in starts]) for values in (x, y))
    axes.plot(x, y, "o", markersize=2.8, alpha=0.55, **style)


def _label_values(axes: Any, run: RunData, x: Values, size: Size) -> None:
    """Write the held-out reward where phases start and end, the last first, without overlaps."""
    steps, values = run.column("step"), run.column("eval_reward")
    bounds = {s.begins for s in run.spans} | {s.ends for s in run.spans}
    box = axes.get_position()
    points = (size[0] * 72 * box.width, size[1] * 72 * box.height)
    width, height = 2.8 * FONT, 1.3 * FONT
    placed: list[tuple[float, float]] = []
    evaluated = np.flatnonzero(np.isfinite(values))
    for i in reversed(range(len(evaluated))):
        row = evaluated[i]
        if steps[row] not in bounds:
            continue
        x_points, bottom = (axes.transScale + axes.transLimits).transform((x[row], values[row])) * points
        is_last = steps[row] == run.steps
        neighbor = evaluated[max(0, i - 1)] if is_last else evaluated[min(i + 1, len(evaluated) - 1)]
        above = bottom < 1.5 * FONT or values[neighbor] < values[row]  # away from the line beside the number
        corner = (x_points - width if is_last else x_points, bottom if above else bottom - height)
        if any(abs(corner[0] - a) < width and abs(corner[1] - b) < height for a, b in placed):
            continue
        placed.append(corner)
        axes.annotate(
            f"{values[row]:.2f}",
            (x[row], values[row]),
            (-3 if is_last else 3, 5 if above else -5),
            textcoords="offset points",
            color=SECOND,
            fontsize=FONT,
            fontweight="bold",
            ha="right" if is_last else "left",
            va="bottom" if above else "top",
        )
