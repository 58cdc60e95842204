"""Blind ratings of a run's result against its start, kept in the run folder as ratings.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agro.errors import Refused
from agro.io.files import write
from agro.io.strictjson import loads
from agro.rollout.evaluate import clopper_pearson
from agro.rollout.paired import mcnemar

COUNTS = ("wins", "losses", "ties", "unrated")


@dataclass(frozen=True)
class Ratings:
    """On how many prompts the result was preferred (`wins`), the start, neither; `unrated`: rows left empty.

    `step`: the run's, when the responses were sampled; None for a model that isn't the run's own.
    """

    wins: int
    losses: int
    ties: int
    unrated: int
    step: int | None = None

    @classmethod
    def of(cls, ratings: NDArray[np.float64], step: int | None = None) -> Ratings:
        """`ratings`: [M], 1, −1, 0 or NaN a prompt; see `agro.rollout.blind.read_ratings`."""
        wins, losses, ties = (int((ratings == value).sum()) for value in (1, -1, 0))
        return cls(wins, losses, ties, int(np.isnan(ratings).sum()), step)

    @property
    def decided(self) -> int:
        """Prompts without ties."""
        return self.wins + self.losses

    @property
    def p(self) -> float:
        """Of no difference: the exact two-sided sign test over prompts without ties."""
        if self.decided < 2:
            return 1.0
        return mcnemar(np.repeat([1.0, -1.0], [self.wins, self.losses]))

    @property
    def share(self) -> float | None:
        """Of the prompts without ties, where the result was preferred."""
        return self.wins / self.decided if self.decided else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % of that share, exact as the test: without ½ where p is below .05."""
        return clopper_pearson(self.wins, self.decided) if self.decided else None

    def to_json(self) -> dict[str, Any]:
        """Counts, the share with its interval, and p; None where unknown."""
        low, high = self.interval or (None, None)
        counts = {name: getattr(self, name) for name in COUNTS}
        return {**counts, "share": self.share, "low": low, "high": high, "p": self.p}

    def save(self, folder: Path) -> None:
        write(folder / "ratings.json", json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Ratings | None:
        """Of a run; None where it has none. Raises `Refused` for a file that isn't what `save` writes."""
        path = folder / "ratings.json"
        if not path.is_file():
            return None
        try:
            values = loads(path.read_bytes())
            found = cls(**values)
            step, counts = found.step, [getattr(found, name) for name in COUNTS]
            right = all(type(x) is int and x >= 0 for x in counts) and (step is None or type(step) is int)
        except (ValueError, TypeError):
            right = False
        if not right:
            raise Refused(
                f"{path}: expected whole numbers {', '.join(COUNTS)} and step; read the sheet again with "
                "agro eval RUN --ratings"
            )
        return found
