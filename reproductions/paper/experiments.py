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
    AGRO_LARGER,
    BY_SAMPLER,
    CLIP,
    DPPO,
    DRO,
    FPA,
    IMITATION,
    KL_PG,
    KL_PG_LARGER,
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
from reproductions.paper.plans import CAREFUL, CARELESS, LAGS, MIXTURE, PLANS, SHARES
from reproductions.paper.rules import Rule
from reproductions.paper.runs import Run, Trial

SEEDS = (0, 1, 2)
RATES = (
    1e-4,
    3e-4,
)  # 1e-3 in place of 1e-4 at first, in 28 runs on the start's log: the worse one for every method
FOUR_DECADES = (0.0, 0.001, 0.01, 0.1, 1.0)


@dataclass(frozen=True)
class Sentence:
    """What is claimed, by whom, and how it is judged."""

    text: str
    rule: Rule
    ruled: str  # the rule in words
    whose: str = "the paper"


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
        """Of the settings that end highest on the prompts for validation, as a mean of the seeds so far."""
        return list(best_settings([run for run in runs if (run["objective"], run["kind"]) == cell]))

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


def _logs(n: int) -> list[str]:
    return [f"{log}, n = {n}" for log in (START, OTHER, MIXTURE)]


def _crash() -> Sentence:
    return Sentence(
        "figure 5: offline, from the reference's samples, training without regularization crashes",
        rules.crashes((SAME_RATE, f"{START}, n = 4", None), 0.05),
        "KL-PG with β = 0, at the best rate of KL-PG, ends more than .05 below its best on the way",
    )


def _offline(n: int) -> list[Sentence]:
    found = [] if n == 1 else [_crash()]
    for plan in _logs(n):
        rivals = [name for name in OFFLINE if name != WEIGHTED and not METHODS[name].obstacle(PLANS[plan])]
        found += [
            Sentence(
                f"figure 5: AGRO ends above KL-regularized policy gradient ({plan})",
                rules.above((AGRO, plan, None), (KL_PG, plan, None)),
                ABOVE,
                "the paper" if plan == f"{START}, n = 4" else "follows from the paper",
            ),
            *(
                Sentence(
                    f"our weight: weighted AGRO ends above {other} ({plan})",
                    rules.above((WEIGHTED, plan, None), (other, plan, None)),
                    ABOVE,
                    "we",
                )
                for other in (AGRO, KL_PG, IMITATION)
            ),
            Sentence(
                f"our weight: weighted AGRO is the best of all ({plan})",
                rules.best((WEIGHTED, plan, None), [(name, plan, None) for name in rivals]),
                ABOVE,
                "we",
            ),
        ]
    return found


def _figure_4() -> list[Sentence]:
    found = []
    for name, share in itertools.product(OURS, SHARES[1:]):
        fresh, replayed, of = (
            (name, "replay 0", None),
            (name, f"replay {share:g}", None),
            f"{name}, {share:.0%}",
        )
        whose = "the paper" if name == AGRO else "follows from the paper"
        found += [
            Sentence(
                f"figure 4: replay is as KL-efficient as fresh samples ({of})",
                rules.more_kl_efficient(replayed, fresh, -0.03),
                "mean accuracy over KL, up to the largest KL that all reach, is at most .03 below",
                whose,
            ),
            Sentence(
                f"figure 4: replay is slower per step ({of})",
                rules.above(fresh, replayed, rules.half_way),
                "fresh samples are ahead after half of the updates",
                whose,
            ),
            Sentence(
                f"replay reaches the same accuracy with about 40 % fewer generations ({of})",
                rules.fewer_generations(name, replayed[1], fresh[1], 0.7),
                "at most 70 % of the responses for 95 % of the accuracy that fresh samples end with",
                "arXiv 2604.08706",
            ),
        ]
    return found


