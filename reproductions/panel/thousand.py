"""A log of responses of 1,000 tokens: the recipe `log` beside imitation of the right ones.

    python reproductions/panel/thousand.py [--seeds 2] [--rates 1e-3 3e-3] [--out runs/thousand] [--record]
                                           [--small]

The longest responses of the panel have 200 tokens. Here they have 1,000, in a job of the same kind by the
same functions; only the sizes are smaller, so that all of it takes some CPU minutes. Prints a table, and
writes it with --record into result_thousand.json beside this script. An interrupted run
continues.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from reproductions import harness  # noqa: E402
from reproductions.panel import logs, play, report  # noqa: E402
from reproductions.panel.jobs import JOBS, Job, Model  # noqa: E402
from reproductions.panel.logs import Size  # noqa: E402
from reproductions.panel.methods import NOTHING  # noqa: E402
from reproductions.panel.play import Row, Run  # noqa: E402
from reproductions.panel.tasks import TASKS, Writer, onward  # noqa: E402

LENGTH = 1000
METHODS = ("the default", "imitation of the good")
JOB = Job(
    "thousand",
    f"{LENGTH} tokens, after which a response is cut off",
    replace(TASKS["onward"], name="thousand onward", answer=onward(LENGTH)),
    Writer(slip=0.0015),
    rewards="graded",  # the start is never right to the last letter
    prompts=64,
    warm_up=150,
    together=16,
    groups=4,
    max_new=LENGTH,
    model=Model(64, 1),
    updates=30,
)
SIZES = {False: Size(held_out=128, lessons=600), True: Size(16, 32, prompts=4, updates=1, warm_up=2)}


def rows(rates: Sequence[float], seeds: int) -> list[Row]:
    trained = [
        Row(JOB.name, method, rate, seed) for seed in range(seeds) for rate in rates for method in METHODS
    ]
    return [Row(JOB.name, NOTHING, None), *trained]


def table(result: dict[str, Any]) -> str:
    """A row for each method and rate: means over seeds and their range."""
    facts, runs = result["facts"], result["runs"]
    rows = []
    for method, rate in dict.fromkeys((run["method"], run["rate"]) for run in runs):
        same = [run for run in runs if (run["method"], run["rate"]) == (method, rate)]
        words = [method, "–" if rate is None else f"{rate:g}", str(len(same))]
        rows.append([*words, _range(same, "reward", 3), _range(same, "kl", 1)])
    head = harness.markdown(["method", "lr", "seeds", "share of right letters", "KL, nats"], rows)
    return (
        f"{facts['responses']} logged responses of {facts['length']:.0f} letters on average; "
        f"{facts['held_out']} held-out prompts (standard error ≤ {0.5 / facts['held_out'] ** 0.5:.3f}); "
        f"{JOB.updates} updates of {JOB.groups} prompts.\n\n{head}"
    )


def _range(runs: Sequence[Run], key: str, digits: int) -> str:
    values = [run[key] for run in runs]
    if any(value is None for value in values):
        return "–"
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return text
    return f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, "runs/thousand", record=harness.RECORD, small=harness.SMALL)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", nargs="+", type=float, default=(1e-3, 3e-3))
    args = parser.parse_args(arguments)
    JOBS[JOB.name] = JOB
    size, runs = SIZES[args.small], []
    for row in rows(args.rates, args.seeds):
        runs.append(play.complete(row, args.out, size))
        print(report.line(runs[-1]), flush=True)
    facts = logs.prepare(size.of(JOBS[JOB.name]), args.out, size).facts
    result = {"machine": harness.machine(), "facts": facts, "runs": runs}
    harness.keep_json(args, HERE, "result_thousand.json", result)
    print(table(result))


if __name__ == "__main__":
    harness.guarded(main)
