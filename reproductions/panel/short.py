"""Runs of few updates: how much larger the bound on the change of a step may be than in long ones.

    python reproductions/panel/short.py [--updates 16 25] [--seeds 1] [--out runs/short] [--record] [--small]

The panel's jobs have some 100 updates each. Here those with a log have 16 and 25: the library's bound,
0.005 √(100/updates) nats a token, beside that of long runs, the one that allows as much in sum as 100
updates, none, and imitation of the good; all without `train.gain_ratio`. Prints a table, and writes it with
--record into result_short.json beside this script. An interrupted run continues.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.train.phases import FEW_STEPS, step_bound  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.panel import play, report  # noqa: E402
from reproductions.panel.jobs import JOBS, Job  # noqa: E402
from reproductions.panel.logs import FULL, SMALL, Size  # noqa: E402
from reproductions.panel.methods import METHODS, NOTHING, Facts, Values  # noqa: E402
from reproductions.panel.play import Row, Run  # noqa: E402

UPDATES, RATES, BOUND = (16, 25), (1e-3, 3e-3), 0.005
ON = ("own", "graded", "better", "better, noisy", "worse", "mislabeled", "pairs", "stars")
OWN, LONG = "0.005 √(100/updates)", "0.005, as in long runs"
IN_SUM, NO_BOUND = "0.005 · 100/updates, as much in sum", "none"
TRIED = (OWN, LONG, IN_SUM, NO_BOUND, "imitation of the good")


def bound_of(method: str, updates: int) -> float | None:
    """`train.step_kl` with which a phase of so many updates has the bound of this name."""
    widened = step_bound(1.0, updates)
    in_sum = BOUND * FEW_STEPS / updates / widened
    return {OWN: BOUND, LONG: BOUND / widened, IN_SUM: in_sum, NO_BOUND: None}[method]


def bounded(job: Job, facts: Facts, *, name: str) -> Values:
    """The default with another bound."""
    given = METHODS["the default"](job, facts)
    assert not isinstance(given, str)
    return {**given, "train": {"gain_ratio": None, "step_kl": bound_of(name, job.updates)}}


def rows(seeds: int) -> list[Row]:
    kinds = [(job, method, rate) for job in ON for method in TRIED for rate in RATES]
    trained = [Row(job, method, rate, seed) for seed in range(seeds) for job, method, rate in kinds]
    return [*(Row(job, NOTHING, None) for job in ON), *trained]


def table(found: Mapping[int, Sequence[Run]]) -> str:
    """A row for each method: by number of updates the mean held-out reward over jobs and seeds, by rate."""
    rows = []
    every = [run for runs in found.values() for run in runs]
    for method in dict.fromkeys(run["method"] for run in every):
        words = ["the start" if method == NOTHING else method]
        for runs in found.values():
            same = [run for run in runs if run["method"] == method]
            by_rate = [[run for run in same if run["rate"] == rate] for rate in (None, *RATES)]
            words.append(", ".join(report.number(report.mean(of_rate)) for of_rate in by_rate if of_rate))
        rows.append(words)
    return harness.markdown(["bound", *(f"{updates} updates" for updates in found)], rows)


def played(updates: int, seeds: int, out: Path, size: Size) -> list[Run]:
    """All runs of so many updates."""
    JOBS.update({name: replace(JOBS[name], updates=updates) for name in ON})
    play.world.cache_clear()
    runs = []
    for row in rows(seeds):
        runs.append(play.complete(row, out / str(updates), size))
        print(report.line(runs[-1]), flush=True)
    return runs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, "runs/short", record=harness.RECORD, small=harness.SMALL)
    parser.add_argument("--updates", nargs="+", type=int, default=UPDATES)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args(arguments)
    METHODS.update({name: partial(bounded, name=name) for name in (OWN, LONG, IN_SUM, NO_BOUND)})
    size = SMALL if args.small else FULL
    found = {updates: played(updates, args.seeds, args.out, size) for updates in args.updates}
    result = {"machine": harness.machine(), "runs": found}
    harness.keep_json(args, HERE, "result_short.json", result)
    print(table(found))


if __name__ == "__main__":
    harness.guarded(main)
