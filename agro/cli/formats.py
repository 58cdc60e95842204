"""`agro formats`: what `agro import` reads."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from agro.cli.common import Json, table, terminal


def formats(
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None, as_json: Json = False
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
    console = terminal()
    if name:
        for key, value in described[0].items():
            shown = _carried(described[0]) if key == "carries" else value
            if value is not None:
                console.print(f"{key.replace('_', ' ')}: {shown}")
        return
    shown = table("format", "what it is", "holds", "carries")
    for entry in described:
        shown.add_row(entry["name"], entry["title"], entry["kind"], _carried(entry))
    console.print(shown)


def _carried(entry: dict[str, Any]) -> str:
    """What the records of a format have beside prompts and responses."""
    if entry["kind"] == "nothing":
        return "can't be imported"
    return ", ".join(entry["carries"]) or "texts alone"
