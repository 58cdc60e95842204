"""What an entry says of its recipe, the configuration of `agro train NAME`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agro.objectives.core import Objective


@dataclass(frozen=True)
class MethodRecipe:
    """What the recipe of a method says beyond its base, one of `agro.config.recipes.bases.BASES`."""

    title: str
    """the method and its paper, in a sentence or two"""
    base: str = "samples"
    options: Mapping[str, Any] = field(default_factory=dict)
    """of the objective: those without a default, and those that differ from it"""
    shown: tuple[str, ...] = ()
    """options that the text shows with their defaults, since one may want to change them"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """by dotted key, such as train.updates; None: the recipe doesn't set what its base does"""
    notes: Mapping[str, str] = field(default_factory=dict)
    """by option or dotted key: what its line says in place of its declared meaning"""
    missing: str = ""
    """what the recipe lacks of the method"""
    commands: tuple[str, ...] = ()
    """lines that start it, where they aren't those of the base; {name} stands for the recipe's name"""
    required: str = ""
    """what must be given, where it isn't what the base requires"""


def with_recipes(entries: Mapping[str, Objective], file: Path) -> dict[str, Objective]:
    """The objectives, each with what a TOML file says of its recipe: a table by its name with the fields of
    `MethodRecipe`, and `unset`, settings of the base that it doesn't make."""
    recipes = {}
    for name, said in tomllib.loads(file.read_text(encoding="utf-8")).items():
        settings = {**said.pop("settings", {}), **dict.fromkeys(said.pop("unset", ()))}
        recipes[name] = MethodRecipe(**said, settings=settings)
    return {name: replace(entry, recipe=recipes.get(name)) for name, entry in entries.items()}
