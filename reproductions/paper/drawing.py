"""Panels with lines over seeds, as a paper prints them: SVG, a serif font, colors that survive gray.

Lines differ by color, lightness, dashes and marker. A band reaches from the lowest to the highest seed; where
seeds have values of their own on the x axis, as KL, each has a thin line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from reproductions import harness

PRINTED = {
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 8,
    "svg.fonttype": "path",
    "svg.hashsalt": "agro",
    "axes.linewidth": 0.6,
}
WIDTH = 6.75  # inches: two columns of a conference's page
Run = Mapping[str, Any]
Values = Callable[[Run], Sequence[float]]


@dataclass(frozen=True)
class Style:
    color: str
    dashes: tuple[float, ...]  # () is solid
    marker: str


STYLES = tuple(
    Style(of["color"], tuple(of["dashes"]), of["marker"])
    for of in tomllib.loads(Path(__file__).with_name("styles.toml").read_text("utf-8"))["styles"]
)


@dataclass(frozen=True)
class Line:
    name: str
    style: Style
    runs: Sequence[Run]  # one a seed


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]
    x: Values
    y: Values
    x_name: str
    y_name: str = ""
    own_x: bool = False  # whether each seed has x values of its own
    log_x: bool = False


def of_curve(key: str) -> Values:
    """What each point of a run's curve has under a name."""
    return lambda run: [point[key] for point in run["curve"]]


updates, accuracy, kl = (of_curve(key) for key in ("update", "accuracy", "kl"))


def generated(run: Run) -> list[float]:
    """Responses sampled until each point."""
    last = run["curve"][-1]["update"]
    return [run["generated"] * point["update"] / last for point in run["curve"]]


def rewarded(run: Run) -> list[float]:
    """The mean reward of the fresh responses before each point but the first."""
    return list(run["rewards"])


def draw(rows: Sequence[Sequence[Panel]], height: float = 1.9) -> Figure:
    """A grid of panels, and below it one legend for all."""
    with mpl.rc_context(PRINTED):
        columns = max(len(row) for row in rows)
        figure = Figure(figsize=(WIDTH, height * len(rows) + 0.5), layout="constrained")
        named: dict[str, Any] = {}
        for r, row in enumerate(rows):
            of_row = [figure.add_subplot(len(rows), columns, r * columns + c + 1) for c in range(len(row))]
            for axes, panel in zip(of_row, row, strict=True):
                named |= _panel(axes, panel)
            top = max(axes.get_ylim()[1] for axes in of_row)
            for axes in of_row:
                axes.set_ylim(0, top)
        figure.legend(
            named.values(),
            named.keys(),
            loc="outside lower center",
            ncols=min(5, len(named)),
            frameon=False,
            fontsize=8,
            handlelength=3.2,
        )
    return figure


def _panel(axes: Any, panel: Panel) -> dict[str, Any]:
    """Draws it; the lines by name."""
    axes.set_title(panel.title, loc="left", fontsize=8.5)
    axes.set_xlabel(panel.x_name)
    axes.set_ylabel(panel.y_name)
    axes.grid(axis="y", color=harness.GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(length=2, width=0.6)
    for side in ("right", "top"):
        axes.spines[side].set_visible(False)
    if panel.log_x:
        axes.set_xscale("log")
    drawn = {line.name: _line(axes, panel, line) for line in panel.lines if line.runs}
    if panel.own_x:  # a ruined policy is ten times as far as a good one
        axes.set_xscale("symlog", linthresh=1, linscale=1)
        axes.set_xticks([0, 0.5, 1, 2, 4, 8], ["0", ".5", "1", "2", "4", "8"])
        axes.set_xticks([], minor=True)
    return drawn


def _line(axes: Any, panel: Panel, line: Line) -> Any:
    x, y = _of_seeds(panel.x, line.runs), _of_seeds(panel.y, line.runs)
    color, dashes = line.style.color, line.style.dashes
    if panel.own_x:
        for own_x, own_y in zip(x, y, strict=True):
            axes.plot(own_x, own_y, color=color, linewidth=0.4, alpha=0.45)
    else:
        axes.fill_between(x[0], y.min(0), y.max(0), color=color, alpha=0.16, linewidth=0)
    [drawn] = axes.plot(
        x.mean(0),
        y.mean(0),
        color=color,
        linewidth=1.1,
        marker=line.style.marker,
        markersize=2.8,
        markevery=max(1, x.shape[1] // 8),
        dashes=dashes or (None, None),
    )
    return drawn


def _of_seeds(values: Values, runs: Sequence[Run]) -> NDArray[np.float64]:
    """[seeds,points]"""
    return np.array([values(run) for run in runs], dtype=np.float64)


def save(figure: Figure, folder: Path, name: str) -> None:
    """NAME.svg, the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(PRINTED):
        figure.savefig(folder / f"{name}.svg", facecolor="white", metadata={"Date": None})
