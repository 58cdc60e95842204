"""The experiments: which runs, how their settings are chosen, and the sentences that they test.

Written before any of them was run. Each rule is a function of `rules`.
"""

from __future__ import annotations

import itertools
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from reproductions.paper import plans as m
from reproductions.paper import rules
from reproductions.paper.plans import CAREFUL, CARELESS, LAGS, LONG, MIXTURE, PLANS, SHARES
from reproductions.paper.rules import Rule
from reproductions.paper.runs import Run, Trial
from reproductions.paper.task import OTHER, START

SEEDS, MORE = (0, 1, 2), tuple(range(3, 15))  # of the first look, and what sentences that it leaves open get
RATES = (1e-4, 3e-4)  # 1e-3 in place of 1e-4 at first, in 28 runs on the start's log: the worse one for all
FOUR_DECADES, LARGER = (0.0, 0.001, 0.01, 0.1, 1.0), (0.1, 0.3, 1.0)
PAPER, FOLLOWS, NOT_RUN = "the paper", "follows", "not run"


class Claim(NamedTuple):
    text: str
    ruled: str  # the rule in words


CLAIMS = {
    name: Claim(*words)
    for name, words in tomllib.loads(Path(__file__).with_name("claims.toml").read_text("utf-8")).items()
}


@dataclass(frozen=True)
class Sentence:
    """What is claimed, of which data, by whom, and how it is judged."""

    claim: Claim
    on: str
    rule: Rule
    whose: str = PAPER


@dataclass(frozen=True)
class Part:
    """Runs of each method on each plan, and what they test."""

    name: str
    title: str
    plans: Sequence[str]
    methods: Sequence[str]
    sentences: Sequence[Sentence]
    rates: Sequence[float] = RATES
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


def _logs(n: int) -> list[str]:
    return [f"{log}, n = {n}" for log in (START, OTHER, MIXTURE)]


def _weighted(on: str, plan: str, others: Sequence[str]) -> list[Sentence]:
    claims = {name: Claim(f"weighted AGRO ends above {name}", "at the end") for name in others}
    first = (m.WEIGHTED, plan, None)
    return [Sentence(claims[name], on, rules.above(first, (name, plan, None)), "we") for name in others]


def _offline(n: int) -> list[Sentence]:
    own = f"{START}, n = {n}"
    found = [Sentence(CLAIMS["crash"], own, rules.crashes((SAME_RATE, own, None), 0.05))] if n == 4 else []
    for plan in _logs(n):
        rivals = [(name, plan, None) for name in OFFLINE if not m.METHODS[name].obstacle(PLANS[plan])]
        first, *pair = ((name, plan, None) for name in (m.WEIGHTED, m.AGRO, m.KL_PG))
        whose = PAPER if plan == own and n == 4 else FOLLOWS
        found.append(Sentence(CLAIMS["higher"], plan, rules.above(*pair), whose))
        if n == 4:
            found.append(
                Sentence(
                    CLAIMS["higher_j"], f"{plan}, β = .1", rules.above(*pair, rules.regularized), FOLLOWS
                )
            )
            found.append(Sentence(CLAIMS["efficient"], plan, rules.more_kl_efficient(*pair), FOLLOWS))
        found += _weighted(plan, plan, (m.AGRO, m.KL_PG))
        best = rules.best(first, [key for key in rivals if key != first])
        found.append(Sentence(CLAIMS["best"], plan, best, "we"))
    return found


def _long() -> list[Sentence]:
    """At the same β and rate, with four times the updates."""
    found = []
    for beta in LARGER:
        pair, on = [(name, LONG, beta) for name in (m.AGRO, m.KL_PG)], f"{LONG}, β = {beta:g}"
        found.append(Sentence(CLAIMS["higher"], on, rules.above(*pair), FOLLOWS))
        found.append(Sentence(CLAIMS["higher_j"], on, rules.above(*pair, rules.regularized), FOLLOWS))
        found.append(Sentence(CLAIMS["efficient"], on, rules.more_kl_efficient(*pair), FOLLOWS))
    return found


def _figure_4() -> list[Sentence]:
    found = []
    for name, share in itertools.product(OURS, SHARES[1:]):
        fresh, replayed = (name, "replay 0", None), (name, f"replay {share:g}", None)
        on, whose = f"{name}, {share:.0%}", PAPER if name == m.AGRO else FOLLOWS
        efficient = rules.more_kl_efficient(replayed, fresh, -rules.MARGIN)
        fewer = rules.fewer_generations(name, replayed[1], fresh[1], 0.7)
        found.append(Sentence(CLAIMS["as_efficient"], on, efficient, whose))
        found.append(Sentence(CLAIMS["slower"], on, rules.above(fresh, replayed, rules.half_way), whose))
        found.append(Sentence(CLAIMS["saved"], on, fewer, "arXiv 2604.08706"))
    half, most = ((m.AGRO, f"replay {share:g}", None) for share in SHARES[1:])
    grown = rules.grows(m.AGRO, m.KL_PG, "replay 0", most[1])
    found.append(
        Sentence(CLAIMS["steeper"], "AGRO, 50% and 75%", rules.above(half, most, rules.half_way), FOLLOWS)
    )
    return [*found, Sentence(CLAIMS["grows"], "from no replay to 75 %", grown)]


