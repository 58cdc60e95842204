"""Several runs: those that differ in their seed alone are one line."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.config import deciding
from agro.errors import Refused
from agro.io.nearest import nearest
from agro.logs.results import Result
from agro.pages.run.paired_results import PairedSets
from agro.rollout.evaluate import t_quantile
from agro.runs.by_prompt import reward_of
from agro.runs.metrics import METRICS
from agro.runs.rundata import RunData, Values, load_run, to_array

HELD_OUT, TRAINING = "eval_reward", "reward_mean"
UNSET = "not set"
LONGEST = 48  # characters of a label


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
        n, mean, half = len(values), float(values.mean()), math.nan
        if n > 1:
            half = t_quantile(n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
        return cls(mean, mean - half, mean + half, tuple(map(float, values)))

    @property
    def n(self) -> int:
        return len(self.values)


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

    @property
    def unfinished(self) -> list[RunData]:
        """Runs that have not reached their last step."""
        return [run for run in self.runs if run.steps < run.steps_configured]


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
    if metric is not None and (metric not in METRICS or METRICS[metric].kind != "number"):
        near = nearest(metric, METRICS)
        hint = f"; did you mean {near}?" if near else ""
        raise Refused(f"--metric: expected a number of metrics.jsonl of these runs, got {metric!r}{hint}")
    if len({f.resolve() for f in folders}) < len(folders):
        raise Refused(f"compare: expected different runs, got {', '.join(map(str, folders))}")
    runs = [load_run(folder) for folder in folders]
    groups: list[list[RunData]] = []
    for run in runs:
        same = next((g for g in groups if settings(g[0]) == settings(run)), None)
        if same is None:
            groups.append([run])
        else:
            same.append(run)
    for group in groups:
        group.sort(key=lambda r: r.config.train.seed)
        for a, b in pairwise(group):
            if a.config.train.seed == b.config.train.seed:
                raise Refused(
                    f"compare: {a.folder} and {b.folder} have the same configuration and the same seed "
                    f"({a.config.train.seed}), so they are one run made twice; give one of them"
                )
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
        values = {key: v[i] for key, v in differences.items() if v[i] != UNSET}
        label = ", ".join(_short(key, value) for key, value in values.items())
        is_readable = label and len(label) <= LONGEST and len(differences) <= 3
        labels.append(label if is_readable else group[0].name)
    unique = []
    for label, group in zip(labels, groups, strict=True):
        unique.append(label if labels.count(label) == 1 else str(group[0].folder))
    return unique


def _short(key: str, value: Any) -> str:
    return to_text(value) if key == "objective.name" else f"{key.split('.')[-1]} {to_text(value)}"


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
        finals = values[:, -tail(len(steps)) :].mean(1)
        se = np.full(len(runs), math.nan)
    return Curve(label, tuple(runs), np.array(steps), values, finals, se)


def tail(steps: int) -> int:
    """Steps whose mean is the final value of what isn't held out: the last tenth: single steps are noisy."""
    return max(1, steps // 10)
