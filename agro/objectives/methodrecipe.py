"""What an entry says of its recipe, the configuration of `agro train NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
