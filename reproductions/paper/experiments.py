"""The experiments: which runs, how their settings are chosen, and the sentences that they test.

Written before any of them was run. Each rule is a function of `rules`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reproductions.arena.report import best_settings
from reproductions.arena.task import OTHER, START
from reproductions.paper import rules
from reproductions.paper.methods import (
    ADAPTIVE,
    AGRO,
    BY_SAMPLER,
    CLIP,
    DPPO,
    DRO,
    FPA,
    IMITATION,
    KL_PG,
    M2PO,
    METHODS,
    OAPL,
    ON_POLICY,
    QRPO,
    RLOO,
    TOPR,
    UNREGULARIZED,
    WEIGHTED,
)
from reproductions.paper.plans import CAREFUL, CARELESS, LAGS, LONG, MIXTURE, PLANS, SHARES
from reproductions.paper.rules import Rule
from reproductions.paper.runs import Run, Trial

SEEDS, MORE = (0, 1, 2), tuple(range(3, 15))  # of the first look, and what sentences that it leaves open get
RATES = (1e-4, 3e-4)  # 1e-3 in place of 1e-4 at first, in 28 runs on the start's log: the worse one for all
FOUR_DECADES, LARGER = (0.0, 0.001, 0.01, 0.1, 1.0), (0.1, 0.3, 1.0)
PAPER, FOLLOWS, NOT_RUN = "the paper", "follows", "not run"


@dataclass(frozen=True)
class Sentence:
    """What is claimed, of which data, by whom, and how it is judged."""

    text: str
    on: str
    rule: Rule
    ruled: str  # the rule in words
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
        return [(name, plan) for name, plan in every if not METHODS[name].obstacle(PLANS[plan])]

    @property
    def missing(self) -> list[tuple[str, str, str]]:
        """(method, plan, why) of what can't."""
        every = itertools.product(self.methods, self.plans)
        found = [(name, plan, METHODS[name].obstacle(PLANS[plan])) for name, plan in every]
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
        if self.own_beta is not None and METHODS[name].objective == "agro":
            return (self.own_beta,)
        return METHODS[name].betas if self.betas is None else self.betas

    def repeats(self, plan: str, runs: Sequence[Run]) -> list[Trial]:
        """The best settings of each method so far, with all seeds."""
        if self.betas is not None:
            return []
        best = [self.best(runs, (name, plan))[0] for name in self._able(plan)]
        trials = [Trial(r["objective"], r["kind"], r["rate"], r["beta"]) for r in best]
        return [replace(trial, seed=seed) for trial in trials for seed in SEEDS]

    def best(self, runs: Sequence[Run], cell: tuple[str, str]) -> list[Run]:
        """Of the settings that end highest on the prompts for validation, in the mean of the first seeds."""
        of_cell = [run for run in runs if (run["objective"], run["kind"]) == cell]
        chosen = best_settings([run for run in of_cell if run["seed"] in SEEDS])[0]
        settings = chosen["rate"], chosen["beta"]
        return [run for run in of_cell if (run["rate"], run["beta"]) == settings]

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
            if (KL_PG, plan, None) in found and UNREGULARIZED in self.at_all_rates:
                rate = found[KL_PG, plan, None][0]["rate"]
                of_plan = [r for r in runs if (r["objective"], r["kind"]) == (UNREGULARIZED, plan)]
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


def _offline(n: int) -> list[Sentence]:
    own = f"{START}, n = {n}"
    crash = rules.crashes((SAME_RATE, own, None), 0.05)
    found = [Sentence(CRASH, own, crash, "with β = 0, at the best rate of KL-PG; " + FALL)] if n == 4 else []
    for plan in _logs(n):
        key = {name: (name, plan, None) for name in OFFLINE}
        rivals = [
            key[name] for name in OFFLINE if name != WEIGHTED and not METHODS[name].obstacle(PLANS[plan])
        ]
        pair, whose = (key[AGRO], key[KL_PG]), PAPER if plan == own and n == 4 else FOLLOWS
        found.append(Sentence(f"figure 5: {HIGHER}", plan, rules.above(*pair), ABOVE, whose))
        if n == 4:
            found += [
                Sentence(
                    f"figure 5: {HIGHER_J}",
                    f"{plan}, β = .1",
                    rules.above(*pair, rules.regularized),
                    J,
                    whose,
                ),
                Sentence(f"figure 5: {EFFICIENT}", plan, rules.more_kl_efficient(*pair), OVER_KL, whose),
            ]
        found += [
            Sentence(
                f"weighted AGRO ends above {other}", plan, rules.above(key[WEIGHTED], key[other]), ABOVE, "we"
            )
            for other in (AGRO, KL_PG, IMITATION)
        ]
        found.append(
            Sentence("weighted AGRO is the best", plan, rules.best(key[WEIGHTED], rivals), ABOVE, "we")
        )
    return found


