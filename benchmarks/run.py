"""The benchmarks of speed and memory one after the other, and a table of their goals and what they reach.

    python benchmarks/run.py [--only sampling step …] [--trl-python PYTHON] [--table]

Each is a program of its own, which says what it measures and writes benchmarks/results/NAME.json. All of them
take hours on two cores; --table measures nothing. Writes benchmarks/results/table.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import recording

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
RATIO = "times as fast as the peer"
PARTS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "goals.toml").read_text(encoding="utf-8"))
for _name, _goals in PARTS.items():
    if _unknown := _goals.keys() - {"unit", "further"}:
        raise SystemExit(f"goals.toml: {_name}: expected unit and further; got {', '.join(sorted(_unknown))}")


def measure(names: list[str], trl_python: str | None) -> list[str]:
    """Run the benchmarks; returns the names of those that failed or were skipped."""
    failed = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    for name in names:
        command = [sys.executable, str(HERE / name / "run.py")]
        if name == "trl" and trl_python is not None:
            command += ["--trl-python", trl_python]
        print(f"== {name}", flush=True)
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(name)
    return failed


def values(row: dict[str, Any], figure: str) -> list[float]:
    """Each measurement of a figure; a ratio's of the pairs that were measured in turns."""
    if figure == "ratio" and row.get("peer"):
        return [peer / ours for ours, peer in zip(row["ours"], row["peer"], strict=False)]
    value = row[figure]
    return value if isinstance(value, list) else [value]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def limit_of_trl(row: dict[str, Any]) -> str:
    """A step at the full rate of a bfloat16 product, which without AMX is half of that in float32."""
    found = [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("trl", "step")]
    trl, step = ({row["name"]: row for row in rows} for rows in found)
    exact, half = step["mid float32"], step["mid mixed"]
    slower = half["product_rate"] / exact["product_rate"]
    most = trl["step of RLOO, mid, float32"]["ratio"] / exact["share_of_product_rate"] * slower
    is_half = row["name"].endswith("mixed")
    return f"{most:.2g}, since bfloat16 products run at {slower:.2f} of float32's" if is_half else ""


def limit_of_sampling(row: dict[str, Any]) -> str:
    if "products" not in row:
        return "unmeasured"
    share = row["products"]
    alone = f"{row['ratio'] / share:.2g} with the matrix products alone"
    where = row.get("products_machine", row["machine"])
    elsewhere = "" if where == row["machine"] else f" on {where.partition(',')[0]}"
    return f"{alone}, which take {share:.0%} of our seconds{elsewhere}; small operations take the rest"


def limit_of_step(row: dict[str, Any]) -> str:
    if row["ratio"] is None:
        return ""
    most = row["ratio"] / row["share_of_product_rate"]
    return f"{most:.2g} with the step's matrix products alone, at their full rate"


LIMITS: dict[str, Callable[[dict[str, Any]], str]] = {  # what the machine of a row can't exceed
    "trl": limit_of_trl,
    "sampling": limit_of_sampling,
    "step": limit_of_step,
}


def line(name: str, row: dict[str, Any], figure: str, goal: float, unit: str) -> list[str]:
    """Of the table: a row of a benchmark, and whether a figure of it, the median of several, is the goal; its
    note, and the limit of a goal that isn't reached."""
    value = row.get(figure)  # None: not measured yet
    if isinstance(value, list):
        value = statistics.median(value)
    shown, met, spread, n = "–", "no", "–", "–"
    if value is not None:
        each = values(row, figure)
        shown, n = number(value), "1 (once)" if len(each) == 1 else str(len(each))
        spread = "unknown" if len(each) == 1 else f"{number(min(each))} to {number(max(each))}"
        is_met = value <= goal if unit.endswith("at most") else value >= goal
        met = "yes" if is_met else "no"
    limit = LIMITS[name](row) if met == "no" and name in LIMITS else ""
    note = "; ".join(filter(None, (row.get("note"), limit))) or "–"
    return [name, row["name"], f"{goal:g} {unit}", shown, spread, n, met, note, row["machine"]]


def table() -> str:
    heads = ["benchmark", "case", "goal", "reached (median)", "spread", "n", "met"]
    heads += ["limit of the machine, or note", "machine"]
    lines = []
    for name, goals in PARTS.items():
        unit = goals["unit"]
        file = RESULTS / f"{name}.json"
        rows = json.loads(file.read_text()) if file.exists() else []
        figure = "ratio" if unit == RATIO else "ours"
        for row in rows:
            lines.append(line(name, row, figure, row["goal"], row.get("unit", unit)))
        by_case = {row["name"]: row for row in rows}
        for case, *goal in goals.get("further", ()):
            if case in by_case:
                lines.append(line(name, by_case[case], *goal))
    note = "`python benchmarks/run.py`; commits are in the JSON files. A ratio's spread is of pairs in turns."
    letters = dict(zip(dict.fromkeys(cells[-1] for cells in lines), ascii_uppercase, strict=False))
    shown = [[*cells[:-1], letters[cells[-1]]] for cells in lines]
    machines = "".join(f"\n{letter}: {machine}\n" for machine, letter in letters.items())
    return f"{recording.markdown(heads, shown)}\n\n{note}\n{machines}"


def main() -> None:
    asked = recording.parser(__doc__, only=PARTS, trl_python=str, table=False).parse_args()
    failed = [] if asked.table else measure(asked.only, asked.trl_python)
    (RESULTS / "table.md").write_text(table())
    print(table())
    if failed:
        sys.exit(f"failed or skipped: {', '.join(failed)}")


if __name__ == "__main__":
    main()
