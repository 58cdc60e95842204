"""A comparison's figure, its page and its JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from agro.errors import Refused
from agro.report import figures
from agro.report.compare import Comparison, Interval, Line, asked, words
from agro.report.curves import smoothing
from agro.report.figures import (
    FONT,
    INK,
    MUTED,
    NARROW,
    WIDE,
    Series,
    margins,
    name_series,
    plain_axes,
    png,
    running_mean,
    scale_axes,
)
from agro.report.markup import both, css, escape, fill, table

COLOURS = (*figures.COLOURS, INK)
DASHES = ("-", "--", ":", "-.")
NAMES = {"eval_reward": "held-out reward", "reward_mean": "training reward"}
LONGEST = 40  # characters of a label in the figure


def figure(found: Comparison, size: tuple[float, float] = WIDE, *, labelled: bool = True) -> Figure:
    """Means over seeds against steps, their 95 % t-intervals as bands, single seeds thin."""
    out = Figure(figsize=size)
    labels = [line.label[:LONGEST] for line in found.lines] if labelled and len(found.lines) > 1 else []
    axes: Any = out.add_axes(margins(size, labels, 1))
    plain_axes(axes)
    axes.set_xlim(0, max(1, *(int(line.steps[-1]) for line in found.lines)))
    drawn, ends = [], []
    for i, line in enumerate(found.lines):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        width = 1 if found.measure == "eval_reward" else smoothing(len(line.steps))
        values = np.array([running_mean(v, width) for v in line.values])
        means = values.mean(0)
        if len(values) > 1:
            axes.plot(line.steps, values.T, color=colour, linewidth=0.5, alpha=0.4)
            low, high = zip(*((x.low, x.high) for x in map(Interval.of, values.T)), strict=True)
            axes.fill_between(line.steps, low, high, color=colour, alpha=0.15, linewidth=0)
        marker = "o" if len(line.steps) < 30 else None
        axes.plot(
            line.steps, means, dash, color=colour, linewidth=1.6, marker=marker, markersize=3.4, clip_on=False
        )
        drawn.append(values.ravel())
        ends.append((Series(line.label[:LONGEST], means, colour), float(means[-1])))
    every = np.concatenate(drawn)
    scale_axes(axes, every, "linear", False)
    low, high = every.min(), every.max()
    room = 0.25 * (high - low) or 0.5  # a band of two seeds is so wide that it would leave the lines flat
    axes.set_ylim(0.0 if low >= 0 else low - room, high + room)
    for text, xy, offset, va in (
        (NAMES[found.measure], (0, 1), (0, 6), "bottom"),
        ("step", (1, 0), (12, -4), "top"),
    ):
        axes.annotate(
            text,
            xy,
            offset,
            xycoords="axes fraction",
            textcoords="offset points",
            color=INK if va == "bottom" else MUTED,
            fontsize=FONT,
            ha="left",
            va=va,
        )
    if labels:
        name_series(axes, size, ends)
    return out


def write(found: Comparison, out: Path) -> list[Path]:
    """Write compare.png, compare.svg and compare.html into `out`, and return their paths."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--out {out}: expected a folder to write into: {error.strerror}") from None
    paths = [out / f"compare.{ending}" for ending in ("png", "svg", "html")]
    png(figure(found), paths[0])
    with matplotlib.rc_context({"svg.hashsalt": "compare"}):  # the same runs give the same file
        figure(found).savefig(paths[1], format="svg", facecolor="white", metadata={"Date": None})
    paths[2].write_text(page(found), encoding="utf-8")
    return paths


