"""Formats of `formats.toml`, with the functions that read them.

Each module of this folder declares those of a family; `found` has all of them.
"""

from __future__ import annotations

import pkgutil
import tomllib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from agro.logs.protocol import Context, Format, Item, Row
from agro.rollout.prompt_formats import PROMPT_FORMATS

FOLDER = Path(__file__).parent
_FOUND: dict[str, Format] = {}


def declared(
    name: str,
    read: Callable[[Row, Context], list[Item]],
    fits: Callable[[Row], bool] | None = None,
    **functions: Callable[..., Any],
) -> Format:
    """The format of this name. Without `fits` a record is of it that has all `columns` of the table."""
    values = {**_table()[name], **functions}
    columns = frozenset(values.pop("columns", ()))
    values |= {key: tuple(values.get(key, ())) for key in ("carries", "over")}
    title, kind, by = (values.pop(key) for key in ("title", "kind", "by"))
    _FOUND[name] = Format(name, title, kind, by, fits or (lambda row: row.keys() >= columns), read, **values)
    return _FOUND[name]


def declared_prompts(name: str, **functions: Callable[..., Any]) -> Format:
    """The format of prompts of this name, which runs read as well."""
    fits, read = PROMPT_FORMATS[name]
    return declared(name, lambda row, context: [Item.of(read(row), "prompt")], fits, **functions)


def found() -> dict[str, Format]:
    """All formats by name, in the order of the table."""
    for module in pkgutil.iter_modules([str(FOLDER)]):
        import_module(f"agro.logs.formats.{module.name}")
    return {name: _FOUND[name] for name in _table()}


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "formats.toml").read_text(encoding="utf-8"))
