"""A comparison's figure, its page and its JSON."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from agro.errors import Refused
from agro.io.numbers import fixed
from agro.io.terminal import csv_cell
from agro.pages.run import axes as look
from agro.pages.run.axes import (
    FONT,
    INK,
    NARROW,
    WIDE,
    Size,
    css,
    cut,
    margins,
    name_axes,
    name_series,
    scale_axes,
    style_axes,
)
from agro.pages.run.compare import HELD_OUT, TRAINING, Curve, Interval, RunComparison, to_text
from agro.pages.run.curves import smoothing
from agro.pages.run.figures import COLUMNS, png, running_mean, svg
from agro.pages.run.hover import HoverColumn, hover
from agro.pages.run.paired_results import PairedSets
from agro.pages.run.render import render
from agro.runs.rundata import Values

COLORS = (*look.COLORS, INK)
DASHES = ("-", "--", ":", "-.")
NAMES = {HELD_OUT: "held-out reward", TRAINING: "training reward"}
LONGEST = 30  # characters of a label in the figure
BANDS = 3  # seeds from which on there are intervals: that of two reaches 12.7 standard errors to each side


def measure_name(comparison: RunComparison) -> str:
    """Of the metric, for people."""
    return NAMES.get(comparison.measure, comparison.measure)


def color_of(number: int) -> str:
    return COLORS[number % len(COLORS)]


def short_labels(comparison: RunComparison, longest: int) -> list[str]:
    """The lines' labels, cut, and numbered where two would be the same; none for a single line."""
    labels = [cut(line.label, longest) for line in comparison.lines]
    if len(labels) == 1:
        return []
    if len(set(labels)) < len(labels):
        return [f"{i}. {cut(line.label, longest - 3)}" for i, line in enumerate(comparison.lines, 1)]
    return labels