def _other_log() -> Sentence:
    grown = rules.grows(AGRO, KL_PG, f"{START}, n = 4", f"{OTHER}, n = 4")
    return Sentence(GROWS, "from the start's log to another model's", grown, GROWN)


def _long() -> list[Sentence]:
    """At the same β and rate, with four times the updates."""
    found = []
    for beta in LARGER:
        keys = [(name, LONG, beta) for name in (AGRO, KL_PG)]
        on = f"{LONG}, β = {beta:g}"
        found += [
            Sentence(f"figure 5: {HIGHER}", on, rules.above(*keys), ABOVE),
            Sentence(f"figure 5: {HIGHER_J}", on, rules.above(*keys, rules.regularized), J),
            Sentence(f"figure 5: {EFFICIENT}", on, rules.more_kl_efficient(*keys), OVER_KL),
        ]
    return found


def _figure_4() -> list[Sentence]:
    found = []
    for name, share in itertools.product(OURS, SHARES[1:]):
        fresh, replayed = (name, "replay 0", None), (name, f"replay {share:g}", None)
        on, whose = f"{name}, {share:.0%}", PAPER if name == AGRO else FOLLOWS
        efficient = rules.more_kl_efficient(replayed, fresh, -rules.MARGIN)
        slower = rules.above(fresh, replayed, rules.half_way)
        fewer = rules.fewer_generations(name, replayed[1], fresh[1], 0.7)
        found += [
            Sentence("figure 4: replay is as KL-efficient as fresh samples", on, efficient, NOT_BELOW, whose),
            Sentence(
                "figure 4: replay is slower per step", on, slower, "fresh samples are ahead half way", whose
            ),
            Sentence("replay saves about 40 % of the generations", on, fewer, SAVED, "arXiv 2604.08706"),
        ]
    near, far = (f"replay {share:g}" for share in (SHARES[0], SHARES[-1]))
    steeper = rules.above((AGRO, "replay 0.5", None), (AGRO, far, None), rules.half_way)
    return [
        *found,
        Sentence(
            "figure 4: the more is replayed, the slower",
            "AGRO, 50% and 75%",
            steeper,
            "50 % is ahead half way",
        ),
        Sentence(GROWS, "from no replay to 75 %", rules.grows(AGRO, KL_PG, near, far), GROWN),
    ]


def _lag() -> list[Sentence]:
    fresh, stale = f"sync {LAGS[0]}", f"sync {LAGS[-1]}"
    kept, ruled = (
        "keeps 95 % of its fresh accuracy at a lag of 400 updates",
        "the interval of the share is above .95",
    )
    return [
        Sentence(f"the best form of AGRO {kept}", stale, rules.keeps(OURS, fresh, stale, 0.95), ruled, "we"),
        Sentence(f"OAPL {kept}", stale, rules.keeps((OAPL,), fresh, stale, 0.95), ruled, "arXiv 2602.19362"),
        *(
            Sentence(
                f"weighted AGRO ends above {other}",
                f"a lag of {LAGS[-1]}",
                rules.above((WEIGHTED, stale, None), (other, stale, None)),
                ABOVE,
                "we",
            )
            for other in (AGRO, BY_SAMPLER, OAPL, M2PO, CLIP, DPPO)
        ),
    ]


