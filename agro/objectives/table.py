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
    """The objectives, presets of them, and recipes of both, as a TOML file has them.

    A table NAME has the fields of `MethodRecipe`, `unset`, settings of the base that it doesn't make, and of
    the objective how its equation is known, `certainty`, and what other libraries call it, `called`.
    NAME.preset is the objective `of` with other defaults, under the name that its paper gives it: its
    `source`, what it is `about`, `options`, those that are `required`, and those that are `unset`, None.
    """
    methods = dict(entries)
    for name, said in tomllib.loads(file.read_text(encoding="utf-8")).items():
        if "preset" in said:
            methods[name] = _preset(methods, **said.pop("preset"))
        settings = {**said.pop("settings", {}), **dict.fromkeys(said.pop("unset", ()))}
        known = {key: said.pop(key) for key in ("certainty", "called") if key in said}
        recipe = MethodRecipe(**said, settings=settings) if said else None
        methods[name] = replace(methods[name], recipe=recipe, **known)
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
    """Those of installed packages: an entry point is a function, an `Objective`, or a dictionary of these by
    name.

    Raises `Refused` where a name is there twice.
    """
    return _installed(tuple(plugins.installed("objectives", tuple(OBJECTIVES)).items()))[0]


def registered(name: str) -> str:
    """The entry point that has an objective; the name itself of a reference."""
    return _installed(tuple(plugins.installed("objectives", tuple(OBJECTIVES)).items()))[1].get(name, name)


@cache
def _installed(points: tuple[tuple[str, str], ...]) -> tuple[dict[str, Objective], dict[str, str]]:
    """Entries, and the entry point of each."""
    found: dict[str, Objective] = {}
    point_of: dict[str, str] = {}
    for point, _ in points:
        part = plugins.load("objectives", point, "objective.name")
        for name, target in (part if isinstance(part, dict) else {point: part}).items():
            if name in OBJECTIVES or name in found:
                raise Refused(
                    f"objectives of {point}, an installed package: there is an objective {name}. What to do: "
                    "uninstall that package, or give its objective another name"
                )
            found[name], point_of[name] = core.entry_of(name, target), point
    return found, point_of


def entries() -> dict[str, Objective]:
    """Every objective by its name, agro's own first."""
    return OBJECTIVES | installed()


def names() -> list[str]:
    """Every objective."""
    return list(entries())


def get(name: str) -> Objective:
    """The entry of an objective; `file.py:NAME`, `module:NAME` and installed ones are of the user's own."""
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
