"""The page of every configuration value: `python tools/docs/config_docs.py > docs/configuration.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agro.config import RunConfig
from agro.objectives.options import REQUIRED

Schema = Mapping[str, Any]

HEAD = """# Configuration

<!-- Made by `python tools/docs/config_docs.py > docs/configuration.md`; change agro/config/ instead. -->

A recipe is TOML with the sections below; a run writes all of them to its `config.json`, which is a recipe
too. On the command line `KEY=VALUE` changes a value, such as `train.steps=20`: the key is dotted, the value
is TOML, and a bare word is text. agro refuses an unknown key and names the nearest known one. A resumed run
keeps the values that it began with; only those marked so, and the last phase's `train.steps`, may change.
[Another page](options.md) lists the options of objectives and of sources.
"""

PHASES = """## phases

A run has one phase, or those listed as `[[phases]]`, one after the other. A phase has a `name`, and sets the
values of the sections above that differ in it. On the command line `phases.NAME.KEY=VALUE` changes them.
"""


def page() -> str:
    """All sections and values, with defaults and meanings."""
    schema = RunConfig.model_json_schema()
    return "\n".join([HEAD, *_sections("", schema, schema["$defs"]), PHASES])


def values(prefix: str, schema: Schema, definitions: Schema) -> Iterator[tuple[str, Schema, Schema | None]]:
    """(dotted key, its schema, its section's schema or None), in the order of declaration."""
    for name, value in schema["properties"].items():
        target = None
        for kind in _kinds(value):
            if "$ref" in kind:
                target = definitions[kind["$ref"].rsplit("/", 1)[1]]
                break
        yield f"{prefix}{name}", value, target


def _sections(prefix: str, schema: Schema, definitions: Schema) -> Iterator[str]:
    for key, value, section in values(prefix, schema, definitions):
        if section is None or key == "phases":
            continue
        listed = any(x.get("type") == "array" for x in _kinds(value))
        yield f"## {key}{', each' if listed else ''}\n"
        yield section.get("description", value.get("description", "")) + "\n"
        yield "| key | default | value | meaning |\n|---|---|---|---|"
        rows = list(values("" if listed else f"{key}.", section, definitions))
        yield from (row(key, value, section, inner) for key, value, inner in rows)
        yield ""
        yield from _sections("" if listed else f"{key}.", section, definitions)


def row(key: str, value: Schema, section: Schema, inner: Schema | None) -> str:
    if inner is not None:
        return cells(f"`{key}`", "–", "see below", meaning(value) or meaning(inner))
    required = key.rsplit(".", 1)[-1] in section.get("required", ())
    default = "to be given" if required else shown(value.get("default"))
    kind = " or ".join(_kind(x) for x in _kinds(value) if x.get("type") != "null")
    may_change = "; may change on resume" if value.get("resume") else ""
    return cells(f"`{key}`", default, kind, meaning(value) + may_change)


def meaning(value: Schema) -> str:
    """The description of a value or section, on one line."""
    return " ".join(value.get("description", "").split())


def cells(*cells: str) -> str:
    return "".join(f"| {cell.replace('|', chr(92) + '|')} " for cell in cells) + "|"


def _kinds(value: Schema) -> list[Schema]:
    """The alternatives that a value's schema allows, and the items of lists."""
    kinds = [dict(x) for x in value.get("anyOf", [value])]
    return kinds + [x["items"] for x in kinds if "$ref" in x.get("items", {})]


def _kind(x: Schema) -> str:
    if "enum" in x:
        return ", ".join(f"`{choice}`" for choice in x["enum"])
    if "const" in x:
        return f"`{x['const']}`"
    if x.get("type") == "array":
        parts = x.get("prefixItems")
        return f"{len(parts)} numbers" if parts else f"list of {_kind(x['items'])}"
    names = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {x[key]:g}" for key, sign in bounds.items() if key in x]
    if limits == ["≥ 0", "≤ 1"]:
        limits = ["from 0 to 1"]
    return " ".join([names.get(x.get("type", ""), "table"), ", ".join(limits)]).strip()


def shown(default: Any) -> str:
    """A default as TOML writes it; a dash if it isn't set."""
    if default is REQUIRED:
        return str(default)
    return "–" if default is None else f"`{json.dumps(default, ensure_ascii=False)}`"


if __name__ == "__main__":
    print(page(), end="")
