"""The experiments: which runs, how their settings are chosen, and the sentences that they test.

Both stand in experiments.toml, written before any of them was run. Each rule is a function of `rules`.
"""

from __future__ import annotations

import itertools
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from reproductions.paper import plans as m
from reproductions.paper import rules
from reproductions.paper.plans import PLANS
from reproductions.paper.rules import Rule
from reproductions.paper.runs import Run, Trial

SEEDS, MORE = (0, 1, 2), tuple(range(3, 15))  # of the first look, and what sentences that it leaves open get
PAPER, NOT_RUN = "the paper", "not run"
SCORES = {score.__name__: score for score in (rules.regularized, rules.half_way, rules.trained)}


class Claim(NamedTuple):
    text: str
    ruled: str  # the rule in words


@dataclass(frozen=True)
class Sentence:
    """What is claimed, of which data, by whom, and how it is judged."""

    claim: Claim
    on: str
    rule: Rule
    whose: str = PAPER

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Sentence:
        """Of a line of experiments.toml."""
        rule = getattr(rules, given["rule"])(*map(_compared, given["of"]))
        return cls(CLAIMS[given["claim"]], given["on"], rule, given["whose"])


def _compared(given: Any) -> Any:
    """What a rule compares: scores by their names, and [method, plan, β] as keys of what was found."""
    if isinstance(given, str):
        return SCORES.get(given, given)
    if not isinstance(given, list):
        return given
    if len(given) > 1 and isinstance(given[1], str) and given[1] in PLANS:
        return (given[0], given[1], given[2] if len(given) > 2 else None)
    return [_compared(inner) for inner in given]


@dataclass(frozen=True)
class Part:
    """Runs of each method on each plan, and what they test."""

    name: str
    title: str
    plans: Sequence[str]
    methods: Sequence[str]
    sentences: Sequence[Sentence]
    rates: Sequence[float]
    betas: Sequence[float] | None = None  # None: each method's own; else all of these, with all seeds
    at_all_rates: Sequence[str] = ()  # methods that have all seeds at each rate
    own_beta: float | None = None  # the one β of AGRO in this part

    @property
    def cells(self) -> list[tuple[str, str]]:
        """(method, plan) of what can be run."""
        every = itertools.product(self.methods, self.plans)
        return [(name, plan) for name, plan in every if not m.METHODS[name].obstacle(PLANS[plan])]

    @property
    def missing(self) -> list[tuple[str, str, str]]:
        """(method, plan, why) of what can't."""
        every = itertools.product(self.methods, self.plans)
        found = [(name, plan, m.METHODS[name].obstacle(PLANS[plan])) for name, plan in every]
        return [row for row in found if row[2]]

    def grid(self, plan: str) -> list[Trial]:
        """All settings on a plan with the first seed, or with all of them."""
        trials = []
        for name in self._able(plan):
            every = self.betas is not None or name in self.at_all_rates
            seeds = SEEDS if every else SEEDS[:1]
            for rate, beta, seed in itertools.product(self.rates, self._betas(name), seeds):
                trials.append(Trial(name, plan, rate, beta, seed))
        return trials

    def _able(self, plan: str) -> list[str]:
        return [name for name, of in self.cells if of == plan]

    def _betas(self, name: str) -> Sequence[float | None]:
        if self.own_beta is not None and m.METHODS[name].objective == "agro":
            return (self.own_beta,)
        return m.METHODS[name].betas if self.betas is None else self.betas

    def repeats(self, plan: str, runs: Sequence[Run]) -> list[Trial]:
        """The best settings of each method so far, with all seeds."""
        if self.betas is not None:
            return []
        best = [self.best(runs, (name, plan))[0] for name in self._able(plan)]
        trials = [Trial(r["objective"], r["kind"], r["rate"], r["beta"]) for r in best]
        return [replace(trial, seed=seed) for trial in trials for seed in SEEDS]

    def best(self, runs: Sequence[Run], cell: tuple[str, str]) -> list[Run]:
        """Of the settings that end highest on the prompts for validation, in the mean of the first seeds."""
        same: dict[tuple[float, float | None], list[Run]] = {}
        for run in runs:
            if (run["objective"], run["kind"]) == cell:
                same.setdefault((run["rate"], run["beta"]), []).append(run)
        return max(
            same.values(),
            key=lambda of: statistics.mean(run["validation"] for run in of if run["seed"] in SEEDS),
        )

    def more(self, runs: Sequence[Run]) -> list[Trial]:
        """The second look: of sentences that the first seeds leave open, the runs with more seeds."""
        found = self.found([run for run in runs if run["seed"] in SEEDS])
        judged = [judge(sentence, found) for sentence in self.sentences]
        keys = {key: None for verdict in judged if verdict.word == rules.UNKNOWN for key in verdict.keys}
        firsts = [found[key][0] for key in keys]
        trials = [Trial(r["objective"], r["kind"], r["rate"], r["beta"]) for r in firsts]
        return [replace(trial, seed=seed) for trial in dict.fromkeys(trials) for seed in MORE]

    def found(self, runs: Sequence[Run]) -> dict[rules.Key, list[Run]]:
        """What rules and figures look at: the best runs of each cell, or the runs of each β.

        Without regularization those at the best rate with it are there too, under the name SAME_RATE.
        """
        if self.betas is not None:
            keys = {(run["objective"], run["kind"], run["beta"]) for run in runs}
            return {key: [r for r in runs if (r["objective"], r["kind"], r["beta"]) == key] for key in keys}
        complete = {(run["objective"], run["kind"]) for run in runs}
        cells = [cell for cell in self.cells if cell in complete]
        found = {(*cell, None): self.best(runs, cell) for cell in cells}
        for plan in self.plans:
            if (m.KL_PG, plan, None) in found and m.UNREGULARIZED in self.at_all_rates:
                rate = found[m.KL_PG, plan, None][0]["rate"]
                of_plan = [r for r in runs if (r["objective"], r["kind"]) == (m.UNREGULARIZED, plan)]
                found[SAME_RATE, plan, None] = [run for run in of_plan if run["rate"] == rate]
        return found


SAME_RATE = "KL-PG, β = 0, at the rate of KL-PG"


def judge(sentence: Sentence, found: rules.Found) -> rules.Verdict:
    """Where a plan isn't complete there is none."""
    try:
        return sentence.rule(found)
    except KeyError as missing:
        return rules.Verdict(NOT_RUN, f"{missing.args[0][1]} isn't complete")


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


CLAIMS = {name: Claim(*words) for name, words in _read("claims.toml").items()}
PARTS = {
    name: Part(name, **{**given, "sentences": [Sentence.of(line) for line in given["sentences"]]})
    for name, given in _read("experiments.toml").items()
}
