"""`agro objectives` and `agro formats`: what there is to train with, and what `agro import` reads."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import Json, Whole
from agro.cli.listing import block, paragraph, show
from agro.cli.listing import names as side_by_side

if TYPE_CHECKING:
    from agro.objectives import Objective

COUPLES = {
    "row": "a row's gradient depends on no other row's log-probs",
    "group": "a row's gradient depends on the log-probs of its complete group",
    "step": "a row's gradient depends on the log-probs of the complete step",
}
KINDS = {"nothing": "can't be imported, and why: agro formats NAME"}


def objectives(
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None,
    whole: Whole = False,
    as_json: Json = False,
) -> None:
    from agro.objectives import describe, names
    from agro.objectives.table import entries

    if as_json:
        print(json.dumps(describe(name) if name else [describe(n) for n in names()], ensure_ascii=False))
    elif name:
        show(_one(describe(name)), f"agro objectives {name}", whole)
    elif whole:
        lines = [line for found in entries().items() for line in _entry(*found)]
        show(lines, "agro objectives", whole=True)
    else:
        show(_by_needs(entries()), "agro objectives", whole)


def _by_needs(entries: Mapping[str, Objective]) -> list[str]:
    """The names, by what they need of the data."""
    by_needs: dict[str, list[str]] = {}
    for name, entry in entries.items():
        needs = entry.needs(entry.defaults())
        of_data = sorted(str(need) for need in needs if need.provider in ("record", "draw", "value_store"))
        by_needs.setdefault(_listed(of_data), []).append(name)
    lines = []
    for what, found in sorted(by_needs.items(), key=lambda item: -len(item[1])):
        lines += side_by_side(f"need {what}", found)
    return [*lines, *paragraph("One in full: agro objectives NAME. Each with needs and source: --all")]


def _entry(name: str, entry: Objective) -> list[str]:
    defaults = entry.defaults()
    needs = _listed(sorted(map(str, entry.needs(defaults))))
    of = f"preset of {entry.of}; " if entry.of else ""
    return block(name, f"{of}needs {needs}; couples by {entry.coupling(defaults)}", entry.source)


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
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None,
    whole: Whole = False,
    as_json: Json = False,
) -> None:
    from agro.logs.format_table import FORMATS, get

    chosen = [get(name)] if name else list(FORMATS.values())
    described: list[dict[str, Any]] = [
        {
            "name": f.name,
            "title": f.title,
            "kind": f.kind,
            "carries": list(f.carries),
            "joins": f.joins or None,
            "written_by": f.written_by,
        }
        for f in chosen
    ]
    if as_json:
        print(json.dumps(described[0] if name else described, ensure_ascii=False))
        return
    lines: list[str] = []
    if name:
        for key, value in described[0].items():
            shown = _carried(described[0]) if key == "carries" else value
            if value is not None:
                lines += paragraph(f"{key.replace('_', ' ')}: {shown}", 0, 4)
    elif whole:
        for entry in described:
            lines += block(entry["name"], f"{entry['title']}; {entry['kind']}: {_carried(entry)}")
    else:
        kinds = dict.fromkeys(entry["kind"] for entry in described)
        for kind in sorted(kinds, key=lambda kind: kind in KINDS):
            lines += side_by_side(KINDS.get(kind, kind), (e["name"] for e in described if e["kind"] == kind))
        lines += paragraph("agro formats NAME describes one, agro formats --all each")
    show(lines, f"agro formats {name}" if name else "agro formats", whole)


def _carried(entry: dict[str, Any]) -> str:
    """What the records of a format have beside prompts and responses."""
    if entry["kind"] == "nothing":
        return "can't be imported"
    return ", ".join(entry["carries"]) or "texts alone"
