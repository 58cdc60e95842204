"""All objectives by name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agro.errors import Refused
from agro.io import peers, plugins
from agro.objectives import core
from agro.objectives.core import MethodRecipe, Objective
from agro.objectives.methods import clipped, consistency, policy_gradient, preference, teaching
from agro.objectives.options import REQUIRED, described


def with_methods(entries: Mapping[str, Objective], file: Path) -> dict[str, Objective]:
    """Add the presets and recipes of a TOML file to the objectives.

    A table NAME has the fields of `MethodRecipe`; `unset`, the base's settings that it removes; `certainty`,
    where the objective's equation was read; and `called`, its name in other libraries. NAME.preset is the
    objective `of` with other defaults, under the name that its paper gives it: its `source`, what it is
    `about`, its `options`, the names of `required` ones, and of those `unset` to None.
    """
    methods = dict(entries)
    for name, table in tomllib.loads(file.read_text(encoding="utf-8")).items():
        if "preset" in table:
            methods[name] = _preset(methods, **table.pop("preset"))
        settings = {**table.pop("settings", {}), **dict.fromkeys(table.pop("unset", ()))}
        origin = {key: table.pop(key) for key in ("certainty", "called") if key in table}
        recipe = MethodRecipe(**table, settings=settings) if table else None
        methods[name] = replace(methods[name], recipe=recipe, **origin)
    return methods


def _preset(
    methods: Mapping[str, Objective],
    of: str,
    source: str,
    about: str = "",
    options: Mapping[str, Any] = MappingProxyType({}),
    required: Sequence[str] = (),
    unset: Sequence[str] = (),
) -> Objective:
    base = methods[of] if of in methods else OBJECTIVES[of]
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    values |= dict.fromkeys(required, REQUIRED) | dict.fromkeys(unset)
    of = base.function.__name__
    return replace(base, of=of, preset=values, source=source, about=about, called="")


FAMILIES = (consistency, policy_gradient, clipped, teaching, preference)
OBJECTIVES = with_methods(
    {name: entry for family in FAMILIES for name, entry in family.ENTRIES.items()},
    Path(__file__).parent / "methods" / "methods.toml",
)


def installed() -> dict[str, Objective]:
    """Objectives of installed packages; raises `Refused` if a name occurs twice.

    An entry point is a function, an `Objective`, or a dictionary of these by name.
    """
    return _installed(tuple(plugins.installed("objectives", tuple(OBJECTIVES)).items()))[0]


def registered(name: str) -> str:
    """The entry point that provides an objective; the name itself if none does."""
    return _installed(tuple(plugins.installed("objectives", tuple(OBJECTIVES)).items()))[1].get(name, name)


@cache
def _installed(points: tuple[tuple[str, str], ...]) -> tuple[dict[str, Objective], dict[str, str]]:
    """Entries, and the entry point of each."""
    loaded: dict[str, Objective] = {}
    point_of: dict[str, str] = {}
    for point, _ in points:
        part = plugins.load("objectives", point, "objective.name")
        for name, target in (part if isinstance(part, dict) else {point: part}).items():
            if name in OBJECTIVES or name in loaded:
                raise Refused(
                    f"objectives of {point}, an installed package: objective {name} already exists. What to "
                    "do: uninstall that package, or give its objective another name"
                )
            loaded[name], point_of[name] = core.entry_of(name, target), point
    return loaded, point_of


def entries() -> dict[str, Objective]:
    """Every objective by its name, agro's own first."""
    return OBJECTIVES | installed()


def names() -> list[str]:
    """Every objective."""
    return list(entries())


def get(name: str) -> Objective:
    """The entry of an objective: agro's, an installed one, or a user's `file.py:NAME` or `module:NAME`."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    if plugins.is_reference(name):
        return core.entry_of(name, plugins.load("objectives", name, "objective.name"))
    if name not in installed():
        called = {ours: entry.called for ours, entry in entries().items()}
        hint = peers.objective(name, called) or f"there are {', '.join(names())}"
        raise Refused(
            f"objective: expected one of `agro objectives`, file.py:NAME or module:NAME, got {name!r}; {hint}"
        )
    return installed()[name]


def describe(name: str, **options: Any) -> dict[str, Any]:
    """Describe an objective: its options and source, and its needs and coupling with these options."""
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
