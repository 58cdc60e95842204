"""Recipes by name: files, those of installed packages, and what the entries of objectives declare."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agro.config.recipes.bases import SAMPLES
from agro.config.recipes.methodtext import method_end, method_text, method_title
from agro.errors import Refused
from agro.io import plugins
from agro.io.nearest import nearest as near_name
from agro.objectives import Objective
from agro.objectives.table import entries

FOLDER = Path(__file__).parent
FIRST = ("fresh", "log", "mixed", "replay", "feedback", "pairs", "lora", "chat")  # in lists
USUAL_END = method_end(SAMPLES)  # of a method's file without an own [train] or phases


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
        text = self.source.read_text(encoding="utf-8")
        is_open = self.kind == "method" and "[train]" not in text and "[[phases]]" not in text
        return text + USUAL_END if is_open else text

    @property
    def title(self) -> str:
        """The first lines of the comment, up to the indented commands; of an entry without its text."""
        if isinstance(self.source, Objective):
            return method_title(self.source)
        comment = re.match(r"(?:# .*\n)+?(?=#   )", self.text)
        if comment is None:
            raise Refused(
                f"recipe {self.name} ({self.source}): expected a comment in its first lines that says what "
                "it is for, and below it the command, as a comment that is indented by three spaces"
            )
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
    for recipe in _installed():
        if recipe.name in taken:
            raise Refused(f"{recipe.source}: there is a recipe {recipe.name}. What to do: rename the file")
        methods.append(recipe)
    return {recipe.name: recipe for recipe in [*situations, *sorted(methods, key=lambda recipe: recipe.name)]}


def _installed() -> Iterator[Recipe]:
    """The files of folders that entry points name, each a `Path`."""
    for name in plugins.installed("recipes"):
        folder = plugins.load("recipes", name, f"recipes of {name}")
        if not isinstance(folder, Path) or not folder.is_dir():
            raise Refused(
                f"recipes of {name}: expected the Path of a folder with TOML files, got {folder!r:.80}"
            )
        yield from (Recipe(path.stem, "method", path) for path in folder.glob("*.toml"))


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
    near = near_name(name, files or recipes())
    return f"; did you mean {near}?" if near else ""
