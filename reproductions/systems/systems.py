"""The systems that this project is built from, by systems.toml, and what of each is here.

What a recipe lacks stands with the recipe (`missing`); a system is whole where none of its recipes lacks
anything, nothing is missing below, and all that was measured of it holds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agro.config.recipes import recipes
from reproductions.systems.row import Row

Extent = Literal["whole", "mechanism only", "the loss", "the rule", "no"]


@dataclass(frozen=True)
class System:
    name: str
    paper: str
    """arXiv number, or author and year"""
    recipes: tuple[str, ...] = ()
    missing: str = ""
    """beyond what its recipes say of themselves"""
    part: Extent = "the loss"
    """what is here where something is missing"""
    equations: tuple[str, ...] = ()
    """objectives whose equation makes it"""

    @property
    def lacks(self) -> str:
        """All that is missing; "" where nothing is."""
        known = recipes()
        reasons = [self.missing, *(known[name].missing for name in self.recipes)]
        return " ".join(dict.fromkeys(reason for reason in reasons if reason))

    def extent(self, rows: Sequence[Row]) -> Extent:
        """`rows`: the measurements of this system."""
        if self.part == "no":
            return "no"
        return "whole" if rows and not self.lacks and all(row.holds for row in rows) else self.part

    def reason(self, rows: Sequence[Row]) -> str:
        """Why it isn't whole; "" where it is."""
        failed = [] if all(row.holds for row in rows) else ["Not all that is measured holds."]
        unmeasured = [] if rows or self.part == "no" else ["Nothing of it is measured here."]
        return " ".join(filter(None, (self.lacks, *failed, *unmeasured)))


SYSTEMS = tuple(
    System(name, **{key: tuple(x) if isinstance(x, list) else x for key, x in values.items()})
    for name, values in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
)
