"""All objectives by name."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io import peers, plugins
from agro.objectives import core
from agro.objectives.core import Objective
from agro.objectives.methodrecipe import MethodRecipe
from agro.objectives.methods import (
    balanced,
    clipped,
    consistency,
    critic,
    experts,
    labeled,
    learned_value,
    mirror,
    policy_gradient,
    preference,
    rec,
    rivals,
    squares,
    teaching,
    truncated,
    trust_region,
)
from agro.objectives.options import described

FOLDER = Path(__file__).parent / "methods"


def _recipes() -> dict[str, MethodRecipe]:
    """Of `methods/recipes.toml`, by the objective's name."""
    recipes = {}
    for name, said in tomllib.loads((FOLDER / "recipes.toml").read_text(encoding="utf-8")).items():
        settings = {**said.pop("settings", {}), **dict.fromkeys(said.pop("unset", ()))}
        recipes[name] = MethodRecipe(**said, settings=settings)
    return recipes


ENTRIES: dict[str, Objective] = {
    **consistency.ENTRIES,
    **squares.ENTRIES,
    **learned_value.ENTRIES,
    **policy_gradient.ENTRIES,
    **critic.ENTRIES,
    **balanced.ENTRIES,
    **clipped.ENTRIES,
    **clipped.CORRECTION_ENTRIES,
    **experts.ENTRIES,
    **mirror.ENTRIES,
    **rec.ENTRIES,
    **teaching.ENTRIES,
    **truncated.ENTRIES,
    **trust_region.ENTRIES,
    **preference.ENTRIES,
    **rivals.ENTRIES,
    **labeled.ENTRIES,
    **teaching.SUPERVISED_ENTRIES,
}
RECIPES = _recipes()
OBJECTIVES = {name: replace(entry, recipe=RECIPES.get(name)) for name, entry in ENTRIES.items()}


def names() -> list[str]:
    """Every objective."""
    return list(OBJECTIVES)


def get(name: str) -> Objective:
    """The entry of an objective; `file.py:NAME`, `module:NAME` and installed ones are of the user's own."""
    if plugins.is_reference(name):
        return core.load(name)
    if name not in OBJECTIVES:
        others = plugins.installed("objectives", tuple(OBJECTIVES))
        if name in others:
            return core.load(name)
        called = {ours: entry.called for ours, entry in OBJECTIVES.items()}
        hint = peers.objective(name, called) or f"there are {', '.join([*OBJECTIVES, *others])}"
        raise Refused(
            f"objective: expected one of `agro objectives`, file.py:NAME or module:NAME, got {name!r}; {hint}"
        )
    return OBJECTIVES[name]


def describe(name: str, **options: Any) -> dict[str, Any]:
    """What an objective needs and how far it couples (both given the options), its options, its source."""
    entry = get(name)
    resolved = entry.checked(name, options)
    return {
        "name": name,
        "source": entry.source,
        "summary": entry.summary,
        "preset_of": entry.of or None,
        "certainty": entry.certainty,
        "called": entry.called or None,
        "needs": sorted(map(str, entry.needs(resolved))),
        "couples": entry.coupling(resolved),
        "options": described(entry.options),
    }
