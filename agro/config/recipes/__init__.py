"""Recipes by name: files, those of installed packages, and those that objectives' entries declare as
differences from a base (`bases.toml`), which depends on the data that they train on."""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io import plugins
from agro.io.peers import did_you_mean
from agro.objectives import Objective
from agro.objectives.table import entries

FOLDER = Path(__file__).parent
FIRST = ("fresh", "log", "mixed", "replay", "feedback", "pairs", "lora", "card24", "chat")  # first in lists
_DATA = tomllib.loads(FOLDER.parent.joinpath("bases.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Base:
    """Settings by dotted key, the command lines that start such a recipe, and what they require."""

    settings: dict[str, Any]
    commands: tuple[str, ...]
    required: str


def _base(declared: Mapping[str, Any]) -> Base:
    parent: Mapping[str, Any] = _DATA[declared["of"]] if "of" in declared else {}
    values, settings = {**parent, **declared}, {**parent.get("settings", {}), **declared["settings"]}
    settings = {key: None if value == "none" else value for key, value in settings.items()}
    return Base(settings, tuple(values["commands"]), values["required"])


BASES = {name: _base(table) for name, table in _DATA.items()}
SAMPLES = BASES["samples"]
HELD_OUT = {key: SAMPLES.settings[f"data.{key}"] for key in ("hold_out", "hold_out_most")}


@dataclass(frozen=True)
class Recipe:
    """A configuration as text, which `agro train NAME` trains with."""

    name: str
    kind: str
    """situation (what data is at hand), or method (named after an objective or a rule)."""
    source: Path | Objective
    """A file, for a situation or for a method with phases, a source or a data rule; or an objective's entry,
    which declares how it differs from its base."""

    @property
    def text(self) -> str:
        """TOML, with a head comment that states its purpose and the commands that start it."""
        if isinstance(self.source, Objective):
            return method_text(self.name, self.source)
        return self.source.read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        """A file's first comment lines, up to the indented commands, or ""; an entry's title, and what its
        recipe lacks of the method."""
        if isinstance(self.source, Objective):
            recipe = self.source.recipe
            assert recipe is not None
            return f"{recipe.title} Missing here: {recipe.missing}" if recipe.missing else recipe.title
        comment = re.match(r"(?:# .*\n)+?(?=#   )", self.text)
        if comment is None:
            return ""
        return " ".join(line.removeprefix("# ") for line in comment[0].splitlines())

    @property
    def missing(self) -> str:
        """What the recipe lacks of the method that it is named after; empty if nothing."""
        return self.title.partition("Missing here: ")[2]


def recipes() -> dict[str, Recipe]:
    """All recipes by name, situations before methods.

    Raises `Refused` if an installed package reuses a name.
    """
    paths = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
    names = [*FIRST, *(name for name in paths if name not in FIRST)]
    situations = [Recipe(name, "situation", paths[name]) for name in names]
    methods = [Recipe(name, "method", entry) for name, entry in entries().items() if entry.recipe is not None]
    names_used = {recipe.name for recipe in [*situations, *methods]}
    for name in plugins.installed("recipes"):  # of packages, each a folder
        folder = plugins.load("recipes", name, f"recipes of {name}")
        if not isinstance(folder, Path) or not folder.is_dir():
            raise Refused(
                f"recipes of {name}: expected the Path of a folder with TOML files, got {folder!r:.80}"
            )
        for path in folder.glob("*.toml"):
            if path.stem in names_used:
                raise Refused(f"{path}: a recipe {path.stem} already exists. What to do: rename the file")
            names_used.add(path.stem)
            methods.append(Recipe(path.stem, "method", path))
    return {recipe.name: recipe for recipe in [*situations, *sorted(methods, key=lambda recipe: recipe.name)]}


def get(name: str) -> Recipe:
    """Return a recipe. Raises `Refused`, with the nearest name, if there is none."""
    table = recipes()
    if name not in table:
        raise Refused(f"recipe: there is no {name!r}{nearest(name)}; agro recipes lists them")
    return table[name]


def nearest(name: str) -> str:
    """A suggestion for an unknown recipe or file name; "" without one."""
    path = Path(name)
    files = [str(other) for other in path.parent.glob(f"*{path.suffix}")] if path.suffix else []
    near = did_you_mean(name, files or recipes())
    return near and f"; {near}"


SECTIONS = (  # in the order of a recipe's text; others follow
    *("policy", "reward", "data", "environment", "sampler", "source", "source.options"),
    *("objective", "train", "evaluate"),
)


def method_text(name: str, entry: Objective) -> str:
    """The text of an entry's recipe: comments (title, missing parts, commands, requirements) and settings."""
    recipe = entry.recipe
    assert recipe is not None, f"{name}: its recipe is a file"
    base = BASES[recipe.base]
    lines = _paragraph(recipe.title)
    if recipe.missing:
        lines += _paragraph(f"Missing here: {recipe.missing}")
    lines += [f"#   {line.replace('{name}', name)}" for line in recipe.commands or base.commands]
    for line in f"Required: {recipe.required or base.required}".splitlines():
        lines += [f"# {line}"] if line.startswith(" ") else _paragraph(line)
    settings = method_settings(name, entry)
    for section in dict.fromkeys([*SECTIONS, *(dotted.rpartition(".")[0] for dotted in settings)]):
        keys = [dotted for dotted in settings if dotted.rpartition(".")[0] == section]
        if keys:
            lines += [f"[{section}]"]
            lines += [f"{dotted.rpartition('.')[2]} = {toml(settings[dotted])}" for dotted in keys]
            lines += [""]
    return "\n".join(lines)


def method_settings(name: str, entry: Objective) -> dict[str, Any]:
    """An entry's settings by dotted key: those of its recipe's base, overridden by its own."""
    recipe = entry.recipe
    assert recipe is not None, f"{name}: its recipe is a file"
    defaults = entry.defaults()
    options = {key: defaults[key] for key in recipe.shown} | dict(recipe.options)
    settings = {"objective.name": name, **BASES[recipe.base].settings, **recipe.settings}
    settings |= {f"objective.{key}": value for key, value in options.items()}
    return {key: value for key, value in settings.items() if value is not None}


def toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return re.sub(r"e-0(\d)$", r"e-\1", repr(value))
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _paragraph(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, 108, break_on_hyphens=False)]
