"""One response a prompt, by how many prompts there are: the recipe `feedback` beside what fits such a log.

    python reproductions/panel/sizes.py [--only KIND …] [--prompts 512 2048 8192] [--seeds 1]
                                        [--out runs/sizes] [--record] [--small]

Thumbs, ratings from 1 to 5, and thumbs of which a fifth is wrong, of 512, 2,048 and 8,192 prompts, with the
same 128 updates of 32 responses: eight, two and half an epoch. All logs of a kind are of one start. Prints a
table, and writes it with --record into result_sizes.json beside this script. An interrupted run
continues.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from reproductions import harness  # noqa: E402
from reproductions.panel import logs, play, report  # noqa: E402
from reproductions.panel.jobs import JOBS, Job  # noqa: E402
from reproductions.panel.logs import FULL, SMALL  # noqa: E402
from reproductions.panel.methods import NOTHING  # noqa: E402
from reproductions.panel.play import Row, Run  # noqa: E402
from reproductions.panel.run import chosen  # noqa: E402
from reproductions.panel.tasks import TASKS  # noqa: E402

PROMPTS, UPDATES = (512, 2048, 8192), 128
KINDS = {
    "thumbs": JOBS["thumbs"],
    "ratings": JOBS["stars"],
    "noisy thumbs": replace(JOBS["thumbs"], name="noisy thumbs", task=TASKS["swapped"], wrong=0.2),
}
# The rates at which these ended higher on "stars" and "thumbs" of the panel, of 3e-4 and 1e-3.
RATES = {"the default": 1e-3, "imitation of the good": 1e-3, "DRO": 1e-3, "KTO": 3e-4}


def job_of(kind: str, prompts: int, start: Path) -> Job:
    named = replace(KINDS[kind], name=f"{kind}, {prompts}", start=start)
    return replace(named, prompts=prompts, updates=UPDATES, kept=False)


def rows(job: Job, seeds: int) -> list[Row]:
    trained = [Row(job.name, method, rate, seed) for seed in range(seeds) for method, rate in RATES.items()]
    return [Row(job.name, NOTHING, None), *trained]


def table(runs: Sequence[Run], jobs: Sequence[Job]) -> str:
    """A row for each kind and size: held-out reward, the mean over the seeds."""
    cells = report.of_cells(runs)
    rows = []
    for job in jobs:
        found = [cells.get((job.name, method), []) for method in (NOTHING, *RATES)]
        if any(found):
            rows.append([job.name, *(report.number(report.mean(same)) for same in found)])
    head = ["log, prompts", "start", *(f"{method} ({rate:g})" for method, rate in RATES.items())]
    return harness.markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, "runs/sizes", record=harness.RECORD, small=harness.SMALL)
    parser.add_argument("--only", nargs="+", default=[], metavar="KIND")
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args(arguments)
    size = SMALL if args.small else FULL
    kinds = chosen(args.only, KINDS, "--only")
    starts = {kind: logs.prepare(size.of(KINDS[kind]), args.out, size).start for kind in kinds}
    jobs = [job_of(kind, prompts, starts[kind]) for kind in kinds for prompts in args.prompts]
    JOBS.update({job.name: job for job in jobs})
    runs = []
    for row in (row for job in jobs for row in rows(job, args.seeds)):
        runs.append(play.complete(row, args.out, size))
        print(report.line(runs[-1]), flush=True)
    result: dict[str, Any] = {"machine": harness.machine(), "runs": runs}
    result["facts"] = {job.name: logs.prepare(size.of(job), args.out, size).facts for job in jobs}
    harness.keep_json(args, HERE, "result_sizes.json", result)
    print(table(runs, jobs))


if __name__ == "__main__":
    harness.guarded(main)