def _lag() -> list[Sentence]:
    fresh, stale = f"sync {LAGS[0]}", f"sync {LAGS[-1]}"
    return [
        Sentence(
            "the best of AGRO and its weighted forms keeps 95 % of its fresh accuracy at a lag of 400",
            rules.keeps(OURS, fresh, stale, 0.95),
            "the interval of the share is above .95",
            "our goal",
        ),
        Sentence(
            "OAPL keeps 95 % of its fresh accuracy at a lag of 400 updates",
            rules.keeps((OAPL,), fresh, stale, 0.95),
            "the interval of the share is above .95",
            "arXiv 2602.19362, in our words",
        ),
        *(
            Sentence(
                f"at a lag of 400 updates weighted AGRO ends above {other}",
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
        found += [
            Sentence(
                f"figure 2: RLOO and off-policy AGRO coincide in training reward ({plan})",
                rules.level(key[RLOO], key[AGRO], 0.03, rules.trained),
                "the interval of the difference of the mean training reward is within .03",
            ),
            Sentence(
                f"figure 2: on-policy AGRO is ahead of off-policy AGRO in training reward ({plan})",
                rules.above(key[ON_POLICY], key[AGRO], rules.trained),
                "the mean reward of all fresh responses of a run is higher",
            ),
            Sentence(
                f"figure 3: on-policy AGRO has the best held-out accuracy ({plan})",
                rules.best(key[ON_POLICY], [key[name] for name in (RLOO, AGRO, KL_PG)]),
                ABOVE,
            ),
            Sentence(
                f"our adaptive share: on-policy AGRO with it ends above off-policy AGRO ({plan})",
                rules.above(key[ADAPTIVE], key[AGRO]),
                ABOVE,
                "we",
            ),
        ]
    trap = (ON_POLICY, f"fresh, {CARELESS}", None)
    found.append(
        Sentence(
            "the trap: on-policy AGRO ends below a start that is right 3 times in 10",
            rules.below_start(trap),
            "the interval of the start's accuracy less the end's is above 0",
            "we (reproductions/trap)",
        )
    )
    return found


def _figure_6() -> list[Sentence]:
    fresh, log = f"fresh, {CAREFUL}", f"{START}, n = 4"
    found = []
    for name, whose in ((ON_POLICY, "the paper"), (AGRO, "follows from the paper")):
        found += [
            Sentence(
                f"figure 6: a larger β is slower ({name})",
                rules.above((name, fresh, 0.01), (name, fresh, 1.0), rules.half_way),
                "β = .01 is ahead of β = 1 after half of the updates",
                whose,
            ),
            Sentence(
                f"figure 6: a larger β is more KL-efficient ({name})",
                rules.more_kl_efficient((name, fresh, 0.1), (name, fresh, 0.001), 0.0),
                "β = .1 has the higher mean accuracy over KL than β = .001, up to the KL that all reach",
                whose,
            ),
            Sentence(
                f"figure 6: β = 0 is KL-inefficient ({name})",
                rules.more_kl_efficient((name, fresh, 0.1), (name, fresh, 0.0), 0.0),
                "β = .1 has the higher mean accuracy over KL than β = 0",
                whose,
            ),
        ]
    found.append(
        Sentence(
            f"figure 6: β = 0 is unstable off-policy ({log})",
            rules.crashes((AGRO, log, 0.0), 0.05),
            "AGRO with β = 0 ends more than .05 below its best on the way",
        )
    )
    return found


ABOVE = "the interval of the difference of the accuracies at the end is above 0"
OFFLINE = (KL_PG, UNREGULARIZED, AGRO, WEIGHTED, DRO, IMITATION, TOPR, QRPO, FPA)
OURS = (AGRO, WEIGHTED, BY_SAMPLER)
FRESH = (RLOO, AGRO, ON_POLICY, ADAPTIVE, KL_PG)
PARTS = {
    part.name: part
    for part in (
        Part(
            "offline",
            "Figure 5 and beyond: logs of the start, of another model and of a mixture",
            _logs(4),
            OFFLINE,
            _offline(4),
            at_all_rates=(UNREGULARIZED,),
        ),
        Part(
            "single",
            "The same with one response a prompt",
            _logs(1),
            OFFLINE,
            _offline(1),
        ),
        Part(
            "larger",
            "Figure 5 with a larger β, asked after a look at `offline`: β = .1 was the best for both",
            [f"{START}, n = 4"],
            (AGRO_LARGER, KL_PG_LARGER),
            [
                Sentence(
                    "figure 5: AGRO ends above KL-regularized policy gradient, β = .3 or 1",
                    rules.above(*((name, f"{START}, n = 4", None) for name in (AGRO_LARGER, KL_PG_LARGER))),
                    ABOVE,
                )
            ],
        ),
        Part(
            "replay",
            "Figure 4: a share of the run's own earlier groups",
            [f"replay {share:g}" for share in SHARES],
            OURS,
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
