"""The learning curve, against steps, samples and KL."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from agro.report.figures import (
    FONT,
    INK,
    SECOND,
    WIDE,
    Axis,
    Series,
    cut,
    draw,
    inside,
    margins,
    name_axes,
    name_series,
    plain_axes,
    scale_axes,
)
from agro.report.metrics import RunData, Values

DOTS = 200  # of the training rewards against KL


def smoothing(rows: int) -> int:
    """An odd number of rows, about a fortieth of the run."""
    return max(1, rows // 40) | 1 if rows >= 40 else 1


def learning_curve(
    run: RunData, size: tuple[float, float] = WIDE, *, axis: Axis | None = None, titled: bool = False
) -> Figure:
    """Training and held-out reward against steps, unless `axis` says otherwise, phases shaded and named."""
    series = [
        Series("training", run.column("reward_mean"), smooth=smoothing(len(run.rows))),
        Series("held-out", run.column("eval_reward"), SECOND, run.column("eval_reward_se"), points=True),
    ]
    axis = axis or Axis.steps(run)
    figure = draw(run, series, size, axis=axis, unit="reward", titled=titled)
    _ends(figure.axes[0], run, axis.values, size)
    return figure


def kl_pairs(run: RunData) -> list[tuple[Series, Values]]:
    """(rewards, KL) of fresh training responses and of held-out ones, without series of which no row knows both."""
    pairs = [
        (Series("training", run.column("reward_mean")), run.training_kl),
        (Series("held-out", run.column("eval_reward"), SECOND, points=True), run.column("eval_kl_ref")),
    ]
    return [(s, k) for s, k in pairs if np.isfinite(s.values + k).any()]


def against_kl(run: RunData, size: tuple[float, float] = WIDE) -> Figure:
    """Reward against KL: a dot for each few training steps, a path through the held-out measurements.

    Where every phase has a reference of its own, each has axes of its own.
    """
    pairs = kl_pairs(run)
    anew = run.config.policy.reference == "phase" and len(run.spans) > 1
    parts = [inside(run, span) for span in run.spans] if anew else [np.full(len(run.rows), True)]
    names = [span.name for span in run.spans] if anew else [""]
    shown = [
        (part, n)
        for part, n in zip(parts, names, strict=True)
        if any(_known(s, k, part).any() for s, k in pairs)
    ]
    figure = Figure(figsize=size)
    labels = [s.label for s, _ in pairs] if len(pairs) > 1 else []
    left, bottom, width, height = margins(size, labels, 1 + anew, below=1)
    gap = 14 / (size[0] * 72)
    each = (width - gap * (len(shown) - 1)) / len(shown)
    every = np.concatenate([s.values[np.isfinite(k)] for s, k in pairs])
    for i, (part, name) in enumerate(shown):
        axes: Any = figure.add_axes((left + i * (each + gap), bottom, each, height))
        plain_axes(axes)
        axes.xaxis.set_major_locator(MaxNLocator(max(3, 6 // len(shown)), steps=[1, 2, 2.5, 5, 10]))
        for s, kl in pairs:
            _path(axes, s, kl, _known(s, kl, part))
        scale_axes(axes, every, "linear", False)
        low, high = axes.get_xlim()
        axes.set_xlim(min(0.0, low), high)
        axes.annotate(
            cut(name),
            (0, 1),
            (0, 3),
            xycoords="axes fraction",
            textcoords="offset points",
            color=INK,
            fontsize=FONT,
            va="bottom",
            parse_math=False,
        )
        if i:
            axes.tick_params(labelleft=False)
        name_axes(
            axes,
            "KL, nats a response" if i + 1 == len(shown) else "",
            "reward" if i == 0 else "",
            rows=int(anew),
        )
    top = max(axes.get_ylim()[1] for axes in figure.axes)
    for axes in figure.axes:
        axes.set_ylim(top=top)
    if labels:
        name_series(
            figure.axes[-1], size, [(s, float(s.values[np.isfinite(s.values + k)][-1])) for s, k in pairs]
        )
    return figure


def _known(s: Series, kl: Values, part: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return part & np.isfinite(s.values + kl)


def _path(axes: Any, s: Series, kl: Values, known: NDArray[np.bool_]) -> None:
    x, y = kl[known], s.values[known]
    if s.points:
        axes.plot(x, y, "-o", color=s.colour, linewidth=1.2, markersize=3.6, markeredgewidth=0, clip_on=False)
        return
    together = math.ceil(len(kl) / DOTS)
    x, y = (np.array([v[i : i + together].mean() for i in range(0, len(v), together)]) for v in (x, y))
    axes.plot(x, y, "o", color=s.colour, markersize=2.8, markeredgewidth=0, alpha=0.55, clip_on=False)


def _ends(axes: Any, run: RunData, right: Values, size: tuple[float, float]) -> None:
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
        here = (right[known[at]], value)
        x, y = to_axes.transform(here) * (size[0] * 72 * box.width, size[1] * 72 * box.height)
        last = step == run.spans[-1].ends
        other = known[
            max(0, at - 1) if last else min(at + 1, len(known) - 1)
        ]  # where the line beside the number leads
        above = y < 1.5 * FONT or values[other] < value
        corner = (x - width if last else x, y if above else y - height)
        if any(abs(corner[0] - a) < width and abs(corner[1] - b) < height for a, b in placed):
            continue
        placed.append(corner)
        axes.annotate(
            f"{value:.2f}",
            here,
            (-3 if last else 3, 5 if above else -5),
            textcoords="offset points",
            color=SECOND,
            fontsize=FONT,
            fontweight="bold",
            ha="right" if last else "left",
            va="bottom" if above else "top",
        )
