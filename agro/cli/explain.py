"""`agro objectives`: what there is to train with."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import Json, table, terminal

if TYPE_CHECKING:
    from agro.objectives import Objective

COUPLES = {
    "row": "a row's gradient depends on no other row's log-probs",
    "group": "a row's gradient depends on the log-probs of its complete group",
    "step": "a row's gradient depends on the log-probs of the complete step",
}


def objectives(
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None, as_json: Json = False
) -> None:
    from agro.objectives import OBJECTIVES, describe, names

    if as_json:
        print(json.dumps(describe(name) if name else [describe(n) for n in names()], ensure_ascii=False))
    elif name:
        _print_one(describe(name))
    else:
        _print_all(OBJECTIVES)


def _print_all(entries: Mapping[str, Objective]) -> None:
    shown = table("objective", "preset of", "needs", "couples by", "source")
    for name, entry in entries.items():
        defaults = entry.defaults()
        needs = _listed(sorted(map(str, entry.needs(defaults))))
        shown.add_row(name, entry.of, needs, entry.coupling(defaults), entry.source)
    console = terminal()
    console.print(shown)
    console.print("Needs are those of the defaults. One in full, with its options: agro objectives NAME")


def _print_one(entry: dict[str, Any]) -> None:
    console, couples = terminal(), entry["couples"]
    console.print(f"{entry['name']}: {entry['source']}\n")
    for paragraph in inspect.cleandoc(entry["summary"]).split("\n\n"):
        console.print(f"{' '.join(paragraph.split())}\n")
    if entry["called"]:
        console.print(f"called {entry['called']}\n")
    console.print(f"needs {_listed(entry['needs'])}; couples by {couples}: {COUPLES[couples]}\n")
    if not entry["options"]:
        return
    shown = table("option", "default", "unit", "meaning", "expected")
    for key, option in entry["options"].items():
        default = "to be given" if option["required"] else json.dumps(option["default"])
        shown.add_row(f"objective.{key}", default, option["unit"], option["meaning"], option["expected"])
    console.print(shown)


def _listed(needs: list[str]) -> str:
    return ", ".join(needs) or "texts alone"
