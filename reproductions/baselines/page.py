"""README.md of this reproduction, from its result: of the weight "root", that of the recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reproductions import harness
from reproductions.baselines.enumerated import BASELINES

Row = dict[str, Any]
PAGE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")


def readme(found: dict[str, Any], count: int, seeds: int, updates: int) -> str:
    noisy, held, single, users = (
        [row for row in found[name] if row.get("weight", "root") == "root"]
        for name in ("noisy", "held", "single", "users")
    )
    others = [r for r in users if (r["data"], r["users"]) == ("other", "different")]
    others = [
        row for row in others if (row["lenience"], row["spread"]) in ((0.0, 0.25), (1.0, 0.0), (1.0, 0.25))
    ]
    stands = list(dict.fromkeys(row["stands"] for row in single))
    apart = [row for row in single if row["spread"] == 1.0]
    compared = list(dict.fromkeys(row["stands"] for row in others))
    left_out = sum(row["of"] - row["arrived"] for row in (*noisy, *single, *others))
    return PAGE.format(
        count=count,
        seeds=seeds,
        updates=updates,
        sizes=", ".join(sorted({str(row["n"]) for row in noisy})),
        left_out=f"{left_out} of {sum(row['of'] for row in (*noisy, *single, *others))}",
        error=max(row["error"] for row in held),
        noisy=table(
            [row for row in noisy if row["noise"] != 0.3],
            "baseline",
            BASELINES,
            lambda r: f"{r['data']}, ± {r['noise']:g}",
            spread_of,
        ),
        held=table(
            [row for row in held if (row["lr"], row["beta"]) == (0.3, 0.2)],
            "baseline",
            BASELINES,
            lambda r: f"± {r['noise']:g}",
            mass_of,
        ),
        single=table(
            apart,
            "stands",
            stands,
            lambda r: f"data of the {r['data']}" if r["data"] == "reference" else "of another policy",
            spread_of,
        ),
        users=table(
            others,
            "stands",
            compared,
            lambda r: f"V\\* {r['spread']:g} apart, {r['lenience']:g} more",
            spread_of,
        ),
    )


def table(
    rows: Sequence[Row],
    key: str,
    names: Sequence[str],
    column: Callable[[Row], str],
    cell: Callable[[Sequence[Row]], str],
) -> str:
    """A line for each of `names`, the values of `key`, and a column for each kind of row; those that end at
    the optimum everywhere are one line."""
    columns = list(dict.fromkeys(map(column, rows)))
    lines, right = [], []
    for name in names:
        of_name = [row for row in rows if row[key] == name]
        cells = [cell([row for row in of_name if column(row) == each]) for each in columns]
        if set(cells) == {"0 (0)"}:
            right.append(name)
        else:
            lines.append([name, *cells])
    if right:
        lines.insert(0, ["; ".join(right), *["0 (0)"] * len(columns)])
    return harness.markdown(["", *columns], lines) + "\n"


def nats(value: float) -> str:
    return "0" if value < 1e-7 else f"{value:.2g}"


def spread_of(rows: Sequence[Row]) -> str:
    """The median of medians, and the worst."""
    known = [row for row in rows if row["median"] is not None]
    if not known:
        return "–"
    medians = sorted(row["median"] for row in known)
    return f"{nats(medians[len(medians) // 2])} ({nats(max(row['worst'] for row in known))})"


def mass_of(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row['mass']:.2f}, {row['right']:.3f}" for row in rows)
