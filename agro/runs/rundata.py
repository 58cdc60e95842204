"""A run folder as data: its configuration, one row of metrics per step, and its best measurement.

Metrics are declared once, in the tables of `metrics.md` next to this file, from which rows, report and guide
are made.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, StrictFloat, StrictInt, TypeAdapter, ValidationError

from agro.config import PolicyConfig, RunConfig
from agro.errors import Refused
from agro.io.files import write
from agro.io.numbers import count, fixed
from agro.io.strictjson import loads
from agro.runs.folder import SET_ASIDE
from agro.stats.intervals import Values as Values

Row = dict[str, Any]
GAIN = "eval_gain"  # the difference from the start; its interval and test have this prefix
LOGGED = "eval_logged_gain"  # an off-policy estimate of that difference, on the log
COMPARED = ("low", "high", "p", "n", "clusters", "detectable", "unknown_a", "unknown_b")
TABLES = (Path(__file__).parent / "metrics.md").read_text(encoding="utf-8")
OF_PARTS = ("reward_parts", "reward_shares", "eval_reward_parts", "eval_reward_parts_se")  # numbers by part
OTHERS = ("phase", "no_signal", "objective", "servers_dropped", "dropped_reasons")  # texts and objects


@dataclass(frozen=True)
class Metric:
    """One metric: its unit, a sentence for readers, and whether it is a number."""

    name: str
    unit: str
    caption: str
    is_number: bool = True


def _read_tables(tables: str) -> dict[str, Metric]:
    """The metrics of Markdown tables by name; their rows begin with the name as code."""
    metrics = {}
    for line in tables.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            code, unit, caption, _ = cells  # the guide also shows how it is computed
            name = code.strip("`")
            metrics[name] = Metric(name, unit, caption, name not in (*OF_PARTS, *OTHERS))
    return metrics


METRICS = _read_tables(TABLES)


def empty_metrics() -> dict[str, Any]:
    """A row of `metrics.jsonl` in which every value is unknown."""
    return dict.fromkeys(METRICS)


# Titles of the held-out metrics that may decide which model is best.
FOLLOWED = {"eval_reward": "held-out reward", "eval_auc": "held-out AUC"}
TOKENS = {"tokens trained on": "tokens", "tokens sampled": "sampled_tokens"}  # summed metrics by title
SCALARS = [m.name for m in METRICS.values() if m.is_number and m.name != "step"]


@dataclass(frozen=True)
class Measurement:
    """A held-out measurement of a metric: value, standard error, step, number of responses; None: unknown."""

    metric: str
    value: float
    se: float | None
    step: int
    n: int | None = None

    @classmethod
    def of(cls, metric: str, row: Mapping[str, Any]) -> Measurement:
        return cls(metric, row[metric], row.get(f"{metric}_se"), row["step"], row.get("eval_n"))


@dataclass(frozen=True)
class PhaseSpan:
    """A phase, which takes the weights from step `begins` to step `ends`."""

    name: str
    begins: int
    ends: int


@dataclass(frozen=True)
class RunData:
    """A run. `values`: config.json unchanged. `torn`: whether the last line of the metrics is incomplete.

    `best_model`: the measurement that selected the model in best/, if there is one.
    """

    folder: Path
    values: dict[str, Any]
    config: RunConfig
    rows: list[Row]
    torn: bool
    best_model: Measurement | None = None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def column(self, name: str) -> Values:
        """A metric by row; NaN if it is unknown or was not measured."""
        return to_array([row.get(name) for row in self.rows])

    def measures(self, *names: str) -> bool:
        """Whether any row has any of these metrics."""
        return any(np.isfinite(self.column(name)).any() for name in names)

    def latest(self, name: str) -> Any:
        """The latest known value of a metric; None without one."""
        values = [row[name] for row in self.rows if row.get(name) is not None]
        return values[-1] if values else None

    @property
    def training_kl(self) -> Values:
        """`kl_ref` of fresh responses; NaN in rows where it repeats the held-out one."""
        kl = self.column("kl_ref")
        return np.where(kl == self.column("eval_kl_ref"), math.nan, kl)

    @property
    def spans(self) -> list[PhaseSpan]:
        spans: list[PhaseSpan] = []
        for row in self.rows:
            begins = spans[-1].ends if spans else 0
            if spans and spans[-1].name == row["phase"]:
                begins = spans.pop().begins
            spans.append(PhaseSpan(row["phase"], begins, row["step"]))
        return spans

    def config_of(self, span: PhaseSpan) -> RunConfig:
        """The configuration of a phase, or that of the run if it names no such phase."""
        return self.config.phase(span.name) if span.name in self.config.phase_names else self.config

    @property
    def policy(self) -> PolicyConfig:
        """The policy of the latest phase so far."""
        return self.config_of(self.spans[-1]).policy

    @property
    def averages(self) -> str:
        """The decays of the phases that average weights; empty if none does."""
        names = self.config.phase_names
        decays = {name: self.config.phase(name).train.weights_average for name in names}
        suffixes = {name: f" in phase {name}" if len(names) > 1 else "" for name in names}
        return ", ".join(f"train.weights_average = {x:g}{suffixes[name]}" for name, x in decays.items() if x)

    @property
    def set_aside(self) -> int:
        """Held-out prompts of the run's own data that policies can answer."""
        path = self.folder / SET_ASIDE
        return len(path.read_bytes().splitlines()) if path.is_file() else 0

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self.spans[-1].ends

    @property
    def steps_configured(self) -> int:
        """The number of steps in the configuration."""
        return sum(self.config.phase(name).train.steps or 0 for name in self.config.phase_names)

    @property
    def followed(self) -> str | None:
        """The held-out metric that selects the best model."""
        names = (self.config.phase(name).followed for name in self.config.phase_names)
        return next(filter(None, names), None)

    @property
    def best_row(self) -> int | None:
        """The first row with the best value of the followed metric.

        None if it has no value, or if several measurements are all equal.
        """
        if self.followed is None or not self.measures(self.followed):
            return None
        values = self.column(self.followed)
        if np.isfinite(values).sum() > 1 and np.nanmin(values) == np.nanmax(values):
            return None
        return int(np.nanargmax(values))

    def mark(self, metric: str) -> int | None:
        """The row to mark in a metric's curve: the best of several, if the metric is followed."""
        several = np.isfinite(self.column(metric)).sum() > 1
        return self.best_row if several and metric == self.followed else None

    def heldout(self, start: int, end: int) -> Measurement | None:
        """The latest held-out reward of steps `start` to `end`."""
        for row in reversed(self.rows):
            if start <= row["step"] <= end and row.get("eval_reward") is not None:
                return Measurement.of("eval_reward", row)
        return None

    def total(self, name: str) -> float | None:
        """The sum of a metric over the steps with a known value; None without any."""
        values = self.column(name)
        return float(np.nansum(values)) if np.isfinite(values).any() else None

    def counted(self, name: str) -> str | None:
        """The formatted `total` of a metric."""
        total = self.total(name)
        return None if total is None else count(total)


