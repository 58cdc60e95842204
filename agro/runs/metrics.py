"""The metrics of `metrics.jsonl`, each declared once in the tables of `metrics.md` beside this file, of
which rows, report and guide are made; and those that may say which model is best."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOGGED = "eval_logged_gain"  # the same by an off-policy estimate on the log
GAIN = "eval_gain"  # the difference to the start; its interval and test have this prefix
TABLES = (Path(__file__).parent / "metrics.md").read_text(encoding="utf-8")
OF_PARTS = ("reward_parts", "reward_shares", "eval_reward_parts", "eval_reward_parts_se")  # by part a number
OTHERS = ("phase", "no_signal", "objective", "servers_dropped", "dropped_reasons")  # texts and objects


@dataclass(frozen=True)
class Metric:
    """One metric: its unit, a sentence for readers, how it is computed, and whether it is a number."""

    name: str
    unit: str
    caption: str
    computed: str
    is_number: bool = True


def _read(tables: str) -> dict[str, Metric]:
    """By name the metrics of Markdown tables, whose rows begin with a name as code."""
    metrics = {}
    for line in tables.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            code, unit, caption, computed = cells
            name = code.strip("`")
            metrics[name] = Metric(name, unit, caption, computed, name not in (*OF_PARTS, *OTHERS))
    return metrics


METRICS = _read(TABLES)


def empty_metrics() -> dict[str, Any]:
    """A row of `metrics.jsonl` in which every value is unknown."""
    return dict.fromkeys(METRICS)


@dataclass(frozen=True)
class SelectionMetric:
    """A held-out metric that says which model is best."""

    title: str  # for people
    needs: str  # what it is measured on
    lower: bool = False  # whether lower values are better


LOG = "held-out groups (data.hold_out or data.eval_store)"
FOLLOWED = {
    "eval_reward": SelectionMetric("held-out reward", "data.eval_prompts"),
    "eval_auc": SelectionMetric("held-out AUC", LOG),
    "eval_consistency": SelectionMetric("held-out ½ Var(R)", f"{LOG} and a β (evaluate.beta)", lower=True),
    "eval_log_ratio_best": SelectionMetric("held-out log-ratio of the best responses", LOG),
}
