"""A run's experience: every response that it drew from the store, and the responses to held-out prompts at
every evaluation, for the page's sample browser."""

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
SOURCES = 5  # maximal number shown; the rarest are merged


@dataclass(frozen=True)
class RunExperience:
    """A run's draws. `problem`: why the store couldn't be read; empty if it could."""

    draws: list[Draw] = field(default_factory=list)
    failures: list[tuple[str, int]] = field(default_factory=list)  # causes of failed rewards, with counts
    problem: str = ""

    @classmethod
    def of(cls, run: RunData) -> RunExperience:
        path = located(run.config.data.store, run.folder)
        if not exists(path):
            return cls(problem=f"There is no store at {path}.")
        name = run.values.get("run")
        # The learner's version at each step's draw is the one after the step before it.
        prior_versions = [0, *(row.get("version") for row in run.rows)]
        versions = {row["step"]: version for row, version in zip(run.rows, prior_versions)}
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
        except Refused as error:  # damaged, not a store, or its server is unreachable
            return cls(draws, problem=str(error))

    def column(self, name: str) -> Values:
        """Return a field of each draw, such as its step; NaN where unknown."""
        return to_array([getattr(draw, name) for draw in self.draws])

    @cached_property
    def sources(self) -> list[str]:
        """The source of each draw; the rarest sources share one name."""
        names = [source_of(d) for d in self.draws]
        counts = Counter(names)
        if len(counts) <= SOURCES:
            return names
        shown = {name for name, _ in counts.most_common(SOURCES - 1)}
        remainder = f"{len(counts) - len(shown)} other sources"
        return [n if n in shown else remainder for n in names]


class Window(NamedTuple):
    """The finite values of draws at steps `start` to `stop`, inclusive."""

    start: int
    stop: int
    values: Values


def begin_and_end(steps: Values, values: Values) -> tuple[Window, Window] | None:
    """Return the first and the last tenth of the steps with finite values; None if there are none."""
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    present = np.unique(steps)
    if not present.size:
        return None
    n = max(1, len(present) // TENTH)
    start, stop = int(present[n - 1]), int(present[-n])
    begin = Window(int(present[0]), start, values[steps <= start])
    return begin, Window(stop, int(present[-1]), values[steps >= stop])


def source_of(draw: Draw) -> str:
    if not draw.is_own:
        return draw.source or draw.role
    return "fresh samples" if draw.staleness == 0 else "this run's earlier samples"


LONGEST = 2000  # characters of a prompt on the page
TOTAL = 1_500_000  # characters of all responses on the page; beyond it evaluations are thinned out evenly


@dataclass(frozen=True)
class HeldOutSamples:
    """Responses by prompt. `steps`: the evaluations on the page; `best`: the best of them, None if unknown.
    `about`: where the responses come from."""

    prompts: tuple[PromptResponses, ...]
    steps: tuple[int, ...]
    best: int | None
    about: str

    @property
    def columns(self) -> list[tuple[str, int]]:
        """The evaluations that the page shows side by side without its script: names and steps."""
        if not self.steps:
            return []
        start, end = self.steps[0], self.steps[-1]
        names = {start: "the start" if start == 0 else f"step {start}"}
        if self.best is not None:
            names.setdefault(self.best, f"step {self.best}, the best")
        names.setdefault(end, f"the trained model, step {end}")
        return [(names[step], step) for step in sorted(names)]

    @property
    def data(self) -> Markup:
        """All responses as JSON: `steps`, and by prompt and step the parts and the reward, or null.

        Escaped so that no character ends the enclosing element.
        """
        rows = [
            [None if (a := p.responses.get(step)) is None else [a.parts, a.reward] for step in self.steps]
            for p in self.prompts
        ]
        text = json.dumps({"steps": self.steps, "responses": rows}, allow_nan=False)
        escapes = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}
        return Markup(text.translate(escapes))


def held_out_samples(run: RunData) -> HeldOutSamples | None:
    """Load the recorded responses; None if there are none. Raises `Refused` naming FILE:LINE."""
    prompts = held_out_responses(run.folder)
    if not prompts:
        return None
    evaluated = sorted({step for p in prompts for step in p.responses})
    best = None if run.best_row is None else int(run.rows[run.best_row]["step"])
    if best not in evaluated:
        best = None
    size = sum(len(a.response) for p in prompts for a in p.responses.values())
    stride = max(1, math.ceil(size / TOTAL))
    steps = [s for i, s in enumerate(evaluated) if i % stride == 0 or s in (best, evaluated[-1])]
    origin = f"One response to each of {chosen(len(prompts), run.config)}, at every evaluation with the same "
    origin += "random numbers." + f" {OF_LOG}" * any(p.log for p in prompts)
    return HeldOutSamples(tuple(prompts), tuple(steps), best, origin)