def options_text(config: RunConfig) -> str:
    """The objective's explicit options as text."""
    return ", ".join(f"{name} = {value}" for name, value in config.objective.options.items())


def data_text(config: RunConfig) -> str:
    """The origin of a phase's samples as text."""
    if not config.data.draws_stored:
        return "fresh samples"
    share = f"{config.data.replay_text} " if config.data.samples_fresh else ""
    return f"{share}from the store"


@dataclass(frozen=True)
class Outcome:
    """The best and the latest of several measurements of the held-out metric that a run follows.

    `has_model`: whether best/ holds the model of the best measurement.
    """

    best: Measurement
    latest: Measurement
    at_end: bool  # whether the latest is that of the run's last step
    has_model: bool

    @classmethod
    def of(cls, run: RunData) -> Outcome | None:
        """The outcome of a run; None if the metric was measured less than twice."""
        metric, best_row = run.followed, run.best_row
        if metric is None or best_row is None:
            return None
        rows = [row for row in run.rows if row.get(metric) is not None]
        if len(rows) < 2:
            return None
        best, latest = (Measurement.of(metric, row) for row in (run.rows[best_row], rows[-1]))
        chosen = run.best_model
        has_model = chosen is not None and (chosen.metric, chosen.step) == (metric, best.step)
        return cls(best, latest, latest.step == run.steps, has_model)

    @property
    def title(self) -> str:
        """The metric's title."""
        return FOLLOWED[self.best.metric]

    @property
    def text(self) -> str:
        """One line for the terminal."""
        best = f"best {self.best.metric} {fixed(self.best.value)} at step {self.best.step}"
        if self.best.step == self.latest.step:
            return f"{best}, the last measurement"
        end = "the end" if self.at_end else f"step {self.latest.step}"
        return f"{best}; {end} {fixed(self.latest.value)}"


def to_array(values: Sequence[float | None]) -> Values:
    """An array of the numbers, with NaN for None."""
    return np.array([math.nan if v is None else v for v in values], np.float64)


def load_run(folder: Path) -> RunData:
    """Read `config.json` and `metrics.jsonl`. Raises `Refused` naming the file, or FILE:LINE."""
    path, best_path, best = folder / "config.json", folder / "best" / "best.json", None
    values = _read_object(path, "a run's configuration")
    config = RunConfig.of_record(values, str(path))
    rows, torn = _read_metrics(folder / "metrics.jsonl")
    if best_path.exists():
        measured = _read_object(best_path, "the measurement of the best model")
        metric: Any = measured.get("metric")
        _expect(metric in FOLLOWED, f"{best_path}: metric", f"one of {', '.join(FOLLOWED)}", metric)
        for key in ("step", metric):
            value = measured.get(key)
            _expect(type(value) in (int, float), f"{best_path}: {key}", "a number", value)
        best = Measurement.of(metric, measured)
    return RunData(folder, values, config, rows, torn, best)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(f"{path}: can't be read: {error.strerror}; expected a run folder") from None


