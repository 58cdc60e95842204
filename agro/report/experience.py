"""What the store says of a run: every response that it drew, and the best and worst of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from agro.errors import Refused
from agro.report.metrics import RunData, Values, known
from agro.report.responses import Responses, choose
from agro.store import Draw, Store

TENTH = 10
SOURCES = 5  # told apart; the others are one


@dataclass(frozen=True)
class Experience:
    """`problem`: why `responses` aren't known, nor `draws` where there are none; empty where all was read."""

    path: Path
    draws: list[Draw] = field(default_factory=list)
    responses: Responses | None = None
    problem: str = ""

    @classmethod
    def of(cls, run: RunData) -> Experience:
        path = Path(run.config.data.store) if run.config.data.store else run.folder / "store.db"
        if not path.exists():
            return cls(path, problem=f"There is no store at {path}.")
        name, logged = run.values.get("run"), {row["step"] for row in run.rows}
        draws: list[Draw] = []
        try:
            with Store.open(path, read_only=True) as store:
                draws = [d for d in store.drawn(name) if d.step in logged] if isinstance(name, str) else []
                return cls(path, draws, choose(store, name))
        except Refused as error:  # damaged, or something else is there now
            return cls(path, draws, problem=str(error))

    @cached_property
    def steps(self) -> Values:
        return np.array([d.step for d in self.draws], np.float64)

    @cached_property
    def rewards(self) -> Values:
        return known([d.reward for d in self.draws])

    @cached_property
    def lengths(self) -> Values:
        return known([d.length for d in self.draws])

    @cached_property
    def sources(self) -> list[str]:
        """What each draw is called by where it comes from; the rarest ones share a name."""
        names = [source_of(d) for d in self.draws]
        counts = Counter(names)
        if len(counts) <= SOURCES:
            return names
        shown = {name for name, _ in counts.most_common(SOURCES - 1)}
        rest = f"{len(counts) - len(shown)} other sources"
        return [n if n in shown else rest for n in names]

    @cached_property
    def source_names(self) -> list[str]:
        """Of `sources`, the most frequent first."""
        return [name for name, _ in Counter(self.sources).most_common()]

    def seen(self, run: RunData) -> Values:
        """Responses drawn until each row of the metrics, repeats counted."""
        return np.searchsorted(np.sort(self.steps), run.column("step"), side="right").astype(np.float64)


@dataclass(frozen=True)
class Window:
    """The known values of draws at steps `first` to `last`."""

    first: int
    last: int
    values: Values


def begin_and_end(steps: Values, values: Values) -> tuple[Window, Window] | None:
    """The first and the last tenth of the steps at which a value is known; None where none is."""
    at = np.isfinite(values)
    found = np.unique(steps[at])
    if not found.size:
        return None
    n = max(1, len(found) // TENTH)

    def window(part: Values) -> Window:
        inside = at & (steps >= part[0]) & (steps <= part[-1])
        return Window(int(part[0]), int(part[-1]), values[inside])

    return window(found[:n]), window(found[-n:])


def source_of(draw: Draw) -> str:
    if not draw.own:
        return draw.source or draw.role
    return "fresh samples" if draw.age == 0 else "this run's earlier samples"


def mean_of(draws: list[Draw], value: Callable[[Draw], float | None]) -> float | None:
    """The mean over the draws that know it; None where none does."""
    found = [x for d in draws if (x := value(d)) is not None]
    return sum(found) / len(found) if found else None
