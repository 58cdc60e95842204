"""The figure of a run in a notebook."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from agro.errors import Refused
from agro.pages.run.figures import FIRST, FONT, INK, SECOND, WIDE, style_axes
from agro.runs.rundata import RunData, Values


class NotebookFigure(Figure):
    """A figure that a notebook shows without `%matplotlib inline`."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=120, facecolor="white")
        return buffer.getvalue()


def reward_and_kl(run: RunData) -> Figure:
    """Training and held-out reward, and KL to the reference, against steps; what was measured of them.

    Raises `Refused` where nothing was.
    """
    panels = {
        "reward": (run.column("reward_mean"), run.column("eval_reward")),
        "KL, nats per response": (run.training_kl, run.column("eval_kl_ref")),
    }
    shown = {title: both for title, both in panels.items() if np.isfinite(both).any()}
    if not shown:
        raise Refused(f"{run.folder}: no step has a reward or a KL, so there is nothing to draw")
    figure = NotebookFigure(figsize=WIDE, layout="constrained")
    for axes, (title, (training, held_out)) in zip(
        figure.subplots(1, len(shown), squeeze=False)[0], shown.items()
    ):
        style_axes(axes)
        axes.set_title(title, loc="left", fontsize=FONT, color=INK)
        axes.set_xlabel("step", fontsize=FONT, color=INK)
        _line(axes, run.column("step"), training, "training", FIRST)
        _line(axes, run.column("step"), held_out, "held-out", SECOND, marker="o", markersize=3.6)
        axes.legend(frameon=False, fontsize=FONT)
    return figure


def _line(axes: Any, steps: Values, values: Values, name: str, color: str, **style: Any) -> None:
    finite = np.isfinite(values)
    if finite.any():
        axes.plot(steps[finite], values[finite], label=name, color=color, linewidth=1.4, **style)
