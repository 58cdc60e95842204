"""Several runs: those that differ in their seed alone are one line. Their figure, page and JSON."""

from __future__ import annotations

import copy
import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from agro.config import deciding
from agro.errors import Refused
from agro.io.numbers import fixed, none_if_nan
from agro.io.peers import nearest
from agro.io.terminal import csv_cell
from agro.logs.results import Result
from agro.pages.run import figures
from agro.pages.run.figures import COLORS, NARROW, WIDE, Size, css, cut
from agro.pages.run.paired_results import PairedSets
from agro.pages.run.render import render
from agro.runs.rundata import METRICS, RunData, Values, load_run, reward_of, to_array
from agro.stats.intervals import standard_error, t_quantile

HELD_OUT, TRAINING = "eval_reward", "reward_mean"
UNSET = "not set"
LONGEST_LABEL = 48  # characters of a label


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % t-interval, whose ends are NaN for a single seed.

    `values`: of each seed.
    """

    mean: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Values) -> Interval:
        mean = float(values.mean())
        half = t_quantile(len(values) - 1) * standard_error(values) if len(values) > 1 else math.nan
        return cls(mean, mean - half, mean + half, tuple(map(float, values)))

    @property
    def n(self) -> int:
        return len(self.values)

    def words(self, *, signed: bool) -> str:
        """The mean with its interval; of fewer seeds than `BANDS` with the value of each."""
        mean, low, high, *values = (
            fixed(each, signed=signed) for each in (self.mean, self.low, self.high, *self.values)
        )
        return f"{mean}  ({' and '.join(values)})" if self.n < BANDS else f"{mean}  [{low}, {high}]"

    def to_json(self) -> dict[str, Any]:
        low, high = none_if_nan(self.low), none_if_nan(self.high)
        return {"mean": self.mean, "low": low, "high": high, "seeds": self.n}


@dataclass(frozen=True)
class Curve:
    """S runs that differ in their seed alone, at the K steps at which all were measured. `runs`: by seed.

    `se`: each run's own standard error over held-out prompts at the last step; NaN where it is unknown.
    """

    label: str
    runs: tuple[RunData, ...]
    steps: NDArray[np.int64]  # [K]
    values: Values  # [S,K]
    finals: Values  # [S]
    se: Values  # [S]

    @property
    def seeds(self) -> list[int]:
        return [run.config.train.seed for run in self.runs]

    @property
    def final(self) -> Interval:
        return Interval.of(self.finals)


@dataclass(frozen=True)
class RunComparison:
    """`measure`: a metric of metrics.jsonl. `differences`: each line's value by dotted key.
    `without_heldout`: runs without held-out reward.

    `paired`: the other runs against the first on the same prompts; `unpaired`: why it isn't known.
    """

    measure: str
    lines: tuple[Curve, ...]
    differences: dict[str, list[Any]]
    without_heldout: tuple[RunData, ...]
    paired: PairedSets | None = None
    unpaired: str = ""

    def difference(self, line: Curve) -> Interval | None:
        """`line`'s final rewards minus the first line's by seed; None with fewer than two common seeds."""
        if line is self.lines[0]:
            return None
        baseline = dict(zip(self.lines[0].seeds, self.lines[0].finals, strict=True))
        pairs = [v - baseline[s] for s, v in zip(line.seeds, line.finals, strict=True) if s in baseline]
        return Interval.of(np.array(pairs)) if len(pairs) > 1 else None


def compare(folders: Sequence[Path], metric: str | None = None) -> RunComparison:
    """Read runs and group them. Raises `Refused` where one can't be read, or two have the same seed.

    `metric`: a number of metrics.jsonl; without it held-out reward, or training reward where a run has none.
    """
    if metric is not None and (metric not in METRICS or not METRICS[metric].is_number):
        near = nearest(metric, METRICS)
        hint = f"; did you mean {near}?" if near else ""
        raise Refused(f"--metric: expected a number of metrics.jsonl of these runs, got {metric!r}{hint}")
    if len({f.resolve() for f in folders}) < len(folders):
        raise Refused(f"compare: expected different runs, got {', '.join(map(str, folders))}")
    runs = [load_run(folder) for folder in folders]
    groups: list[list[RunData]] = []
    for run in sorted(runs, key=lambda run: run.config.train.seed):
        same = next((g for g in groups if settings(g[0]) == settings(run)), None)
        if same is None:
            groups.append([run])
        elif same[-1].config.train.seed == run.config.train.seed:
            raise Refused(
                f"compare: {same[-1].folder} and {run.folder} have the same configuration and the same seed "
                f"({run.config.train.seed}), so they are one run made twice; give one of them"
            )
        else:
            same.append(run)
    groups.sort(key=lambda group: min(map(runs.index, group)))  # as they are given
    without = tuple(r for r in runs if not np.isfinite(r.column("eval_reward")).any())
    measure = metric or (TRAINING if without else HELD_OUT)
    differences = differing([flat(settings(g[0])) for g in groups])
    labels = _labels(groups, differences)
    lines = tuple(_line(label, group, measure) for label, group in zip(labels, groups, strict=True))
    paired = _paired(lines) if metric in (None, HELD_OUT) else (None, "")
    return RunComparison(measure, lines, differences, without, *paired)


def _paired(lines: Sequence[Curve]) -> tuple[PairedSets | None, str]:
    """Every other line against the first, each the mean over its seeds, or two runs of one line; or why there
    is no verdict. Neither for a single run."""
    sides = [(line.label, line.runs) for line in lines]
    if len(lines) == 1:
        sides = [(run.name, (run,)) for run in lines[0].runs]
        if len(sides) > 2:
            return None, "These runs differ in their seed alone, so none is compared with another."
    if len(sides) < 2:
        return None, ""
    try:
        results = [[Result.of_seeds([Result.of_run(run) for run in runs], name)] for name, runs in sides]
        return PairedSets.of(results), ""
    except Refused as error:
        return None, f"No verdict prompt by prompt. {error}"


def settings(run: RunData) -> dict[str, Any]:
    """Everything but the seed that decides a run's result, the code of its reward too. Paths into its own
    folder begin with RUN."""
    values = copy.deepcopy(deciding(run.config.model_dump(mode="json")))
    values["train"].pop("seed")
    values["code"] = {key: digest[:8] for key, digest in reward_of(run)["code"].items()}
    folder = run.folder.resolve()
    for key, value in values["data"].items():
        if isinstance(value, str) and Path(value).resolve().is_relative_to(folder):
            values["data"][key] = str("RUN" / Path(value).resolve().relative_to(folder))
    return values


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted keys; those of a phase under phases.NAME."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if key == "phases":
            value = {phase["name"]: {k: v for k, v in phase.items() if k != "name"} for phase in value}
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keys whose values differ, with the values."""
    keys = dict.fromkeys(k for c in configs for k in c)
    values = {key: [c.get(key, UNSET) for c in configs] for key in keys}
    return {key: v for key, v in values.items() if any(x != v[0] for x in v)}