def _lag() -> list[Sentence]:
    fresh, stale = f"sync {LAGS[0]}", f"sync {LAGS[-1]}"
    ours, theirs = (
        Claim(f"{name} {CLAIMS['keeps'][0]}", CLAIMS["keeps"][1])
        for name in ("the best form of AGRO", "OAPL")
    )
    others = (m.AGRO, m.BY_SAMPLER, m.OAPL, m.M2PO, m.CLIP, m.DPPO)
    return [
        Sentence(ours, stale, rules.keeps(OURS, fresh, stale, 0.95), "we"),
        Sentence(theirs, stale, rules.keeps((m.OAPL,), fresh, stale, 0.95), "arXiv 2602.19362"),
        *_weighted(f"a lag of {LAGS[-1]}", stale, others),
    ]


def _figures_2_and_3() -> list[Sentence]:
    found = []
    for start in (CARELESS, CAREFUL):
        plan = f"fresh, {start}"
        key = {name: (name, plan, None) for name in FRESH}
        agro, on_policy, others = key[m.AGRO], key[m.ON_POLICY], (m.RLOO, m.AGRO, m.KL_PG)
        found.append(Sentence(CLAIMS["coincide"], plan, rules.level(key[m.RLOO], agro, rules.trained)))
        found.append(Sentence(CLAIMS["ahead"], plan, rules.above(on_policy, agro, rules.trained)))
        found.append(Sentence(CLAIMS["first"], plan, rules.best(on_policy, [key[name] for name in others])))
        found.append(Sentence(CLAIMS["shared"], plan, rules.above(key[m.ADAPTIVE], agro), "we"))
    plan = f"fresh, {CARELESS}"
    return [*found, Sentence(CLAIMS["trap"], plan, rules.below_start((m.ON_POLICY, plan, None)), "we")]


def _figure_6() -> list[Sentence]:
    fresh, log = f"fresh, {CAREFUL}", f"{START}, n = 4"
    found = []
    for name, whose in ((m.ON_POLICY, PAPER), (m.AGRO, FOLLOWS)):
        key = {beta: (name, fresh, beta) for beta in FOUR_DECADES}
        slower = rules.above(key[0.01], key[1.0], rules.half_way)
        found.append(Sentence(CLAIMS["large_slower"], name, slower, whose))
        found.append(
            Sentence(CLAIMS["large_efficient"], name, rules.more_kl_efficient(key[0.1], key[0.001]), whose)
        )
        found.append(
            Sentence(CLAIMS["none_inefficient"], name, rules.more_kl_efficient(key[0.1], key[0.0]), whose)
        )
    return [*found, Sentence(CLAIMS["unstable"], log, rules.crashes((m.AGRO, log, 0.0), 0.05))]


OFFLINE = (m.KL_PG, m.UNREGULARIZED, m.AGRO, m.WEIGHTED, m.DRO, m.IMITATION, m.TOPR, m.QRPO, m.FPA)
OURS = (m.AGRO, m.WEIGHTED, m.BY_SAMPLER)
FRESH = (m.RLOO, m.AGRO, m.ON_POLICY, m.ADAPTIVE, m.KL_PG)
PARTS = {
    part.name: part
    for part in (
        Part(
            "offline",
            "Logs, four responses a prompt",
            _logs(4),
            OFFLINE,
            [
                *_offline(4),
                Sentence(
                    CLAIMS["grows"],
                    "from the start's log to another's",
                    rules.grows(m.AGRO, m.KL_PG, *_logs(4)[:2]),
                ),
            ],
            at_all_rates=(m.UNREGULARIZED,),
        ),
        Part("single", "Logs, one response a prompt", _logs(1), OFFLINE, _offline(1)),
        Part(
            "long",
            "Figure 5 with one rate, a larger β too, and four times the updates",
            [LONG],
            (m.AGRO, m.KL_PG),
            _long(),
            rates=RATES[:1],
            betas=LARGER,
        ),
        Part(
            "replay",
            "Figure 4: a share of the run's own earlier groups",
            [f"replay {share:g}" for share in SHARES],
            (*OURS, m.KL_PG),
            _figure_4(),
            own_beta=0.01,
        ),
        Part(
            "lag",
            "Samples of weights that are up to 400 updates old",
            [f"sync {lag}" for lag in (400, 1, 100, 10)],
            (*OURS, m.OAPL, m.M2PO, m.CLIP, m.DPPO),
            _lag(),
            rates=RATES[:1],
            own_beta=0.01,
        ),
        Part(
            "fresh",
            "Figures 2 and 3: fresh samples, where the trap acts and where it doesn't",
            [f"fresh, {start}" for start in (CARELESS, CAREFUL)],
            FRESH,
            _figures_2_and_3(),
        ),
        Part(
            "beta",
            "Figure 6: β over four decades, and 0",
            [f"fresh, {CAREFUL}", f"{START}, n = 4"],
            (m.AGRO, m.ON_POLICY),
            _figure_6(),
            rates=RATES[1:],
            betas=FOUR_DECADES,
        ),
    )
}