def notes(found: Comparison) -> list[str]:
    """What has to be known to read the numbers."""
    said = []
    if found.measure == "reward_mean":
        names = ", ".join(str(r.folder) for r in found.without_heldout)
        said.append(
            f"Training reward is compared, for there is no held-out reward in {names}: it is measured on the responses that "
            "each run trained on, whoever wrote them. Final is the mean of the last tenth of the steps."
        )
    single = [line for line in found.lines if len(line.runs) == 1]
    if single:
        said.append(
            f"One seed alone stands for {', '.join(line.label for line in single)}: how much another seed would differ isn't known, so "
            "there is no interval over seeds."
        )
        if found.measure == "eval_reward":
            said[-1] += " Where ± is given, it is the run's own standard error over held-out prompts."
    for line in found.lines:
        for run in line.unfinished:
            said.append(f"{run.folder} has reached step {run.spans[-1].ends} of {asked(run)}.")
    ends = {int(line.steps[-1]) for line in found.lines}
    if len(ends) > 1:
        said.append(
            "The lines end at different steps: "
            + ", ".join(f"{line.label} at {line.steps[-1]}" for line in found.lines)
            + "."
        )
    return said


def final_words(line: Line) -> str:
    """The final reward and how sure it is, in words."""
    x = line.final
    if x.n > 1:
        return f"{x.mean:.3f}  [{x.low:.3f}, {x.high:.3f}]"
    return f"{x.mean:.3f}" + (f" ± {line.se[0]:.3f} (the run's own)" if math.isfinite(line.se[0]) else "")


def difference_words(found: Comparison, line: Line) -> str:
    x = found.difference(line)
    if x is None:
        return "–" if line is found.lines[0] else "fewer than two seeds shared"
    return f"{x.mean:+.3f}  [{x.low:+.3f}, {x.high:+.3f}] ({x.n} seeds)"


def differences_words(found: Comparison) -> list[str]:
    """Such as "objective.name: agro | rloo", in the order of the lines."""
    return [f"{key}: " + " | ".join(map(words, values)) for key, values in found.differences.items()]


def to_json(found: Comparison, paths: Sequence[Path]) -> dict[str, Any]:
    def interval(x: Interval | None) -> dict[str, Any] | None:
        return (
            None
            if x is None
            else {"mean": x.mean, "low": _known(x.low), "high": _known(x.high), "seeds": x.n}
        )

    return {
        "measure": found.measure,
        "interval": "95 % t-interval over seeds",
        "lines": [
            {
                "label": line.label,
                "seeds": line.seeds,
                "step": int(line.steps[-1]),
                "final": interval(line.final),
                "difference_to_first": interval(found.difference(line)),
                "runs": [
                    {"run": str(run.folder), "seed": seed, "final": float(value), "se": _known(float(se))}
                    for run, seed, value, se in zip(line.runs, line.seeds, line.finals, line.se, strict=True)
                ],
            }
            for line in found.lines
        ],
        "differences": found.differences,
        "notes": notes(found),
        "files": [str(p) for p in paths],
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def page(found: Comparison) -> str:
    """One file that asks for nothing else."""
    rows = [
        {
            "line": f'<span style="color:{css(COLOURS[i % len(COLOURS)])}">●</span> {escape(line.label)}',
            "seeds": escape(", ".join(map(str, line.seeds))),
            "final": f"<b>{escape(final_words(line))}</b>",
            "difference": escape(difference_words(found, line)),
            "runs": "<br>".join(
                f"{escape(str(r.folder))}: {v:.3f}" for r, v in zip(line.runs, line.finals, strict=True)
            ),
        }
        for i, line in enumerate(found.lines)
    ]
    heads = {
        "final": "final, 95 % interval over seeds",
        "difference": "difference to the first line, seed by seed",
    }
    return fill(
        "compare.html",
        lead=f"{sum(len(line.runs) for line in found.lines)} runs in {len(found.lines)} configurations, by {NAMES[found.measure]}.",
        notes="".join(f'<p class="note">{escape(text)}</p>' for text in notes(found)),
        curves=both(
            "Reward against steps, one line a configuration",
            figure(found),
            figure(found, NARROW, labelled=False),
        ),
        table=table(rows, heads),
        differences=escape("\n".join(differences_words(found)) or "none but the seed"),
        json=escape(json.dumps(to_json(found, []), indent=1, ensure_ascii=False)),
    )