def _labels(groups: Sequence[Sequence[RunData]], differences: Mapping[str, Sequence[Any]]) -> list[str]:
    """A line's label: the values that differ, where these are few, else the folder of its first run."""
    labels = []
    for i, group in enumerate(groups):
        parts = []
        for key, values in differences.items():
            if values[i] != UNSET:
                name = "" if key == "objective.name" else f"{key.split('.')[-1]} "
                parts.append(f"{name}{to_text(values[i])}")
        label = ", ".join(parts)
        is_readable = label and len(label) <= LONGEST_LABEL and len(differences) <= 3
        labels.append(label if is_readable else group[0].name)
    pairs = zip(labels, groups, strict=True)
    return [label if labels.count(label) == 1 else str(group[0].folder) for label, group in pairs]


def to_text(value: Any) -> str:
    return "none" if value is None else str(value)


def _line(label: str, runs: Sequence[RunData], measure: str) -> Curve:
    measured: list[dict[int, float]] = []
    for run in runs:
        pairs = zip(run.column("step"), run.column(measure), strict=True)
        measured.append({int(s): v for s, v in pairs if math.isfinite(v)})
    steps = sorted(set.intersection(*(set(k) for k in measured)))
    if not steps:
        raise Refused(
            f"compare: {', '.join(str(r.folder) for r in runs)}: expected steps at which "
            f"{'all of them have' if len(runs) > 1 else 'it has'} {measure}, got none"
        )
    values = np.array([[k[s] for s in steps] for k in measured])
    if measure.startswith("eval_"):
        finals = values[:, -1]
        se = to_array([run.value_at(steps[-1], f"{measure}_se") for run in runs])
    else:
        finals = values[:, -max(1, len(steps) // 10) :].mean(1)  # the last tenth: single steps are noisy
        se = np.full(len(runs), math.nan)
    return Curve(label, tuple(runs), np.array(steps), values, finals, se)


LINE_COLORS = (*COLORS, figures.INK)
DASHES = ("-", "--", ":", "-.")
SHORTENED = 30  # characters of a label in the figure
BANDS = 3  # seeds from which on there are intervals: that of two reaches 12.7 standard errors to each side


MEASURES = {HELD_OUT: "held-out reward", TRAINING: "training reward"}


def measure_name(comparison: RunComparison) -> str:
    """Of the metric, for people."""
    return MEASURES.get(comparison.measure, comparison.measure)


def color_of(number: int) -> str:
    return LINE_COLORS[number % len(LINE_COLORS)]


def figure(comparison: RunComparison, size: Size = WIDE, longest: int = SHORTENED) -> Figure:
    """Means over seeds against steps, single seeds thin; of `BANDS` seeds or more their 95 % t-intervals.

    Each line's label, of at most `longest` characters, stands at its end.
    """
    chart = Figure(figsize=size)
    lines = comparison.lines
    labels = [cut(line.label, longest) for line in lines] if len(lines) > 1 else []
    if len(set(labels)) < len(labels):
        labels = [f"{i}. {cut(line.label, longest - 3)}" for i, line in enumerate(lines, 1)]
    axes: Any = chart.add_axes(figures.margins(size, labels, 1))
    figures.style_axes(axes)
    end = max(1, *(int(line.steps[-1]) for line in comparison.lines))
    axes.set_xlim(0, end)
    shown = []
    for i, line in enumerate(comparison.lines):
        width = 1 if comparison.measure.startswith("eval_") else figures.smoothing(len(line.steps))
        values = np.array([figures.running_mean(v, width) for v in line.values])  # [S,K]
        shown.append(values)
        color, dash = color_of(i), DASHES[i // len(LINE_COLORS) % len(DASHES)]
        if len(values) > 1:
            axes.plot(line.steps, values.T, color=color, linewidth=0.5, alpha=0.6)
        if len(values) >= BANDS:
            intervals = [Interval.of(v) for v in values.T]
            low, high = [x.low for x in intervals], [x.high for x in intervals]
            axes.fill_between(line.steps, low, high, color=color, alpha=0.15, linewidth=0)
        marker = "o" if len(line.steps) < 30 else None
        style = {"color": color, "linewidth": 1.6, "marker": marker, "markersize": 3.4, "clip_on": False}
        axes.plot(line.steps, values.mean(0), dash, **style)
    every = np.concatenate([values.ravel() for values in shown])
    figures.scale_axes(axes, every)
    lowest, highest = every.min(), every.max()
    room = 0.25 * (highest - lowest) or 0.5  # a band may be so wide that it would flatten the lines
    axes.set_ylim(0.0 if lowest >= 0 else lowest - room, highest + room)
    figures.name_axes(axes, "step", measure_name(comparison), bold=True)
    at_edge = []
    for i, (text, line, values) in enumerate(zip(labels, comparison.lines, shown)):
        step, value = int(line.steps[-1]), float(values.mean(0)[-1])
        if step == end:
            at_edge.append((text, color_of(i), value))
        else:
            style = {"color": color_of(i), "fontsize": figures.FONT, "va": "center", "parse_math": False}
            axes.annotate(text, (step, value), (5, 0), textcoords="offset points", **style)
    if at_edge:
        figures.name_series(axes, size, at_edge)
    return chart


def write(comparison: RunComparison, folder: Path) -> list[Path]:
    """Write compare.png, .svg, .pdf, .csv and .html into `folder`, and return their paths."""
    _make(folder)
    paths = [folder / f"compare.{ending}" for ending in ("png", "svg", "pdf", "csv", "html")]
    figures.png(figure(comparison), paths[0])
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
    for run in (run for line in comparison.lines for run in line.runs):
        if run.steps < run.steps_configured:
            texts.append(f"{run.folder} has reached step {run.steps} of {run.steps_configured}.")
    if len({int(line.steps[-1]) for line in comparison.lines}) > 1:
        ends = "; ".join(f"{line.label} at {line.steps[-1]}" for line in comparison.lines)
        texts.append(f"The lines end at different steps: {ends}.")
    return texts


def final_words(line: Curve) -> str:
    """The final reward and its uncertainty."""
    if line.final.n > 1:
        return line.final.words(signed=False)
    error = f" ± {fixed(line.se[0])} (the run's own)" if math.isfinite(line.se[0]) else ""
    return fixed(line.final.mean) + error


def difference_words(comparison: RunComparison, line: Curve) -> str:
    if line is comparison.lines[0]:
        return "–"
    x = comparison.difference(line)
    return "fewer than two common seeds" if x is None else f"{x.words(signed=True)} ({x.n} seeds)"


def differences_words(comparison: RunComparison) -> list[str]:
    """Such as "objective.name: agro | rloo", in the order of the lines."""
    return [f"{key}: " + " | ".join(map(to_text, values)) for key, values in comparison.differences.items()]


def to_json(comparison: RunComparison, paths: Sequence[Path]) -> dict[str, Any]:
    paired = PairedSets(()) if comparison.paired is None else comparison.paired
    lines = []
    for line in comparison.lines:
        difference = comparison.difference(line)
        each = zip(line.runs, line.finals.tolist(), line.se.tolist(), strict=True)
        lines.append(
            {
                "label": line.label,
                "seeds": line.seeds,
                "step": int(line.steps[-1]),
                "final": line.final.to_json(),
                "difference_to_first": None if difference is None else difference.to_json(),
                "runs": [
                    {"run": str(r.folder), "seed": r.config.train.seed, "final": final, "se": none_if_nan(se)}
                    for r, final, se in each
                ],
            }
        )
    return {
        **paired.to_json(),
        "measure": comparison.measure,
        "interval": "95 % t-interval over seeds",
        "lines": lines,
        "differences": comparison.differences,
        "notes": notes(comparison),
        "files": [str(p) for p in paths],
    }


def page(comparison: RunComparison) -> str:
    """One self-contained file."""
    charts = {"wide": figure(comparison), "narrow": figure(comparison, NARROW, 14)}
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
        curves=[figures.svg(chart, name) for name, chart in charts.items()],
        rows=rows,
        differences={key: list(map(to_text, values)) for key, values in comparison.differences.items()},
        json=json.dumps(to_json(comparison, []), indent=1, ensure_ascii=False),
    )
