"""The systems that this project is built from: what of each is here, and what its mechanism changes.

    python reproductions/systems/run.py [--only MODULE] [--recorded] [--json FILE] [--out FOLDER]
                                        [--limit SECONDS]

Each module of this folder with a function `rows(folder) -> list[Row]` is run in a process of its own, with a
time limit. Writes result.json, all that was measured, and README.md: what is whole, and what the rest lacks.
It takes under thirty CPU minutes. With --only the other modules' rows are those of result.json, with
--recorded all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reproductions import harness
from reproductions.systems.row import Row
from reproductions.systems.systems import SYSTEMS, Extent, System

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
LIMIT_SECONDS = 900
HEAD = """# What of each system is here

    python reproductions/systems/run.py
    python reproductions/systems/run.py --recorded      # this page from result.json

What each system changes, in runs of seconds of tiny models. *whole*: the paper's essential thing happens, and
all that is measured of it holds. *mechanism only*: it happens; what the paper says of it isn't seen. *the
loss*, *the rule*: this part alone. *no*: nothing. `result.json` has setting, value and bound of each
measurement.

"""


@dataclass(frozen=True)
class Measured:
    """What a module gave, and what it cost."""

    module: str
    rows: list[Row]
    cpu_seconds: float
    error: str = ""


def modules() -> list[str]:
    """Those of this folder that measure something."""
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("run", "row", "systems"))
    return [name for name in names if hasattr(importlib.import_module(_full(name)), "rows")]


def measure(module: str, limit: float = LIMIT_SECONDS) -> Measured:
    """The rows of a module, from a process of its own; those before a failure or the time limit too."""
    before = _cpu_of_children()
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, str(Path(__file__)), "--measure", module, "--out", scratch]
        try:
            done = subprocess.run(command, cwd=ROOT, check=False, timeout=limit)
            error = f"it ended with {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            error = f"it took more than {limit:g} seconds"
        written = Path(scratch) / "rows.jsonl"
        lines = written.read_text().splitlines() if written.exists() else []
        rows = [Row(**json.loads(line)) for line in lines]
    return Measured(module, rows, _cpu_of_children() - before, error)


def _measure_here(module: str, folder: Path) -> None:
    """A row is written as it comes, so that a time limit doesn't take those before it."""
    with (folder / "rows.jsonl").open("w", buffering=1) as file:
        for row in importlib.import_module(_full(module)).rows(folder):
            file.write(json.dumps(asdict(row)) + "\n")


def _full(module: str) -> str:
    return f"reproductions.systems.{module}"


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def page(measured: Sequence[Measured]) -> str:
    """README.md."""
    by_name: dict[str, list[Row]] = {system.name: [] for system in SYSTEMS}
    measurements = [row for part in measured for row in part.rows]
    for row in measurements:
        by_name[row.row].append(row)
    extents = [system.extent(by_name[system.name]) for system in SYSTEMS]
    counts = ", ".join(f"{extents.count(kind)} {kind}" for kind in get_args(Extent))
    held = sum(row.holds for row in measurements)
    minutes = sum(part.cpu_seconds for part in measured) / 60
    lines = [
        f"{len(SYSTEMS)} systems: {counts}. {held} of {len(measurements)} measurements hold; "
        f"{minutes:.1f} CPU minutes on two cores that other work shared.",
        *(f"\nThe module `{part.module}` failed: {part.error}." for part in measured if part.error),
    ]
    for kind in get_args(Extent):
        found = [system for system, extent in zip(SYSTEMS, extents, strict=True) if extent == kind]
        if kind == "whole":
            lines += [f"\n**Whole**: {'; '.join(map(_linked, found))}."] if found else []
            continue
        lines.append(f"\n**{kind.capitalize()}**, and what is missing:\n")
        lines += [f"- {_linked(system)}: {_missing(system, by_name[system.name])}" for system in found]
    return HEAD + "\n".join(lines) + "\n"


def _linked(system: System) -> str:
    number = system.paper
    return f"[{system.name}](https://arxiv.org/abs/{number})" if number[0].isdigit() else system.name


def _missing(system: System, rows: Sequence[Row]) -> str:
    """Why it isn't whole, and the measurements that don't hold."""
    signs = {"at most": "≤", "at least": "≥"}
    failed = [
        f"{row.consequence}: {row.value:.3g} (**not** {signs[row.side]} {row.bound:g})"
        for row in rows
        if not row.holds
    ]
    reason = system.reason(rows)
    return f"{reason.removesuffix('.')}: {'; '.join(failed)}." if failed else reason


def _known(folder: Path) -> dict[str, Measured]:
    """By module, what was measured before."""
    path = folder / "result.json"
    if not path.exists():
        return {}
    parts = json.loads(path.read_text())
    return {p["module"]: Measured(**{**p, "rows": [Row(**row) for row in p["rows"]]}) for p in parts}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, FOLDER, recorded="write the page anew from what is recorded")
    parser.add_argument("--only", action="append", help="measure this module alone; may be repeated")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds of a module, at most")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.measure:
        _measure_here(args.measure, args.out)
        return 0
    known = _known(args.out)
    for name in () if args.recorded else args.only or modules():
        began = time.perf_counter()
        print(f"{name} …", flush=True)
        known[name] = part = measure(name, args.limit)
        held = sum(row.holds for row in part.rows)
        print(f"{name}: {held} of {len(part.rows)} hold, {time.perf_counter() - began:.0f} s {part.error}")
    measured = sorted(known.values(), key=lambda part: part.module)
    args.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = [asdict(part) for part in measured]
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    for path in filter(None, (args.out / "result.json", args.json)):
        path.write_text(text, encoding="utf-8")
    (args.out / "README.md").write_text(page(measured), encoding="utf-8")
    print(page(measured))
    return int(any(part.error or not all(row.holds for row in part.rows) for part in measured))


if __name__ == "__main__":
    sys.exit(main())
