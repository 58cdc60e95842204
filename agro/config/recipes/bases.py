"""What recipes of methods have in common, by the data that they train on, as `bases.toml` has it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DATA = tomllib.loads(Path(__file__).parents[1].joinpath("bases.toml").read_text(encoding="utf-8"))
NOTES: dict[str, str] = _DATA.pop("notes")


@dataclass(frozen=True)
class Base:
    """Settings by dotted key, the command lines that start such a recipe, and what they require."""

    settings: dict[str, Any]
    commands: tuple[str, ...]
    required: str


def _base(own: Mapping[str, Any]) -> Base:
    values = {**_DATA[own["of"]], **own} if "of" in own else dict(own)
    settings = {**_DATA[own["of"]]["settings"], **own["settings"]} if "of" in own else own["settings"]
    settings = {key: None if value == "none" else value for key, value in settings.items()}
    return Base(settings, tuple(values["commands"]), values["required"])


BASES = {name: _base(own) for name, own in _DATA.items()}
SAMPLES = BASES["samples"]
HELD_OUT = {key: SAMPLES.settings[f"data.{key}"] for key in ("hold_out", "hold_out_most")}
