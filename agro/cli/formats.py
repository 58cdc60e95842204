"""`agro formats`: what `agro import` reads."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from agro.cli.common import Json, Whole
from agro.cli.listing import block, names, paragraph, show

KINDS = {"nothing": "can't be imported, and why: agro formats NAME"}


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
        for kind in dict.fromkeys(entry["kind"] for entry in described):
            lines += names(KINDS.get(kind, kind), (e["name"] for e in described if e["kind"] == kind))
        lines += paragraph("agro formats NAME describes one, agro formats --all each")
    show(lines, f"agro formats {name}" if name else "agro formats", whole)


def _carried(entry: dict[str, Any]) -> str:
    """What the records of a format have beside prompts and responses."""
    if entry["kind"] == "nothing":
        return "can't be imported"
    return ", ".join(entry["carries"]) or "texts alone"
