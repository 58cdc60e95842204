"""What a run experienced: every response that it drew from the store, and those to held-out prompts at every
evaluation, for the page's browser of samples."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from agro.errors import Refused
from agro.rewards.protocol import by_cause
from agro.runs.rundata import RunData, Values, to_array
from agro.runs.side_by_side import OF_LOG, PromptResponses, chosen, held_out_responses
from agro.store import Draw, Store
from agro.store.location import READ_SECONDS, exists, located

TENTH = 10
SOURCES = 5  # shown; the rarest ones are merged


@dataclass(frozen=True)
class RunExperience:
    """Draws of a run. `problem`: why the store couldn't be read; empty where it could."""

    draws: list[Draw] = field(default_factory=list)
    failures: list[tuple[str, int]] = field(default_factory=list)  # why rewards failed, and how often
    problem: str = ""

    @classmethod
    def of(cls, run: RunData) -> RunExperience:
        path = located(run.config.data.store, run.folder)
        if not exists(path):
            return cls(problem=f"There is no store at {path}.")
        name = run.values.get("run")
        # The learner's version when it drew at each step: the one that the step before it left.
        before = [0, *(row.get("version") for row in run.rows)]
        versions = {row["step"]: version for row, version in zip(run.rows, before)}
        draws: list[Draw] = []
        failures: list[tuple[str, int]] = []
        try:
            with Store.open(path, read_only=True, timeout=READ_SECONDS) as store:
                if isinstance(name, str):
                    draws = [d for d in store.draws.drawn(name, versions) if d.step in versions]
                    failed = store.samples(run=name, state="failed", skip_damaged=True)
                    causes = by_cause((sample, str(sample.meta.get("reward_error"))) for sample in failed)
                    failures = [(cases[0][1], len(cases)) for cases in causes]
                return cls(draws, failures)
        except Refused as error:  # damaged, not a store, or its server is away
            return cls(draws, problem=str(error))

    def column(self, name: str) -> Values:
        """A field of each draw, such as its step; NaN where it is unknown."""
        return to_array([getattr(draw, name) for draw in self.draws])

    @cached_property
    def sources(self) -> list[str]:
        """The source of each draw; the rarest sources share a name."""
        names = [source_of(d) for d in self.draws]
        counts = Counter(names)
        if len(counts) <= SOURCES:
            return names
        shown = {name for name, _ in counts.most_common(SOURCES - 1)}
        remainder = f"{len(counts) - len(shown)} other sources"
        return [n if n in shown else remainder for n in names]


class Window(NamedTuple):
    """The known values of draws at steps `start` to `stop`, both included."""

    start: int
    stop: int
    values: Values


def begin_and_end(steps: Values, values: Values) -> tuple[Window, Window] | None:
    """The first and the last tenth of the steps that have a known value; None where none has."""
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    known = np.unique(steps)
    if not known.size:
        return None
    n = max(1, len(known) // TENTH)
    start, stop = int(known[n - 1]), int(known[-n])
    begin = Window(int(known[0]), start, values[steps <= start])
    return begin, Window(stop, int(known[-1]), values[steps >= stop])


def source_of(draw: Draw) -> str:
    if not draw.is_own:
        return draw.source or draw.role
    return "fresh samples" if draw.staleness == 0 else "this run's earlier samples"


LONGEST = 2000  # characters of a prompt on the page
TOTAL = 1_500_000  # characters of all responses on the page; beyond it evaluations are left out evenly


@dataclass(frozen=True)
class HeldOutSamples:
    """Prompts in their order. `steps`: those of the evaluations on the page; `best`: the best of them, None
    where it isn't known. `about`: where the responses come from."""

    prompts: tuple[PromptResponses, ...]
    steps: tuple[int, ...]
    best: int | None
    about: str

    @property
    def columns(self) -> list[tuple[str, int]]:
        """What the page shows beside each other without its script: names and steps, in their order."""
        if not self.steps:
            return []
        first, last = self.steps[0], self.steps[-1]
        names = {first: "the start" if first == 0 else f"step {first}"}
        if self.best is not None:
            names.setdefault(self.best, f"step {self.best}, the best")
        names.setdefault(last, f"the trained model, step {last}")
        return [(names[step], step) for step in sorted(names)]

    @property
    def data(self) -> Markup:
        """Every response as JSON: `steps`, and by prompt and step its parts with its reward, or null.

        No character of it ends the element that holds it.
        """
        rows = [
            [None if (a := p.responses.get(step)) is None else [a.parts, a.reward] for step in self.steps]
            for p in self.prompts
        ]
        text = json.dumps({"steps": self.steps, "responses": rows}, allow_nan=False)
        escapes = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}
        return Markup(text.translate(escapes))


def held_out_samples(run: RunData) -> HeldOutSamples | None:
    """None where no response was recorded. Raises `Refused` naming FILE:LINE."""
    prompts = held_out_responses(run.folder)
    if not prompts:
        return None
    every = sorted({step for p in prompts for step in p.responses})
    best = None if run.best_row is None else int(run.rows[run.best_row]["step"])
    if best not in every:
        best = None
    size = sum(len(a.response) for p in prompts for a in p.responses.values())
    stride = max(1, math.ceil(size / TOTAL))
    steps = [s for i, s in enumerate(every) if i % stride == 0 or s in (best, every[-1])]
    about = f"One response to each of {chosen(len(prompts), run.config)}, at every evaluation with the same "
    about += "random numbers." + f" {OF_LOG}" * any(p.log for p in prompts)
    return HeldOutSamples(tuple(prompts), tuple(steps), best, about)
