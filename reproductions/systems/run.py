"""The systems that this project is built from, by systems.toml: what of each is here.

    python reproductions/systems/run.py [--only MODULE] [--recorded] [--out FOLDER]

Each module of MEASURED has a function `rows(folder)` that measures what a mechanism changes, in runs of
seconds. Writes result.json, the measurements by module, into --out, and where that is this folder what is
whole, and what the rest lacks, into README.md. With --only the other modules' rows are those of result.json,
with --recorded all.

What a recipe lacks stands with the recipe (`missing`); a system is whole where none of its recipes lacks
anything, nothing is missing in systems.toml, and all that was measured of it holds. Equations are measured by
`agro prove`, whose tests fail where one doesn't hold.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1]))

from agro.config.recipes import recipes  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.systems.tiny import Row  # noqa: E402

MEASURED = ("again", "learned", "present")
Extent = Literal["whole", "mechanism only", "the loss", "the rule", "no"]


@dataclass(frozen=True)
class System:
    name: str
    paper: str
    """arXiv number, or author and year"""
    recipes: tuple[str, ...] = ()
    missing: str = ""
    """beyond what its recipes say of themselves"""
    part: Extent = "the loss"
    """what is here where something is missing"""
    equations: tuple[str, ...] = ()
    """objectives whose equation makes it, which `agro prove` measures"""

    @property
    def lacks(self) -> str:
        """All that is missing; "" where nothing is."""
        known = recipes()
        reasons = [self.missing, *(known[name].missing for name in self.recipes)]
        return " ".join(dict.fromkeys(reason for reason in reasons if reason))

    def extent(self, rows: Sequence[Row]) -> Extent:
        """`rows`: the measurements of this system."""
        return self.part if self.part == "no" or self.reason(rows) else "whole"

    def reason(self, rows: Sequence[Row]) -> str:
        """Why it isn't whole, and the measurements that don't hold; "" where it is."""
        signs = {"at most": "≤", "at least": "≥"}
        failed = [
            f"{row.consequence}: {row.value:.3g} (**not** {signs[row.side]} {row.bound:g})"
            for row in rows
            if not row.holds
        ]
        is_unmeasured = not rows and not self.equations and self.part != "no"
        unheld = f"Not all measurements hold: {'; '.join(failed)}." if failed else ""
        return " ".join(filter(None, (self.lacks, unheld, "Nothing is measured here." * is_unmeasured)))


SYSTEMS = tuple(
    System(name, **{key: tuple(x) if isinstance(x, list) else x for key, x in values.items()})
    for name, values in tomllib.loads((FOLDER / "systems.toml").read_text("utf-8")).items()
)


def page(measured: Mapping[str, Sequence[Row]]) -> str:
    """What is made of README.md."""
    by_name: dict[str, list[Row]] = {system.name: [] for system in SYSTEMS}
    rows = [row for of_module in measured.values() for row in of_module]
    for row in rows:
        by_name[row.row].append(row)
    extents = {system: system.extent(by_name[system.name]) for system in SYSTEMS}
    counts = ", ".join(f"{[*extents.values()].count(kind)} {kind}" for kind in get_args(Extent))
    held = sum(row.holds for row in rows)
    lines = [f"{len(SYSTEMS)} systems: {counts}. {held} of {len(rows)} measurements hold."]
    for kind in get_args(Extent):
        found = [system for system in SYSTEMS if extents[system] == kind]
        if kind == "whole":
            lines += [f"\n**Whole**: {'; '.join(map(_linked, found))}."] if found else []
            continue
        lines.append(f"\n**{kind.capitalize()}**, and what is missing:\n")
        lines += [f"- {_linked(system)}: {system.reason(by_name[system.name])}" for system in found]
    return "\n".join(lines)


def _linked(system: System) -> str:
    number = system.paper
    return f"[{system.name}](https://arxiv.org/abs/{number})" if number[0].isdigit() else system.name


def recorded(folder: Path) -> dict[str, list[Row]]:
    """By module, what was measured before."""
    path = folder / "result.json"
    parts = json.loads(path.read_text()) if path.exists() else {}
    return {module: [Row(**row) for row in rows] for module, rows in parts.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, FOLDER, recorded="write the page anew from what is recorded")
    parser.add_argument("--only", action="append", choices=MEASURED, help="may be repeated")
    args = parser.parse_args(arguments)
    known = recorded(args.out)
    for name in () if args.recorded else args.only or MEASURED:
        with tempfile.TemporaryDirectory() as scratch:
            known[name] = list(importlib.import_module(f"reproductions.systems.{name}").rows(Path(scratch)))
        print(f"{name}: {sum(row.holds for row in known[name])} of {len(known[name])} hold", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    found = {name: [asdict(row) for row in known[name]] for name in sorted(known)}
    (args.out / "result.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if args.out == FOLDER:
        harness.put(FOLDER / "README.md", page(known), "systems")
    print(page(known))
    return int(not all(row.holds for rows in known.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