def figure(comparison: RunComparison, size: Size = WIDE, longest: int = LONGEST) -> Figure:
    """Means over seeds against steps, single seeds thin; of `BANDS` seeds or more their 95 % t-intervals.

    Each line's label, of at most `longest` characters, stands at its end.
    """
    chart = Figure(figsize=size)
    labels = short_labels(comparison, longest)
    axes: Any = chart.add_axes(margins(size, labels, 1))
    style_axes(axes)
    end = max(1, *(int(line.steps[-1]) for line in comparison.lines))
    axes.set_xlim(0, end)
    shown = []
    ends: list[tuple[int, float]] = []  # of each line
    for i, line in enumerate(comparison.lines):
        width = 1 if comparison.measure.startswith("eval_") else smoothing(len(line.steps))
        values = np.array([running_mean(v, width) for v in line.values])
        _draw_line(axes, line, values, color_of(i), DASHES[i // len(COLORS) % len(DASHES)])
        shown.append(values.ravel())
        ends.append((int(line.steps[-1]), float(values.mean(0)[-1])))
    every = np.concatenate(shown)
    scale_axes(axes, every)
    low, high = every.min(), every.max()
    room = 0.25 * (high - low) or 0.5  # a band may be so wide that it would flatten the lines
    axes.set_ylim(0.0 if low >= 0 else low - room, high + room)
    name_axes(axes, "step", measure_name(comparison), bold=True)
    at_edge = []
    for i, (text, (step, value)) in enumerate(zip(labels, ends)):
        if step == end:
            at_edge.append((text, color_of(i), value))
        else:
            style = {"color": color_of(i), "fontsize": FONT, "va": "center", "parse_math": False}
            axes.annotate(text, (step, value), (5, 0), textcoords="offset points", **style)
    if at_edge:
        name_series(axes, size, at_edge)
    return chart


def values_under_pointer(comparison: RunComparison) -> list[HoverColumn]:
    """The mean of each line at each step that is measured, up to `COLUMNS` of them."""
    steps = sorted({int(step) for line in comparison.lines for step in line.steps})
    spread = np.unique(np.linspace(0, len(steps) - 1, min(COLUMNS, len(steps))).astype(int))
    names = short_labels(comparison, LONGEST) or [""]
    columns = []
    for index in spread:
        texts = []
        for i, line in enumerate(comparison.lines):
            column = np.flatnonzero(line.steps == steps[index])
            if column.size:
                value = fixed(float(line.values[:, column[0]].mean()))
                texts.append((f"{names[i]} {value}".strip(), css(color_of(i))))
        columns.append(HoverColumn(steps[index], f"step {steps[index]}", tuple(texts)))
    return columns


def _draw_line(axes: Any, line: Curve, values: Values, color: str, dash: str) -> None:
    """`values`: [S,K]."""
    if len(values) > 1:
        axes.plot(line.steps, values.T, color=color, linewidth=0.5, alpha=0.6)
    if len(values) >= BANDS:
        intervals = [Interval.of(v) for v in values.T]
        low, high = [x.low for x in intervals], [x.high for x in intervals]
        axes.fill_between(line.steps, low, high, color=color, alpha=0.15, linewidth=0)
    marker = "o" if len(line.steps) < 30 else None
    style = {"color": color, "linewidth": 1.6, "marker": marker, "markersize": 3.4, "clip_on": False}
    axes.plot(line.steps, values.mean(0), dash, **style)


def write(comparison: RunComparison, folder: Path) -> list[Path]:
    """Write compare.png, .svg, .pdf, .csv and .html into `folder`, and return their paths."""
    _make(folder)
    paths = [folder / f"compare.{ending}" for ending in ("png", "svg", "pdf", "csv", "html")]
    png(figure(comparison), paths[0])
    for path, date in ((paths[1], "Date"), (paths[2], "CreationDate")):
        with matplotlib.rc_context({"svg.hashsalt": "compare"}):  # the same runs give the same file
            figure(comparison).savefig(path, facecolor="white", metadata={date: None})
    with paths[3].open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["line", "run", "seed", "step", comparison.measure])
        for line in comparison.lines:
            for run, values in zip(line.runs, line.values, strict=True):
                rows = zip(line.steps.tolist(), values.tolist(), strict=True)
                about = [csv_cell(line.label), csv_cell(str(run.folder)), run.config.train.seed]
                writer.writerows([*about, *row] for row in rows)
    paths[4].write_text(page(comparison), encoding="utf-8")
    return paths


def write_results(paired: PairedSets, folder: Path) -> list[Path]:
    """Write compare.html of results that aren't all runs, and return its path."""
    _make(folder)
    path = folder / "compare.html"
    numbers = json.dumps(paired.to_json(), indent=1, ensure_ascii=False)
    path.write_text(render("results.html", paired=paired, json=numbers), encoding="utf-8")
    return [path]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--out {folder}: expected a folder to write into: {error.strerror}") from None


def notes(comparison: RunComparison) -> list[str]:
    """What a reader has to know about the numbers."""
    texts = [comparison.unpaired] if comparison.unpaired else []
    if comparison.measure == TRAINING:
        names = ", ".join(str(r.folder) for r in comparison.without_heldout)
        texts.append(
            f"Training reward is compared, because there is no held-out reward in {names}. It is measured on "
            "the responses that each run trained on, of any source."
        )
    if not comparison.measure.startswith("eval_"):
        texts.append("The final value is the mean of the last tenth of the steps.")
    single = [line.label for line in comparison.lines if len(line.runs) == 1]
    if single:
        lines_named = "each line" if len(single) == len(comparison.lines) else "; ".join(single)
        note = f"There is a single seed of {lines_named}, so there is no interval over seeds."
        if comparison.measure == HELD_OUT:
            note += " ± is the run's own standard error over held-out prompts."
        texts.append(note)
    if any(len(line.runs) == BANDS - 1 for line in comparison.lines):
        texts.append("Of two seeds both values are shown: no interval of two says more.")
    for line in comparison.lines:
        for run in line.unfinished:
            texts.append(f"{run.folder} has reached step {run.steps} of {run.steps_configured}.")
    if len({int(line.steps[-1]) for line in comparison.lines}) > 1:
        ends = "; ".join(f"{line.label} at {line.steps[-1]}" for line in comparison.lines)
        texts.append(f"The lines end at different steps: {ends}.")
    return texts


def final_words(line: Curve) -> str:
    """The final reward and its uncertainty."""
    x = line.final
    if x.n > 1:
        return _with_spread(x, signed=False)
    if math.isfinite(line.se[0]):
        return f"{fixed(x.mean)} ± {fixed(line.se[0])} (the run's own)"
    return fixed(x.mean)


def difference_words(comparison: RunComparison, line: Curve) -> str:
    if line is comparison.lines[0]:
        return "–"
    x = comparison.difference(line)
    if x is None:
        return "fewer than two common seeds"
    return f"{_with_spread(x, signed=True)} ({x.n} seeds)"


def _with_spread(x: Interval, *, signed: bool) -> str:
    """A mean with its interval; of fewer seeds than `BANDS` with the value of each."""
    mean, *others = (fixed(each, signed=signed) for each in (x.mean, x.low, x.high, *x.values))
    if x.n < BANDS:
        return f"{mean}  ({' and '.join(others[2:])})"
    return f"{mean}  [{others[0]}, {others[1]}]"


def differences_words(comparison: RunComparison) -> list[str]:
    """Such as "objective.name: agro | rloo", in the order of the lines."""
    return [f"{key}: " + " | ".join(map(to_text, values)) for key, values in comparison.differences.items()]


def to_json(comparison: RunComparison, paths: Sequence[Path]) -> dict[str, Any]:
    paired = PairedSets(()) if comparison.paired is None else comparison.paired
    return {
        **paired.to_json(),
        "measure": comparison.measure,
        "interval": "95 % t-interval over seeds",
        "lines": [_line_json(comparison, line) for line in comparison.lines],
        "differences": comparison.differences,
        "notes": notes(comparison),
        "files": [str(p) for p in paths],
    }


def _line_json(comparison: RunComparison, line: Curve) -> dict[str, Any]:
    runs = []
    for run, final, se in zip(line.runs, line.finals, line.se, strict=True):
        seed = run.config.train.seed
        runs.append({"run": str(run.folder), "seed": seed, "final": float(final), "se": _or_none(se)})
    return {
        "label": line.label,
        "seeds": line.seeds,
        "step": int(line.steps[-1]),
        "final": _interval_json(line.final),
        "difference_to_first": _interval_json(comparison.difference(line)),
        "runs": runs,
    }


def _interval_json(x: Interval | None) -> dict[str, Any] | None:
    if x is None:
        return None
    return {"mean": x.mean, "low": _or_none(x.low), "high": _or_none(x.high), "seeds": x.n}


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def page(comparison: RunComparison) -> str:
    """One self-contained file."""
    values = values_under_pointer(comparison)
    charts = {"wide": figure(comparison), "narrow": figure(comparison, NARROW, 14)}
    curves = [svg(chart, name, hover(chart.axes[0], values)) for name, chart in charts.items()]
    rows = []
    for i, line in enumerate(comparison.lines):
        row = {"color": css(color_of(i)), "line": line, "final": final_words(line)}
        rows.append(row | {"difference": difference_words(comparison, line)})
    return render(
        "compare.html",
        paired=comparison.paired,
        runs=sum(len(line.runs) for line in comparison.lines),
        measure=measure_name(comparison),
        notes=notes(comparison),
        curves=curves,
        rows=rows,
        differences={key: list(map(to_text, values)) for key, values in comparison.differences.items()},
        json=json.dumps(to_json(comparison, []), indent=1, ensure_ascii=False),
    )
