"""What a run folder says: its configuration and one row of numbers a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.config import RunConfig
from agro.errors import Refused
from agro.strictjson import loads

Row = dict[str, Any]
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """A held-out reward, its standard error (NaN: unknown), and the step it belongs to."""

    value: float
    se: float
    step: int


@dataclass(frozen=True)
class Span:
    """A phase: the weights of step `begins` go in, those of `ends` come out."""

    name: str
    begins: int
    ends: int


@dataclass(frozen=True)
class RunData:
    folder: Path
    values: dict[str, Any]  # config.json as it stands
    config: RunConfig
    rows: list[Row]
    torn: bool  # the last line of the metrics was cut, as a kill leaves it
    best: Measured | None = None  # of the model in best/, where one was kept

    def column(self, name: str) -> Values:
        """One value a row; NaN: unknown or not measured."""
        return known([row.get(name) for row in self.rows])

    @property
    def training_kl(self) -> Values:
        """KL of fresh responses, one a row; without any, kl_ref is the held-out one, which isn't taken."""
        kl = self.column("kl_ref")
        return np.where(kl == self.column("eval_kl_ref"), math.nan, kl)

    @property
    def spans(self) -> list[Span]:
        found: list[Span] = []
        for row in self.rows:
            if found and found[-1].name == row["phase"]:
                found[-1] = Span(row["phase"], found[-1].begins, row["step"])
            else:
                found.append(Span(row["phase"], found[-1].ends if found else 0, row["step"]))
        return found

    def heldout(self, first: int, last: int) -> Measured | None:
        """The latest held-out reward of steps `first` to `last`."""
        for row in reversed(self.rows):
            if first <= row["step"] <= last and row.get("eval_reward") is not None:
                se = row.get("eval_reward_se")
                return Measured(row["eval_reward"], math.nan if se is None else se, row["step"])
        return None

    def total(self, name: str) -> float | None:
        """The sum over the steps that know it; None where none does."""
        known = self.column(name)
        return float(np.nansum(known)) if np.isfinite(known).any() else None


def known(values: Sequence[float | None]) -> Values:
    """Numbers, NaN for what is unknown."""
    return np.array([math.nan if v is None else v for v in values], np.float64)


def load_run(folder: Path) -> RunData:
    """Read `config.json` and `metrics.jsonl`. Raises `Refused` naming the file, or FILE:LINE."""
    path = folder / "config.json"
    values = _read_object(path, "a run's configuration")
    known = {key: value for key, value in values.items() if key in RunConfig.model_fields}
    config = RunConfig.of(known, str(path))
    rows, torn = _read_metrics(folder / "metrics.jsonl")
    return RunData(folder, values, config, rows, torn, _read_best(folder / "best" / "best.json"))


def _read_best(path: Path) -> Measured | None:
    if not path.exists():
        return None
    values = _read_object(path, "what was measured of the best model")
    for key in ("step", "eval_reward"):
        if isinstance(values.get(key), bool) or not isinstance(values.get(key), int | float):
            raise Refused(f"{path}: {key}: expected a number, got {values.get(key)!r:.80}")
    se = values.get("eval_reward_se")
    return Measured(values["eval_reward"], math.nan if se is None else se, values["step"])


def _read_object(path: Path, what: str) -> dict[str, Any]:
    try:
        values = loads(_bytes(path).decode("utf-8"))
    except ValueError as error:
        raise Refused(f"{path}: expected {what} as JSON: {error}") from None
    if not isinstance(values, dict):
        raise Refused(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def _read_metrics(path: Path) -> tuple[list[Row], bool]:
    rows: list[Row] = []
    lines = _bytes(path).split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            if number < len(lines):
                raise Refused(f"{path}:{number}: expected a JSON object, got an empty line")
            continue
        try:
            row = loads(line.decode("utf-8"))
        except ValueError as error:
            if number == len(lines):  # without its newline: what a kill in the middle of writing leaves
                return _some(rows, path), True
            raise Refused(
                f"{path}:{number}: {error}; every line but a torn last one is a JSON object"
            ) from None
        _check(row, rows[-1]["step"] if rows else -1, f"{path}:{number}")
        rows.append(row)
    return _some(rows, path), False


def _check(row: Any, before: int, where: str) -> None:
    if not isinstance(row, dict):
        raise Refused(f"{where}: expected a JSON object, got {row!r:.80}")
    step, phase = row.get("step"), row.get("phase")
    if isinstance(step, bool) or not isinstance(step, int) or step <= before:
        raise Refused(f"{where}: step: expected a whole number above {before}, got {step!r:.80}")
    if not isinstance(phase, str):
        raise Refused(f"{where}: phase: expected text, got {phase!r:.80}")
    for key in COLUMNS:
        _check_number(row.get(key), f"{where}: {key}")
    parts = row.get("reward_parts")
    if parts is not None and not isinstance(parts, dict):
        raise Refused(f"{where}: reward_parts: expected an object or null, got {parts!r:.80}")
    for name, value in (parts or {}).items():
        _check_number(value, f"{where}: reward_parts: {name}")


def _check_number(value: Any, where: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise Refused(f"{where}: expected a number or null, got {value!r:.80}")


COLUMNS = (
    "reward_mean",
    "eval_reward",
    "eval_reward_se",
    "eval_kl_ref",
    "kl_ref",
    "beta",
    "regret",
    "grad_norm",
    "grad_norm_clipped",
    "tokens",
    "sampled_tokens",
    "seconds",
    "staleness_mean",
    "staleness_max",
    "length_mean",
    "truncated_share",
    "groups",
    "groups_equal",
    "rewards_failed",
    "left_out",
    "skipped",
    "rolled_back",
    "logp_diff_mean",
    "logp_diff_max",
    "eval_n",
    "eval_unscored",
    "eval_consistency",
    "eval_consistency_se",
    "eval_consistency_fall",
    "eval_consistency_fall_se",
    "eval_groups",
    "eval_fresh_consistency",
    "eval_fresh_consistency_se",
    "eval_regret",
    "eval_regret_se",
    "eval_fresh_groups",
    "pull_to_rewards",
)


def _some(rows: list[Row], path: Path) -> list[Row]:
    if not rows:
        raise Refused(f"{path} holds no step yet; a report needs one at least")
    return rows


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(
            f"{path}: can't be read: {error.strerror}; expected a run folder, as agro train writes it"
        ) from None
