"""`agro objectives`: what there is to train with."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any

import typer

from agro.cli.common import Json, table, terminal

COUPLES = {
    "row": "a row's gradient depends on no other row's log-probs",
    "group": "a row's gradient depends on the log-probs of its complete group",
    "step": "a row's gradient depends on the log-probs of the complete step",
}


def objectives(
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None, as_json: Json = False
) -> None:
    from agro.objectives import describe, names

    if as_json:
        print(json.dumps(describe(name) if name else [describe(n) for n in names()], ensure_ascii=False))
    elif name:
        _print_one(describe(name))
    else:
        _print_all([describe(n) for n in names()])


def _print_all(entries: list[dict[str, Any]]) -> None:
    shown = table("objective", "preset of", "needs", "couples by", "source")
    for entry in entries:
        of = entry["preset_of"] or ""
        shown.add_row(entry["name"], of, _needs(entry), entry["couples"], entry["source"])
    console = terminal()
    console.print(shown)
    console.print("Needs are those of the defaults. One in full, with its options: agro objectives NAME")


def _print_one(entry: dict[str, Any]) -> None:
    console, couples = terminal(), entry["couples"]
    console.print(f"{entry['name']}: {entry['source']}\n\n{inspect.cleandoc(entry['summary'])}\n")
    if entry["called"]:
        console.print(f"called {entry['called']}\n")
    console.print(f"needs {_needs(entry)}; couples by {couples}: {COUPLES[couples]}\n")
    if not entry["options"]:
        return
    shown = table("option", "default", "unit", "meaning", "expected")
    for key, option in entry["options"].items():
        default = "to be given" if option["required"] else json.dumps(option["default"])
        shown.add_row(f"objective.{key}", default, option["unit"], option["meaning"], option["expected"])
    console.print(shown)


def _needs(entry: dict[str, Any]) -> str:
    return ", ".join(entry["needs"]) or "texts alone"
