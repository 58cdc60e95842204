"""What there is, and the first steps: `agro objectives`, `formats`, `recipes`, `init` and `prove`."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer

from agro.cli.common import Json, answer, end, paragraph, show_table, width
from agro.cli.common import names as side_by_side
from agro.cli.tasks import TASKS, create
from agro.logs.format_table import FORMATS
from agro.objectives import describe

COUPLES = {
    "row": "a row's gradient depends on no other row's log-probs",
    "group": "a row's gradient depends on the log-probs of its complete group",
    "step": "a row's gradient depends on the log-probs of the complete step",
}
OF_DATA = ("record", "draw", "value_store")  # what provides a need
KINDS = {"nothing": "can't be imported, and why: agro formats NAME"}


def objectives(
    name: Annotated[str | None, typer.Argument()] = None,
    as_json: Json = False,
) -> None:
    """Args:
    name: One of them, in full.
    """
    from agro.objectives import names
    from agro.objectives.table import entries

    if as_json:
        answer(describe(name) if name else [describe(n) for n in names()], "", as_json)
        return
    if name:
        print("\n".join(_one(describe(name))))
        return
    by_needs: dict[str, list[str]] = {}  # the names, by what they need of the data
    for key, entry in entries().items():
        needed = entry.needs(entry.defaults())
        of_data = sorted(str(need) for need in needed if need.provider in OF_DATA)
        by_needs.setdefault(_listed(of_data), []).append(key)
    lines: list[str] = []
    for what, found in sorted(by_needs.items(), key=lambda item: -len(item[1])):
        lines += side_by_side(f"need {what}", found)
    print("\n".join([*lines, *paragraph("One in full: agro objectives NAME")]))


def _one(entry: dict[str, Any]) -> list[str]:
    couples = entry["couples"]
    lines = [*paragraph(f"{entry['name']}: {entry['source']}"), ""]
    for text in inspect.cleandoc(entry["summary"]).split("\n\n"):
        lines += [*paragraph(" ".join(text.split())), ""]
    if entry["called"]:
        lines += [*paragraph(f"called {entry['called']}"), ""]
    lines += paragraph(f"needs {_listed(entry['needs'])}; couples by {couples}: {COUPLES[couples]}")
    lines += [""] if entry["options"] else []
    for key, option in entry["options"].items():
        default = "to be given" if option["required"] else json.dumps(option["default"])
        about = f"{option['meaning']} ({option['unit']}; {option['expected']})"
        lines += paragraph(f"objective.{key} = {default}: {about}", 0, 4)
    return lines


def _listed(needs: list[str]) -> str:
    return ", ".join(needs) or "texts alone"


def formats(
    name: Annotated[str | None, typer.Argument()] = None,
    as_json: Json = False,
) -> None:
    """Args:
    name: One of them, in full.
    """
    from agro.logs.format_table import get

    keys = ("name", "title", "kind", "carries", "joins", "written_by")
    rows: list[dict[str, Any]] = []
    for found in [get(name)] if name else FORMATS.values():
        carries = {"carries": list(found.carries), "joins": found.joins or None}
        rows.append({key: carries.get(key, getattr(found, key)) for key in keys})
    lines: list[str] = []
    if name:  # what its records have beside prompts and responses
        carried = "can't be imported" if rows[0]["kind"] == "nothing" else _listed(rows[0]["carries"])
        for key, value in (rows[0] | {"carries": carried}).items():
            if value is not None:
                lines += paragraph(f"{key.replace('_', ' ')}: {value}", 0, 4)
    else:
        for kind in sorted({row["kind"]: 0 for row in rows}, key=lambda kind: kind in KINDS):
            lines += side_by_side(KINDS.get(kind, kind), (r["name"] for r in rows if r["kind"] == kind))
        lines += paragraph("One in full: agro formats NAME")
    answer(rows[0] if name else rows, "\n".join(lines), as_json)


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    task: Annotated[str, typer.Option(metavar="NAME")] = "digits",
) -> None:
    """Args:
    folder: A new or empty folder.
    task: digits, own-log, chat or multi-turn.
    """
    for path in create(folder, task):
        print(f"wrote {path}")
    print(f"\nnext:\n  cd {folder}")
    for command in commands(folder / "README.md"):
        print(f"  {command}")


def commands(readme: Path) -> list[str]:
    """The indented commands of a README."""
    lines = readme.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.startswith("    agro ")]


def recipes(
    name: Annotated[str | None, typer.Argument()] = None,
    as_json: Json = False,
) -> None:
    """Args:
    name: One of them, to print.
    """
    from agro.config import recipes as found

    if name is not None:
        recipe = found.get(name)
        row = {"name": name, "kind": recipe.kind, "for": recipe.title, "minutes": None, "text": recipe.text}
        answer(row, recipe.text.removesuffix("\n"), as_json)
        return
    rows: list[dict[str, Any]] = []
    for key, task in TASKS.items():
        rows.append({"name": key, "kind": "task", "for": task.title, "minutes": task.minutes})
    for recipe in found.recipes().values():  # whose minutes depend on the model
        rows.append({"name": recipe.name, "kind": recipe.kind, "for": recipe.title, "minutes": None})
    lines = []
    for kind, title in TITLES.items():
        of_kind = [row for row in rows if row["kind"] == kind]
        if kind == "method":
            lines += side_by_side(title, (row["name"] for row in of_kind))
            continue
        lines.append(title)
        for row in of_kind:
            minutes = "" if row["minutes"] is None else f" ({row['minutes']:g} minutes)"
            text = f"{row['name']}: {row['for']}{minutes}"
            lines.append(f"  {shorten(text, width() - 2, placeholder=' …')}")
    answer(rows, "\n".join([*lines, *paragraph(HINT)]), as_json)


HINT = "agro recipes NAME prints one; its first lines have the complete command."
TITLES = {
    "task": "Tasks: agro init DIR --task NAME, with all data and a small new model",
    "situation": "Recipes by what is at hand: agro train NAME policy.model=MODEL …",
    "method": "Recipes by method",
}


def prove(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME…]")] = None,
    as_json: Json = False,
) -> None:
    """Args:
    names: Objectives; all where none is given.
    """
    from agro import objectives

    selected = names or objectives.names()
    for name in selected:
        objectives.get(name)  # a wrong name is refused before anything is computed
    from agro.proof import passport  # here: a wrong name is refused at once
    from agro.proof.claims import claims_of

    for name in selected:
        claims_of(name)

    rows = [row for measured in passport.prove(selected).values() for row in measured]
    if as_json:
        answer([row.to_json() for row in rows], "", as_json)
    else:
        cells = []
        for row in rows:
            verdict = {True: "yes", False: "NO", None: ""}[row.holds]
            bound = "" if row.bound is None else f"{row.side} {row.bound:g}"
            cells.append([row.objective, row.property, row.setting, f"{row.value:.3g}", bound, verdict])
        titles = ("objective", "property", "setting", "value", "bound", "holds")
        claimed = [row.holds for row in rows if row.holds is not None]
        show_table(titles, cells).print(
            f"{sum(claimed)} of {len(claimed)} claims hold; {len(rows) - len(claimed)} values are reported "
            "without a claim"
        )
    broken = [
        f"agro: {row.objective}: {row.property} ({row.setting}): expected {row.side} {row.bound:g}, "
        f"got {row.value:.3g}"
        for row in rows
        if row.holds is False
    ]
    if broken:
        end(1, "\n".join(broken))
