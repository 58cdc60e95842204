"""Recipes by name: files, those of installed packages, and what the entries of objectives declare beside what
recipes of methods have in common, by the data that they train on (`bases.toml`)."""

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
FIRST = ("fresh", "log", "mixed", "replay", "feedback", "pairs", "lora", "card24", "chat")  # in lists
_DATA = tomllib.loads(FOLDER.parent.joinpath("bases.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Base:
    """Settings by dotted key, the command lines that start such a recipe, and what they require."""

    settings: dict[str, Any]
    commands: tuple[str, ...]
    required: str


def _base(own: Mapping[str, Any]) -> Base:
    parent: Mapping[str, Any] = _DATA[own["of"]] if "of" in own else {}
    values, settings = {**parent, **own}, {**parent.get("settings", {}), **own["settings"]}
    settings = {key: None if value == "none" else value for key, value in settings.items()}
    return Base(settings, tuple(values["commands"]), values["required"])


BASES = {name: _base(own) for name, own in _DATA.items()}
SAMPLES = BASES["samples"]
HELD_OUT = {key: SAMPLES.settings[f"data.{key}"] for key in ("hold_out", "hold_out_most")}


@dataclass(frozen=True)
class Recipe:
    """A configuration as text, which `agro train NAME` trains with."""

    name: str
    kind: str
    """situation (what is at hand), or method (of an objective's or a rule's name)."""
    source: Path | Objective
    """A file: of a situation, or of a method that has phases, a source or a rule of data. Or an entry, which
    declares what differs from its base."""

    @property
    def text(self) -> str:
        """TOML, with a comment at its head that says what it is for and how it is started."""
        if isinstance(self.source, Objective):
            return method_text(self.name, self.source)
        return self.source.read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        """The first lines of the comment, up to the indented commands, "" where there are none; of an entry
        its title, and what the recipe lacks of the method."""
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
        """What the recipe lacks of the method that it is named after; empty where it has all."""
        return self.title.partition("Missing here: ")[2]


def recipes() -> dict[str, Recipe]:
    """By name: those of situations, then those of methods.

    Raises `Refused` where an installed package has one of a name that there is already.
    """
    paths = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
    names = [*FIRST, *(name for name in paths if name not in FIRST)]
    situations = [Recipe(name, "situation", paths[name]) for name in names]
    methods = [Recipe(name, "method", of) for name, of in entries().items() if of.recipe is not None]
    taken = {recipe.name for recipe in [*situations, *methods]}
    for name in plugins.installed("recipes"):  # of packages, each a folder
        folder = plugins.load("recipes", name, f"recipes of {name}")
        if not isinstance(folder, Path) or not folder.is_dir():
            raise Refused(
                f"recipes of {name}: expected the Path of a folder with TOML files, got {folder!r:.80}"
            )
        for path in folder.glob("*.toml"):
            if path.stem in taken:
                raise Refused(f"{path}: there is a recipe {path.stem}. What to do: rename the file")
            taken.add(path.stem)
            methods.append(Recipe(path.stem, "method", path))
    return {recipe.name: recipe for recipe in [*situations, *sorted(methods, key=lambda recipe: recipe.name)]}


def get(name: str) -> Recipe:
    """Raises `Refused`, with the nearest name, where there is no such recipe."""
    table = recipes()
    if name not in table:
        raise Refused(f"recipe: there is none called {name!r}{nearest(name)}; agro recipes lists them")
    return table[name]


def nearest(name: str) -> str:
    """What to say of a name that there isn't: of a recipe, or of a file."""
    path = Path(name)
    files = [str(other) for other in path.parent.glob(f"*{path.suffix}")] if path.suffix else []
    near = did_you_mean(name, files or recipes())
    return near and f"; {near}"


SECTIONS = (  # in the order of a recipe's text; others follow
    *("policy", "reward", "data", "environment", "sampler", "source", "source.options"),
    *("objective", "train", "evaluate"),
)


def method_text(name: str, entry: Objective) -> str:
    """The text of the recipe that an entry declares: a comment with title, what is missing, commands and what
    is required, and the settings."""
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
    """By dotted key: those of the recipe's base, and what the entry declares to differ."""
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
