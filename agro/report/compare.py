"""Runs side by side: those of equal configuration but seed are one line."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agro.config import deciding
from agro.errors import Refused
from agro.report.metrics import RunData, load_run

Values = NDArray[np.float64]
Measure = Literal["eval_reward", "reward_mean"]
UNSET = "not set"


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % t-interval, whose ends are NaN for a single seed."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Values) -> Interval:
        n, mean = len(values), float(values.mean())
        half = t_quantile(n - 1) * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
        return cls(mean, mean - half, mean + half, n)


@dataclass(frozen=True)
class Line:
    """Runs that differ in their seed alone, S of them, at the K steps at which all of them were measured."""

    label: str
    runs: tuple[RunData, ...]  # by seed
    steps: NDArray[np.int64]  # [K]
    values: Values  # [S,K]
    finals: Values  # [S]
    se: Values  # [S] a run's own standard error over held-out prompts; NaN: unknown

    @property
    def seeds(self) -> list[int]:
        return [run.config.train.seed for run in self.runs]

    @property
    def final(self) -> Interval:
        return Interval.of(self.finals)

    @property
    def unfinished(self) -> list[RunData]:
        """Runs that haven't reached their last step."""
        return [run for run in self.runs if run.spans[-1].ends < asked(run)]


@dataclass(frozen=True)
class Comparison:
    measure: Measure
    lines: tuple[Line, ...]
    differences: dict[str, list[Any]]  # dotted key: each line's value
    without_heldout: tuple[RunData, ...]

    def difference(self, line: Line) -> Interval | None:
        """Of the final rewards to those of the first line, seed by seed; None where they share fewer than two seeds."""
        first = dict(zip(self.lines[0].seeds, self.lines[0].finals, strict=True))
        pairs = [v - first[s] for s, v in zip(line.seeds, line.finals, strict=True) if s in first]
        return Interval.of(np.array(pairs)) if line is not self.lines[0] and len(pairs) > 1 else None


def asked(run: RunData) -> int:
    """The steps that a run's configuration asks for."""
    return sum(run.config.phase(name).train.steps for name in run.config.phase_names)


def compare(folders: Sequence[Path]) -> Comparison:
    """Read and order runs. Raises `Refused` where one can't be read, or stands for a seed that another stands for."""
    if len({f.resolve() for f in folders}) < len(folders):
        raise Refused(f"compare: expected different runs, got {', '.join(map(str, folders))}")
    runs = [load_run(folder) for folder in folders]
    groups: list[list[RunData]] = []
    for run in runs:
        same = next((g for g in groups if settings(g[0]) == settings(run)), None)
        groups.append([run]) if same is None else same.append(run)
    for group in groups:
        group.sort(key=lambda r: r.config.train.seed)
        for a, b in pairwise(group):
            if a.config.train.seed == b.config.train.seed:
                raise Refused(
                    f"compare: {a.folder} and {b.folder} have the same configuration and the same seed "
                    f"({a.config.train.seed}), so they are one run made twice; give one of them"
                )
    without = tuple(r for r in runs if not np.isfinite(r.column("eval_reward")).any())
    measure: Measure = "reward_mean" if without else "eval_reward"
    differences = differing([flat(settings(g[0])) for g in groups])
    labels = _labels(groups, differences)
    lines = tuple(_line(label, group, measure) for label, group in zip(labels, groups, strict=True))
    return Comparison(measure, lines, differences, without)


def settings(run: RunData) -> dict[str, Any]:
    """What decides a run's result but its seed. Paths into its own folder begin with RUN, whatever the folder is called."""
    values = copy.deepcopy(deciding(run.config.model_dump(mode="json")))
    values["train"].pop("seed")
    own = run.folder.resolve()
    for key, value in values["data"].items():
        if isinstance(value, str) and Path(value).resolve().is_relative_to(own):
            values["data"][key] = str("RUN" / Path(value).resolve().relative_to(own))
    return values


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted keys; a phase's under phases.NAME."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if key == "phases":
            value = {phase["name"]: {k: v for k, v in phase.items() if k != "name"} for phase in value}
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return out


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keys whose values aren't the same in all, and these values."""
    keys = dict.fromkeys(k for c in configs for k in c)
    found = {key: [c.get(key, UNSET) for c in configs] for key in keys}
    return {k: v for k, v in found.items() if any(x != v[0] for x in v)}


def _labels(groups: Sequence[Sequence[RunData]], differences: Mapping[str, Sequence[Any]]) -> list[str]:
    """What a line is called: the values that differ, where these are few; else its first run's folder."""
    folders = [group[0].folder.resolve().name for group in groups]
    if not differences or len(differences) > 3:
        labels = folders
    else:
        labels = [
            ", ".join(_short(key, v[i]) for key, v in differences.items() if v[i] != UNSET)
            for i in range(len(groups))
        ]
        labels = [
            label if label and len(label) <= 48 else folder
            for label, folder in zip(labels, folders, strict=True)
        ]
    return [
        x if labels.count(x) == 1 else str(group[0].folder) for x, group in zip(labels, groups, strict=True)
    ]


def _short(key: str, value: Any) -> str:
    return words(value) if key == "objective.name" else f"{key.split('.')[-1]} {words(value)}"


def words(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else str(value)


def _line(label: str, runs: Sequence[RunData], measure: Measure) -> Line:
    known = [
        {int(s): v for s, v in zip(run.column("step"), run.column(measure), strict=True) if math.isfinite(v)}
        for run in runs
    ]
    steps = sorted(set.intersection(*(set(k) for k in known)))
    if not steps:
        raise Refused(
            f"compare: {', '.join(str(r.folder) for r in runs)}: expected steps at which "
            f"{'all of them have' if len(runs) > 1 else 'it has'} {measure}, got none"
        )
    values = np.array([[k[s] for s in steps] for k in known])
    if measure == "eval_reward":
        at = steps[-1]
        se = [run.heldout(at, at) for run in runs]
        return Line(
            label,
            tuple(runs),
            np.array(steps),
            values,
            values[:, -1],
            np.array([x.se if x else math.nan for x in se]),
        )
    last = values[:, -tail(len(steps)) :]
    return Line(label, tuple(runs), np.array(steps), values, last.mean(1), np.full(len(runs), math.nan))


def tail(steps: int) -> int:
    """Steps whose mean training reward is called final: the last tenth, for one step's is too noisy."""
    return max(1, steps // 10)


def t_quantile(df: int, level: float = 0.95) -> float:
    """t with P(|T| ≤ t) = `level` for Student's T with `df` degrees of freedom, by bisection."""
    low, high = 0.0, 1.0
    while _inside(high, df) < level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, df) < level else (low, middle)
    return (low + high) / 2


def _inside(t: float, df: int) -> float:
    """P(|T| ≤ t), a finite sum for whole `df` (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    cosine, odd = math.cos(angle), df % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, df, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
