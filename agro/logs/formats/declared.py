"""Formats of `formats.toml`, with the functions that read them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from agro.logs.protocol import Context, Format, Item, Row


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
    return Format(name, title, kind, by, fits or (lambda row: row.keys() >= columns), read, **values)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("formats.toml").read_text(encoding="utf-8"))
