"""One measurement of a system: what its mechanism changes in a run or in an expectation, and its bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Row:
    """`row`: the name of the system in `systems.py`."""

    row: str
    mechanism: str
    """what makes the data come about as in the paper: a setting, a recipe, an objective"""
    consequence: str
    """what is measured, with its unit"""
    value: float
    bound: float
    side: Literal["at most", "at least"]

    @property
    def holds(self) -> bool:
        """A value that isn't a number holds nothing."""
        return self.value <= self.bound if self.side == "at most" else self.value >= self.bound
