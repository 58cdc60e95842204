"""`agro objectives`: what there is to train with."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any

import typer

from agro.cli.common import Json, terminal

COUPLES = {
    "row": "a row's gradient depends on no other row's log-probs",
    "group": "a row's gradient depends on the log-probs of its whole group",
    "step": "a row's gradient depends on the log-probs of the whole step",
}


def objectives(
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None, as_json: Json = False
) -> None:
    """The objectives: what they need, how far they couple, their options and source."""
    from agro.objectives import describe, names

    if as_json:
        print(json.dumps(describe(name) if name else [describe(n) for n in names()], ensure_ascii=False))
    elif name:
        _print_one(describe(name))
    else:
        _print_all([describe(n) for n in names()])


def _print_all(found: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("objective", "needs", "couples by", "options", "source", show_edge=False)
    for d in found:
        options = (f"{k}{'' if o['required'] else f' = {_shown(o)}'}" for k, o in d["options"].items())
        table.add_row(
            d["name"], ", ".join(d["needs"]) or "texts alone", d["couples"], "\n".join(options), d["source"]
        )
    console = terminal()
    console.print(table)
    console.print(
        "Needs are those of the defaults. An option without a value has to be given. One in full: agro objectives NAME"
    )


def _print_one(d: dict[str, Any]) -> None:
    from rich.table import Table

    console = terminal()
    console.print(f"{d['name']}: {d['source']}\n\n{inspect.cleandoc(d['summary'])}\n")
    console.print(
        f"needs {', '.join(d['needs']) or 'texts alone'}; couples by {d['couples']}: {COUPLES[d['couples']]}\n"
    )
    if d["options"]:
        table = Table("option", "default", "unit", "meaning", "expected", show_edge=False)
        for key, o in d["options"].items():
            table.add_row(
                f"objective.{key}",
                "to be given" if o["required"] else _shown(o),
                o["unit"],
                o["meaning"],
                o["expected"],
            )
        console.print(table)


def _shown(option: dict[str, Any]) -> str:
    return json.dumps(option["default"])
