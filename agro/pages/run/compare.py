"""Compare results prompt by prompt, and runs also as curves, where runs that differ only in their seed form
one line. Produces sentences, a figure, a page and JSON."""

from __future__ import annotations

import copy
import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from agro.config import deciding
from agro.errors import Refused
from agro.io.numbers import chance, fixed, none_if_nan
from agro.io.peers import did_you_mean
from agro.io.terminal import csv_cell, first_of
from agro.logs.results import HELD_OUT, REWARD, WAY_OUT, Result
from agro.pages.run import figures
from agro.pages.run.figures import COLORS, NARROW, WIDE, Size, css, cut
from agro.pages.run.render import render
from agro.pages.run.verdict import Verdict
from agro.runs.rundata import METRICS, RunData, Values, load_run, reward_of
from agro.stats.intervals import standard_error, t_quantile
from agro.stats.paired import Comparison, holm
from agro.stats.paired import compare as compare_pairs

ROW = ("n", "a", "b", "difference", "low", "high", "p", "test", "detectable")  # of a comparison, in JSON


class Matching(NamedTuple):
    """Matched prompts, as pairs of ids, and the prompts of one side alone.

    `other_text`: ids that name different prompts on the two sides; they are also in `only_a` and `only_b`.
    """

    pairs: list[tuple[str, str]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    other_text: tuple[str, ...]

    @classmethod
    def of(cls, a: Mapping[str, str], b: Mapping[str, str]) -> Matching:
        """Match prompts with the same text. `a`, `b`: hashes of the texts, by id.

        Prompts with the same text are matched by id first, then in order.
        """
        pairs = [(key, key) for key in a if a[key] == b.get(key)]
        both = {key for key, _ in pairs}
        remaining: dict[str, list[str]] = {}
        for key, text in b.items():
            if key not in both:
                remaining.setdefault(text, []).append(key)
        for key, text in a.items():
            if key not in both and remaining.get(text):
                pairs.append((key, remaining[text].pop(0)))
        ids_a, ids_b = ({pair[side] for pair in pairs} for side in (0, 1))
        only_a, only_b = (
            tuple(key for key in side if key not in matched) for side, matched in ((a, ids_a), (b, ids_b))
        )
        return cls(pairs, only_a, only_b, tuple(key for key in only_a if key in b))


@dataclass(frozen=True)
class PairedResults:
    """`b` compared with `a`, by one metric. `unscored`: prompts without a score on one side.

    `p`: p-value of no difference, adjusted (Holm) if it is one of several comparisons.
    """

    a: Result
    b: Result
    metric: str
    comparison: Comparison
    matching: Matching
    unscored: tuple[str, ...]
    p: float
    family: int = 1  # number of comparisons in its family
    name: str = ""  # within the family

    @classmethod
    def of(cls, a: Result, b: Result, metric: str | None = None) -> Self:
        """Compare two results. Raises `Refused` if they share no prompt, metric or reward."""
        chosen = metric_of(a, b, metric)
        differing = [key for key in a.scoring if key in b.scoring and a.scoring[key] != b.scoring[key]]
        if differing:
            values = " and ".join(repr(x.scoring[differing[0]]) for x in (a, b))
            raise Refused(
                f"{a.name} and {b.name}: expected the same reward and environment, but these, their options "
                f"or their code differ: {differing[0]} is {values:.300}. {WAY_OUT}"
            )
        matching = Matching.of(a.texts, b.texts)
        if not matching.pairs:
            renamed = f"; {matching.other_text[0]} names different prompts" if matching.other_text else ""
            raise Refused(
                f"{a.name} and {b.name}: expected prompts that both answered, got none{renamed}. {WAY_OUT}"
            )
        pairs = matching.pairs
        scores_a, scores_b = a.scores[chosen], b.scores[chosen]
        values_a = np.array([scores_a.get(key) for key, _ in pairs], np.float64)  # None becomes NaN
        values_b = np.array([scores_b.get(key) for _, key in pairs], np.float64)
        unscored = tuple(key for (key, _), x in zip(pairs, values_a + values_b, strict=True) if math.isnan(x))
        numbers: dict[str, int] = {}
        clusters = [numbers.setdefault(a.clusters.get(key, key), len(numbers)) for key, _ in pairs]
        unknown_a, unknown_b = (
            np.array([side.unscored.get(chosen, {}).get(key, 0.0) for key in keys])
            for side, keys in zip((a, b), zip(*pairs, strict=True), strict=True)
        )
        comparison = compare_pairs(values_a, values_b, clusters, (unknown_a, unknown_b))
        return cls(
            a, b, chosen, comparison, matching, unscored, comparison.p, name=a.task or b.task or "prompts"
        )

    @property
    def verdict(self) -> Verdict:
        prompts = "held-out prompts" if HELD_OUT in (self.a.task, self.b.task) else "prompts"
        measure = "mean reward" if self.metric == REWARD else self.metric
        return Verdict.compared(replace(self.comparison, p=self.p), prompts=prompts, measure=measure)

    @property
    def notes(self) -> list[str]:
        """List what a reader must know about the sentence."""
        a, b, x, matching, answer = self.a, self.b, self.comparison, self.matching, self.verdict.answer
        copies = f" in {x.clusters} clusters of near-copies" if x.clusters < x.n else ""
        text = f"Matched: {x.n} prompts{copies}."
        if not math.isnan(x.detectable) and answer != "not shown":  # "not shown" says it in its sentence
            text += f" This many show a difference of {fixed(x.detectable)} or more four times out of five."
        if self.family > 1:
            text += f" p is adjusted for {self.family} comparisons (Holm); unadjusted {chance(x.p)}."
        notes = [text]
        for keys, description in (
            (matching.only_a, f"prompts only in {a.name}"),
            (matching.only_b, f"prompts only in {b.name}"),
            (self.unscored, "prompts without a score on one side"),
            (a.unreadable, f"records of {a.name} that can't be read"),
            (b.unreadable, f"records of {b.name} that can't be read"),
        ):
            if keys:
                notes.append(f"Not compared: {len(keys)} {description} ({first_of(keys)}).")
        if matching.other_text:
            notes.append(
                f"{len(matching.other_text)} of these have the same id on both sides, but different texts "
                f"({', '.join(matching.other_text[:3])})."
            )
        notes += self._scored()
        if answer == "not shown" and x.low * x.high > 0:
            notes.append(
                f"The interval excludes 0, but the p-value of the test ({x.test}) isn't below .05: not shown."
            )
        if max(a.seeds, b.seeds) > 1:
            notes.append(
                f"Rewards are means over seeds ({a.seeds} and {b.seeds}): the interval covers prompts, "
                "and the table shows the seeds."
            )
        elif a.step is not None or b.step is not None:
            notes.append("This compares these two models: the interval excludes the variation between seeds.")
        return notes

    def _scored(self) -> list[str]:
        texts, a, b = [], self.a, self.b
        shared = [name for name in a.scores if name in b.scores and name != self.metric]
        if shared:
            texts.append(f"Scored by {self.metric}; both also have {', '.join(shared)} (--metric NAME).")
        unsaid = [x.name for x in (a, b) if not x.scoring]
        if self.metric == REWARD and unsaid:
            texts.append(
                f"{' and '.join(unsaid)}: the reward isn't recorded there; it must be the same on both sides."
            )
        pairs = self.matching.pairs
        prompted = [k for k, other in pairs if k in a.prompted and a.prompted[k] != b.prompted.get(other)]
        if prompted and b.prompted:
            texts.append(
                f"{len(prompted)} of the prompts were worded differently for the two models (template or "
                f"examples), such as {', '.join(prompted[:3])}: the difference includes that of the "
                "wording."
            )
        return texts

    def row(self) -> dict[str, Any]:
        """Return a row of JSON; None where unknown. `p` and `verdict` are adjusted for all comparisons."""
        values = {name: getattr(self.comparison, name) for name in ROW} | {"p": self.p}
        finite = {k: None if isinstance(x, float) and math.isnan(x) else x for k, x in values.items()}
        return {"name": self.name, **finite, "verdict": self.verdict.answer}

    def to_json(self) -> dict[str, Any]:
        """Return the details of a row: both sides, the matching, and what wasn't compared."""
        p = self.comparison.p
        return {
            "name": self.name,
            "a": {"name": self.a.name, "step": self.a.step},
            "b": {"name": self.b.name, "step": self.b.step},
            "metric": self.metric,
            "sentence": self.verdict.sentence,
            "p_alone": None if math.isnan(p) else p,
            "clusters": self.comparison.clusters,
            "only_a": self.matching.only_a,
            "only_b": self.matching.only_b,
            "other_text": self.matching.other_text,
            "unscored": self.unscored,
            "unreadable": [*self.a.unreadable, *self.b.unreadable],
            "notes": self.notes,
        }


def metric_of(a: Result, b: Result, named: str | None) -> str:
    """Return the named metric, or the first that both have. Raises `Refused` if there is none."""
    both = [name for name in a.scores if name in b.scores]
    if named is None and both:
        return both[0]
    if named is not None and named in both:
        return named
    expected = "a metric that both have" if named is None else f"--metric {named} on both sides"
    sides = "; ".join(f"{x.name} has {', '.join(x.scores) or 'none'}" for x in (a, b))
    raise Refused(
        f"{a.name} and {b.name}: expected {expected}, got different scoring: {sides}. What to do: score both "
        "with one metric"
    )


@dataclass(frozen=True)
class PairedSets:
    """Comparisons of several results with the first one, with p adjusted for their number.

    `notes`: the sets that aren't compared, and why.
    """

    pairs: tuple[PairedResults, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, sides: Sequence[Sequence[Result]], metric: str | None = None) -> Self:
        """`sides`: for each, one result per set of prompts. Raises `Refused` if nothing can be compared."""
        pairs: list[PairedResults] = []
        notes: list[str] = []
        base = sides[0]
        for other in sides[1:]:
            same = {result.task: result for result in other}
            matched = [(result, same[result.task]) for result in base if result.task in same]
            if len(base) == len(other) == 1:  # one set on each side matches whatever its name
                matched = [(base[0], other[0])]
            tasks = {result.task for both in matched for result in both}
            for side, against in ((base, other), (other, base)):
                names = [result.task or "(without a name)" for result in side if result.task not in tasks]
                if names:
                    notes.append(
                        f"{len(names)} sets of {side[0].name} aren't in {against[0].name}: {first_of(names)}"
                    )
            for a, b in matched:
                try:
                    paired = PairedResults.of(a, b, metric)
                except Refused as error:
                    notes.append(str(error))
                    continue
                name = paired.name if len(sides) == 2 else f"{b.name}: {paired.name}"
                pairs.append(replace(paired, name=name))
        if not pairs:
            raise Refused("\n".join(notes))
        adjusted = holm([pair.comparison.p for pair in pairs])
        family = len(pairs)
        final = [replace(x, p=p, family=family) for x, p in zip(pairs, adjusted, strict=True)]
        return cls(tuple(final), tuple(notes))

    def to_json(self) -> dict[str, Any]:
        return {
            "sets": [pair.row() for pair in self.pairs],
            "matching": [pair.to_json() for pair in self.pairs],
            "not_compared": self.notes,
        }


def sets_in_words(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each set of a document as its `row`, with a `sentence`, `notes`, and `cells`: name, number of
    prompts, both means, the difference with its interval."""
    sets = []
    for row, details in zip(document["sets"], document["matching"], strict=True):
        sides = details["a"], details["b"]
        a, b = (x["name"] if x["step"] is None else f"{x['name']} at step {x['step']}" for x in sides)
        named = f"{row['name']}: " if len(document["sets"]) > 1 else ""
        difference = fixed(row["difference"], signed=True)
        if row["low"] is not None:
            difference += f" [{fixed(row['low'], signed=True)}, {fixed(row['high'], signed=True)}]"
        cells = [row["name"], str(row["n"]), fixed(row["a"]), fixed(row["b"]), difference]
        sentence = f"{named}{b} against {a}: {details['sentence']}"
        sets.append({"row": row, "sentence": sentence, "notes": details["notes"], "cells": cells})
    return sets


HELD_OUT_REWARD, TRAINING_REWARD = "eval_reward", "reward_mean"
MEASURES = {HELD_OUT_REWARD: "held-out reward", TRAINING_REWARD: "training reward"}
UNSET = "not set"
LONGEST_LABEL = 48  # characters


def measure_name(measure: str) -> str:
    """Return a metric's display name."""
    return MEASURES.get(measure, measure)


@dataclass(frozen=True)
class Interval:
    """A mean over `n` seeds and its 95% t-interval; its ends are NaN for a single seed."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Values) -> Interval:
        mean = float(values.mean())
        half = t_quantile(len(values) - 1) * standard_error(values) if len(values) > 1 else math.nan
        return cls(mean, mean - half, mean + half, len(values))

    def to_json(self) -> dict[str, Any]:
        low, high = none_if_nan(self.low), none_if_nan(self.high)
        return {"mean": self.mean, "low": low, "high": high, "seeds": self.n}


@dataclass(frozen=True)
class Curve:
    """S runs that differ only in their seed, at the K steps at which all were measured. `runs`: by seed.

    `se`: each run's standard error over held-out prompts at the last step; NaN if unknown.
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


@dataclass(frozen=True)
class RunComparison:
    """Runs compared as curves. `measure`: a metric of metrics.jsonl. `differences`: each line's value by
    dotted key. `without_heldout`: runs without held-out reward.

    `paired`: the other runs against the first on the same prompts; `unpaired`: why there is none.
    """

    measure: str
    lines: tuple[Curve, ...]
    differences: dict[str, list[Any]]
    without_heldout: tuple[RunData, ...]
    paired: PairedSets | None = None
    unpaired: str = ""


def compare(folders: Sequence[Path], metric: str | None = None) -> RunComparison:
    """Read runs and group them. Raises `Refused` if one can't be read, or two are the same run.

    `metric`: a metric of metrics.jsonl; by default held-out reward, or training reward if a run has none.
    """
    if metric is not None and (metric not in METRICS or not METRICS[metric].is_number):
        hint = did_you_mean(metric, METRICS)
        expected = "a metric of metrics.jsonl"
        raise Refused(f"--metric: expected {expected}, got {metric!r}{hint and f'; {hint}'}")
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
                f"({run.config.train.seed}), so they are the same run twice; leave one out"
            )
        else:
            same.append(run)
    groups.sort(key=lambda group: min(map(runs.index, group)))  # in the order of the arguments
    without = tuple(r for r in runs if not np.isfinite(r.column("eval_reward")).any())
    measure = metric or (TRAINING_REWARD if without else HELD_OUT_REWARD)
    differences = differing([flat(settings(g[0])) for g in groups])
    labels = _labels(groups, differences)
    lines = tuple(_line(label, group, measure) for label, group in zip(labels, groups, strict=True))
    paired = _paired(lines) if metric in (None, HELD_OUT_REWARD) else (None, "")
    return RunComparison(measure, lines, differences, without, *paired)


def _paired(lines: Sequence[Curve]) -> tuple[PairedSets | None, str]:
    """Compare every other line, as its mean over seeds, with the first, or two runs of one line; or say why
    there is no verdict. Neither for a single run."""
    sides = [(line.label, line.runs) for line in lines]
    if len(lines) == 1:
        sides = [(run.name, (run,)) for run in lines[0].runs]
        if len(sides) > 2:
            return None, "These runs differ only in their seed, so none is compared with another."
    if len(sides) < 2:
        return None, ""
    try:
        results = [[Result.of_seeds([Result.of_run(run) for run in runs], name)] for name, runs in sides]
        return PairedSets.of(results), ""
    except Refused as error:
        return None, f"No verdict prompt by prompt. {error}"


def settings(run: RunData) -> dict[str, Any]:
    """Return everything but the seed that determines a run's result, including its reward's code. Paths into
    its own folder begin with RUN."""
    values = copy.deepcopy(deciding(run.config.model_dump(mode="json")))
    values["train"].pop("seed")
    values["code"] = {key: digest[:8] for key, digest in reward_of(run)["code"].items()}
    folder = run.folder.resolve()
    for key, value in values["data"].items():
        if isinstance(value, str) and Path(value).resolve().is_relative_to(folder):
            values["data"][key] = str("RUN" / Path(value).resolve().relative_to(folder))
    return values


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values to dotted keys; a phase's are under phases.NAME."""
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
    """Return the keys whose values differ, with the values."""
    keys = dict.fromkeys(k for c in configs for k in c)
    values = {key: [c.get(key, UNSET) for c in configs] for key in keys}
    return {key: v for key, v in values.items() if any(x != v[0] for x in v)}


def _labels(groups: Sequence[Sequence[RunData]], differences: Mapping[str, Sequence[Any]]) -> list[str]:
    """Label a line by its differing values, if they are few, else by the folder of its first run."""
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
        errors = (dict(zip(run.column("step"), run.column(f"{measure}_se"), strict=True)) for run in runs)
        se = np.array([error[steps[-1]] for error in errors])
    else:
        finals = values[:, -max(1, len(steps) // 10) :].mean(1)  # the last tenth: single steps are noisy
        se = np.full(len(runs), math.nan)
    return Curve(label, tuple(runs), np.array(steps), values, finals, se)


LINE_COLORS = (*COLORS, figures.INK)
DASHES = ("-", "--", ":", "-.")
SHORTENED = 30  # characters of a label in the figure
BANDS = 3  # fewest seeds with an interval: for two it reaches 12.7 standard errors to each side


def color_of(number: int) -> str:
    return LINE_COLORS[number % len(LINE_COLORS)]


def figure(comparison: RunComparison, size: Size = WIDE, longest: int = SHORTENED) -> Figure:
    """Plot means over seeds against steps, thin single seeds, and 95% t-intervals for `BANDS` seeds or more.

    Each line's label, of at most `longest` characters, is at the height of its end.
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
    room = 0.25 * (highest - lowest) or 0.5  # a wide band mustn't flatten the lines
    axes.set_ylim(0.0 if lowest >= 0 else lowest - room, highest + room)
    figures.name_axes(axes, "step", measure_name(comparison.measure), bold=True)
    ends = [float(values.mean(0)[-1]) for values in shown]
    figures.name_series(axes, size, [(text, color_of(i), ends[i]) for i, text in enumerate(labels)])
    return chart


def write(comparison: RunComparison, folder: Path) -> dict[str, Any]:
    """Write compare.png, .svg, .pdf, .csv and .html to `folder`; return the document, which names them."""
    _make(folder)
    paths = [folder / f"compare.{ending}" for ending in ("png", "svg", "pdf", "csv", "html")]
    figures.png(figure(comparison), paths[0])
    for path, date in ((paths[1], "Date"), (paths[2], "CreationDate")):
        with matplotlib.rc_context({"svg.hashsalt": "compare"}):  # reproducible files
            figure(comparison).savefig(path, facecolor="white", metadata={date: None})
    with paths[3].open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["line", "run", "seed", "step", comparison.measure])
        for line in comparison.lines:
            for run, values in zip(line.runs, line.values, strict=True):
                rows = zip(line.steps.tolist(), values.tolist(), strict=True)
                labels = [csv_cell(line.label), csv_cell(str(run.folder)), run.config.train.seed]
                writer.writerows([*labels, *row] for row in rows)
    document = to_json(comparison)
    paths[4].write_text(page(comparison, document), encoding="utf-8")
    return document | {"files": [str(path) for path in paths]}


def write_results(paired: PairedSets, folder: Path) -> dict[str, Any]:
    """Write compare.html for results that aren't all runs; return the document, which names it."""
    _make(folder)
    path, document = folder / "compare.html", paired.to_json()
    path.write_text(render("results.html", **_shared(document)), encoding="utf-8")
    return document | {"files": [str(path)]}


def _shared(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template context that both pages share."""
    numbers = json.dumps(document, indent=1, ensure_ascii=False)
    return {"sets": sets_in_words(document), "not_compared": document["not_compared"], "json": numbers}


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--out {folder}: expected a folder to write into: {error.strerror}") from None


def notes(comparison: RunComparison) -> list[str]:
    """List what a reader must know about the numbers."""
    texts = [comparison.unpaired] if comparison.unpaired else []
    if comparison.measure == TRAINING_REWARD:
        names = ", ".join(str(r.folder) for r in comparison.without_heldout)
        texts.append(
            f"Training reward is compared, because there is no held-out reward in {names}. It is measured on "
            "each run's training responses, from any source."
        )
    if not comparison.measure.startswith("eval_"):
        texts.append("The final value is the mean of the last tenth of the steps.")
    single = [line.label for line in comparison.lines if len(line.runs) == 1]
    if single:
        lines_named = "each line" if len(single) == len(comparison.lines) else "; ".join(single)
        note = f"There is a single seed of {lines_named}, so there is no interval over seeds."
        if comparison.measure == HELD_OUT_REWARD:
            note += " ± is the run's standard error over held-out prompts."
        texts.append(note)
    if any(len(line.runs) == BANDS - 1 for line in comparison.lines):
        texts.append("For two seeds both values are shown: an interval would say no more.")
    for run in (run for line in comparison.lines for run in line.runs):
        if run.steps < run.steps_configured:
            texts.append(f"{run.folder} has reached step {run.steps} of {run.steps_configured}.")
    if len({int(line.steps[-1]) for line in comparison.lines}) > 1:
        ends = "; ".join(f"{line.label} at {line.steps[-1]}" for line in comparison.lines)
        texts.append(f"The lines end at different steps: {ends}.")
    return texts


def final_words(line: Mapping[str, Any]) -> str:
    """Format the final reward of a document's line, and its uncertainty."""
    runs = line["runs"]
    if len(runs) > 1:
        return _words(line["final"], [run["final"] for run in runs], signed=False)
    error = "" if runs[0]["se"] is None else f" ± {fixed(runs[0]['se'])} (the run's own)"
    return fixed(line["final"]["mean"]) + error


def difference_words(line: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Format the difference of a document's line to the first."""
    if line is base:
        return "–"
    x = line["difference_to_first"]
    if x is None:
        return "fewer than two common seeds"
    return f"{_words(x, _by_seed(line, base), signed=True)} ({x['seeds']} seeds)"


def _by_seed(line: Mapping[str, Any], base: Mapping[str, Any]) -> list[float]:
    """Return the differences in final reward between a line and the first, for common seeds."""
    base_final = {run["seed"]: run["final"] for run in base["runs"]}
    return [run["final"] - base_final[run["seed"]] for run in line["runs"] if run["seed"] in base_final]


def _words(x: Mapping[str, Any], values: Sequence[float], *, signed: bool) -> str:
    """Format a mean with its interval, or with each value if there are fewer seeds than `BANDS`."""
    mean = fixed(x["mean"], signed=signed)
    if x["seeds"] < BANDS:
        return f"{mean}  ({' and '.join(fixed(value, signed=signed) for value in values)})"
    return f"{mean}  [{fixed(x['low'], signed=signed)}, {fixed(x['high'], signed=signed)}]"


def differences_words(differences: Mapping[str, Sequence[Any]]) -> list[str]:
    """Format differences such as "objective.name: agro | rloo", in the order of the lines."""
    return [f"{key}: " + " | ".join(map(to_text, values)) for key, values in differences.items()]


def to_json(comparison: RunComparison) -> dict[str, Any]:
    """Return the document of `agro compare`, from which page and text are made, before its files exist."""
    paired = PairedSets(()) if comparison.paired is None else comparison.paired
    lines: list[dict[str, Any]] = []
    for line in comparison.lines:
        each = zip(line.runs, line.finals.tolist(), line.se.tolist(), strict=True)
        row = {
            "label": line.label,
            "seeds": line.seeds,
            "step": int(line.steps[-1]),
            "final": Interval.of(line.finals).to_json(),
            "difference_to_first": None,
            "runs": [
                {"run": str(r.folder), "seed": r.config.train.seed, "final": final, "se": none_if_nan(se)}
                for r, final, se in each
            ],
        }
        differences = _by_seed(row, lines[0]) if lines else []
        if len(differences) > 1:
            row["difference_to_first"] = Interval.of(np.array(differences)).to_json()
        lines.append(row)
    return {
        **paired.to_json(),
        "measure": comparison.measure,
        "interval": "95% t-interval over seeds",
        "lines": lines,
        "differences": comparison.differences,
        "notes": notes(comparison),
        "files": [],
    }


def page(comparison: RunComparison, document: Mapping[str, Any]) -> str:
    """Render a comparison of runs as one self-contained page."""
    charts = {"wide": figure(comparison), "narrow": figure(comparison, NARROW, 14)}
    lines = document["lines"]
    rows = []
    for i, line in enumerate(lines):
        texts = {"final": final_words(line), "difference": difference_words(line, lines[0])}
        rows.append({"color": css(color_of(i)), "line": line, **texts})
    return render(
        "compare.html",
        **_shared(document),
        runs=sum(len(line["runs"]) for line in lines),
        measure=measure_name(document["measure"]),
        notes=document["notes"],
        curves=[figures.svg(chart, name) for name, chart in charts.items()],
        rows=rows,
        differences={key: list(map(to_text, values)) for key, values in document["differences"].items()},
    )