def _figures_2_and_3() -> list[Sentence]:
    found = []
    for start in (CARELESS, CAREFUL):
        plan = f"fresh, {start}"
        key = {name: (name, plan, None) for name in FRESH}
        same = rules.level(key[RLOO], key[AGRO], rules.trained)
        ahead = rules.above(key[ON_POLICY], key[AGRO], rules.trained)
        first = rules.best(key[ON_POLICY], [key[name] for name in (RLOO, AGRO, KL_PG)])
        share = rules.above(key[ADAPTIVE], key[AGRO])
        found += [
            Sentence(
                "figure 2: RLOO and off-policy AGRO coincide",
                plan,
                same,
                "no difference of the training reward",
            ),
            Sentence(
                "figure 2: on-policy AGRO is ahead of off-policy AGRO", plan, ahead, "in training reward"
            ),
            Sentence("figure 3: on-policy AGRO has the best held-out accuracy", plan, first, ABOVE),
            Sentence("on-policy AGRO with our share ends above off-policy AGRO", plan, share, ABOVE, "we"),
        ]
    trap = rules.below_start((ON_POLICY, f"fresh, {CARELESS}", None))
    text = "the trap: on-policy AGRO ends below a start that is right 3 times in 10"
    return [*found, Sentence(text, f"fresh, {CARELESS}", trap, "below the start's accuracy", "we")]


def _figure_6() -> list[Sentence]:
    fresh, log = f"fresh, {CAREFUL}", f"{START}, n = 4"
    found = []
    for name, whose in ((ON_POLICY, PAPER), (AGRO, FOLLOWS)):
        slower = rules.above((name, fresh, 0.01), (name, fresh, 1.0), rules.half_way)
        efficient, not_zero = (
            rules.more_kl_efficient((name, fresh, 0.1), (name, fresh, least)) for least in (0.001, 0.0)
        )
        found += [
            Sentence("figure 6: a larger β is slower", name, slower, "β = .01 is ahead of 1 half way", whose),
            Sentence(
                "figure 6: a larger β is more KL-efficient",
                name,
                efficient,
                "β = .1 above .001: " + OVER_KL,
                whose,
            ),
            Sentence(
                "figure 6: β = 0 is KL-inefficient", name, not_zero, "β = .1 above 0: " + OVER_KL, whose
            ),
        ]
    unstable = rules.crashes((AGRO, log, 0.0), 0.05)
    return [
        *found,
        Sentence("figure 6: β = 0 is unstable off-policy", log, unstable, "AGRO with β = 0 " + FALL),
    ]


CRASH = "figure 5: offline, from the reference's samples, training without regularization crashes"
HIGHER = "AGRO ends above KL-regularized policy gradient"
HIGHER_J = "AGRO is above KL-PG by the objective of both, J = E r − β KL"
EFFICIENT = "AGRO is above KL-PG at equal KL"
GROWS = "figure 4: AGRO's lead over KL-PG grows with off-policyness"
FALL = "ends more than .05 below its best on the way"
ABOVE = "the accuracy at the end is higher"
J = "J at the end is higher"
OVER_KL = "mean accuracy over KL, up to the largest KL that all reach"
NOT_BELOW = OVER_KL + ", is at most .03 below"
GROWN = "the difference at the end is larger"
SAVED = "at most 70 % of the responses for 95 % of the accuracy that fresh samples end with"
OFFLINE = (KL_PG, UNREGULARIZED, AGRO, WEIGHTED, DRO, IMITATION, TOPR, QRPO, FPA)
OURS = (AGRO, WEIGHTED, BY_SAMPLER)
FRESH = (RLOO, AGRO, ON_POLICY, ADAPTIVE, KL_PG)
PARTS = {
    part.name: part
    for part in (
        Part(
            "offline",
            "Logs, four responses a prompt",
            _logs(4),
            OFFLINE,
            [*_offline(4), _other_log()],
            at_all_rates=(UNREGULARIZED,),
        ),
        Part("single", "Logs, one response a prompt", _logs(1), OFFLINE, _offline(1)),
        Part(
            "long",
            "Figure 5 with one rate, a larger β too, and four times the updates",
            [LONG],
            (AGRO, KL_PG),
            _long(),
            rates=RATES[:1],
            betas=LARGER,
        ),
        Part(
            "replay",
            "Figure 4: a share of the run's own earlier groups",
            [f"replay {share:g}" for share in SHARES],
            (*OURS, KL_PG),
            _figure_4(),
            own_beta=0.01,
        ),
        Part(
            "lag",
            "Samples of weights that are up to 400 updates old",
            [f"sync {lag}" for lag in (400, 1, 100, 10)],
            (*OURS, OAPL, M2PO, CLIP, DPPO),
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
            (AGRO, ON_POLICY),
            _figure_6(),
            rates=RATES[1:],
            betas=FOUR_DECADES,
        ),
    )
}
