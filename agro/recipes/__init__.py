"""The recipes that agro brings along, by name: files, and what the entries of objectives declare."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from agro.errors import Refused
from agro.io.nearest import nearest as near_name
from agro.objectives.table import OBJECTIVES
from agro.recipes.methodtext import method_text, method_title

FOLDER = Path(__file__).parent


class Recipe(ABC):
    """A configuration as text, which `agro train NAME` trains with."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def kind(self) -> str:
        """situation (what is at hand), or method (of an objective's or a rule's name)."""

    @property
    @abstractmethod
    def text(self) -> str:
        """TOML, with a comment at its head that says what it is for and how it is started."""

    @property
    def title(self) -> str:
        """The first lines of the comment, up to the indented commands."""
        comment = re.match(r"(?:# .*\n)+?(?=#   )", self.text)
        assert comment, f"{self.name}: expected a title and an indented command in its first lines"
        return " ".join(line.removeprefix("# ") for line in comment[0].splitlines())

    @property
    def missing(self) -> str:
        """What the recipe lacks of the method that it is named after; empty where it has all."""
        return self.title.partition("Missing here: ")[2]


@dataclass(frozen=True)
class FileRecipe(Recipe):
    """A file of this folder: of a situation, or of a method that has phases or is a rule of data."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def kind(self) -> str:
        return "method" if self.path.parent.name == "methods" else "situation"

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class EntryRecipe(Recipe):
    """What the entry of an objective declares beyond its base."""

    objective: str

    @property
    def name(self) -> str:
        return self.objective

    @property
    def kind(self) -> str:
        return "method"

    @property
    def text(self) -> str:
        return method_text(self.objective, OBJECTIVES[self.objective])

    @property
    def title(self) -> str:
        """As of the text, without making it."""
        return method_title(OBJECTIVES[self.objective])


def recipes() -> dict[str, Recipe]:
    """By name: those of situations, then those of methods."""
    situations = [FileRecipe(path) for path in sorted(FOLDER.glob("*.toml"))]
    methods: list[Recipe] = [FileRecipe(path) for path in FOLDER.glob("methods/*.toml")]
    methods += [EntryRecipe(name) for name, entry in OBJECTIVES.items() if entry.recipe is not None]
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
    near = near_name(name, files or recipes())
    return f"; did you mean {near}?" if near else ""