def _read_object(path: Path, description: str) -> dict[str, Any]:
    try:
        values = loads(_read_bytes(path).decode("utf-8"))
    except ValueError as error:
        raise Refused(f"{path}: expected {description} as JSON: {error}") from None
    _expect(isinstance(values, dict), str(path), "a JSON object", values)
    return dict(values)


def _read_metrics(path: Path) -> tuple[list[Row], bool]:
    """The rows, and whether a kill left the last line incomplete."""
    rows, torn = list[Row](), False
    *lines, tail = _read_bytes(path).split(b"\n")
    for number, line in enumerate([*lines, tail] if tail else lines, 1):
        location = f"{path}:{number}"
        if not line:
            raise Refused(f"{location}: expected a JSON object, got an empty line")
        try:
            row = loads(line.decode("utf-8"))
        except ValueError as error:
            if number > len(lines):
                torn = True
                break
            raise Refused(
                f"{location}: {error}; only the last line may be torn, all others are JSON"
            ) from None
        _check(row, rows[-1]["step"] if rows else -1, location)
        rows.append(row)
    if not rows:
        raise Refused(f"{path} has no steps yet: expected at least one")
    return rows, torn


def _check(row: Any, previous: int, location: str) -> None:
    """Raise `Refused` for a row that no run writes. `previous`: the step of the row before it."""
    _expect(isinstance(row, dict), location, "a JSON object", row)
    step, phase, reason = (row.get(key) for key in ("step", "phase", "no_signal"))
    is_next = type(step) is int and step > previous
    _expect(is_next, f"{location}: step", f"a whole number above {previous}", step)
    _expect(isinstance(phase, str), f"{location}: phase", "text", phase)
    _expect(isinstance(reason, str | None), f"{location}: no_signal", "text or null", reason)
    for key in SCALARS:
        check_number(row.get(key), f"{location}: {key}")
    for key in OF_PARTS:
        parts = row.get(key)
        _expect(isinstance(parts, dict | None), f"{location}: {key}", "an object or null", parts)
        for name, value in (parts or {}).items():
            check_number(value, f"{location}: {key}: {name}")


def check_number(value: Any, location: str) -> None:
    _expect(value is None or type(value) in (int, float), location, "a number or null", value)


def _expect(holds: bool, location: str, expected: str, got: Any) -> None:
    if not holds:
        raise Refused(f"{location}: expected {expected}, got {got!r:.80}")


FILE = "held_out_rewards.json"

# By prompt id, the mean reward of its scored responses; None without any.
Rewards = Mapping[str, StrictFloat | None]


@dataclass(frozen=True)
class HeldOutRewards:
    """A run's rewards at its latest evaluation and at step 0, and a hash of each prompt's text.

    `clusters`: the smallest id among a prompt and its near-copies, by prompt; empty in older files.
    `unscored`: the unknown shares of a prompt's rewards at step 0 and at the latest evaluation, if any.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: StrictInt
    rewards: Rewards
    start: Rewards
    texts: Mapping[str, str]
    clusters: Mapping[str, str] = field(default_factory=dict)
    unscored: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Any, location: str) -> HeldOutRewards:
        """Parse the values of JSON. Raises `Refused` for values that no run of this version writes."""
        try:
            parsed = TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            [detail, *_] = error.errors()
            expected = "expected rewards of held-out prompts"
            raise Refused(f"{location}: {expected}: {detail['loc']}: {detail['msg']}") from None
        if parsed.texts.keys() != parsed.rewards.keys():
            raise Refused(f"{location}: expected texts of the prompts that have rewards, got those of others")
        return parsed


def write_rewards(folder: Path, rewards: HeldOutRewards) -> None:
    """Write the rewards into a run's folder, atomically."""
    write(folder / FILE, json.dumps(vars(rewards), ensure_ascii=False, allow_nan=False) + "\n")


def reward_of(run: RunData) -> dict[str, Any]:
    """The settings and code that decide the rewards of a run's last evaluation."""
    config = run.config.phase(run.config.phase_names[-1])
    inputs = run.values.get("inputs", {})
    played = config.environment
    return {
        **config.reward.model_dump(mode="json", include={"name", "options", "functions"}),
        "environment": None if played is None else (played.name, played.options),
        "code": {key: code for key, code in inputs.items() if "reward." in key or "environment." in key},
    }
