"""Defaults on many jobs: different tasks, logs, rewards and models, the same methods and rates on all.

    python reproductions/panel/run.py [--only JOB …] [--methods METHOD …] [--rates RATE …] [--seeds N]
                                      [--jobs N] [--kept] [--out runs/panel] [--recorded] [--record]
                                      [--all-rates] [--measured] [--small]

A default that is tuned on one log may fail on another. Each job has a task, a start model that imitated a
careless teacher, and a log or prompts, all made by seeds; each method gives settings for the library's own
trainer, or the reason why it doesn't apply. Results are of 1,024 held-out prompts, one response each at
temperature 1, with the same random numbers for each policy.

First all with seed 0, one rate after the other. Then each method with the other seeds, at its one rate, the
best of all jobs, or with --all-rates at each. A third of the jobs is kept for the last look, and run with
`--kept` alone.

An interrupted run continues; what is complete in `--out` isn't run again, and with `--recorded` neither is
what the result beside this script has. Writes result.json and figure.png
into `--out`, with `--record` beside this script too, with the tables in README.md and that of
docs/guide/choosing.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.errors import Refused  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.panel import logs, play, report  # noqa: E402
from reproductions.panel.jobs import JOBS, chosen  # noqa: E402
from reproductions.panel.logs import FULL, SMALL, Size  # noqa: E402
from reproductions.panel.methods import METHODS, NOTHING, RATES  # noqa: E402
from reproductions.panel.play import Row, Run  # noqa: E402

RECORDED = "recorded.json"  # in --out: what was recorded of the jobs


def jobs_to_run(only: Sequence[str], kept: bool) -> list[str]:
    """Without `kept` none that are kept for the last look; one that is asked for by name needs it too."""
    names = chosen(only, JOBS, "--only")
    held_back = [name for name in names if JOBS[name].kept and not kept]
    if only and held_back:
        raise Refused(f"--only: {', '.join(held_back)}: kept for the last look. What to do: add --kept")
    return [name for name in names if name not in held_back]


def cells(jobs: Sequence[str], methods: Sequence[str], out: Path, size: Size) -> list[tuple[str, str]]:
    """(job, method) that can be run."""
    able = []
    for name in jobs:
        job, facts = size.of(JOBS[name]), facts_of(name, out, size)
        able += [(name, m) for m in methods if not isinstance(METHODS[m](job, facts), str)]
    return able


def first_rows(able: Sequence[tuple[str, str]], rates: Sequence[float]) -> list[Row]:
    """With seed 0, one rate after the other, the starts first."""
    rows = [Row(job, method, None) for job, method in able if method == NOTHING]
    trained = [cell for cell in able if cell[1] != NOTHING]
    return rows + [Row(job, method, rate) for rate in rates for job, method in trained]


def further_rows(
    able: Sequence[tuple[str, str]], runs: Sequence[Run], seeds: int, rates: Sequence[float] | None = None
) -> list[Row]:
    """The other seeds, at `rates` or at the one rate of each method; of one that has no run yet, none."""
    chosen = report.chosen_rates(runs)
    trained = [cell for cell in able if cell[1] != NOTHING and cell[1] in chosen]
    of = {method: [rate] if rates is None else rates for method, rate in chosen.items()}
    return [Row(job, m, rate, seed) for seed in range(1, seeds) for job, m in trained for rate in of[m]]


def facts_of(name: str, out: Path, size: Size) -> dict[str, Any]:
    """What is known of a job: as it was recorded, else from the job, which is made for it."""
    recorded: dict[str, dict[str, Any]] = {}
    if (out / RECORDED).exists():
        recorded = json.loads((out / RECORDED).read_text())
    return recorded[name] if name in recorded else logs.prepare(size.of(JOBS[name]), out, size).facts


def restore(out: Path) -> None:
    """Write the recorded runs into `out`, where they count as complete, and what is known of their jobs."""
    (out / "runs").mkdir(parents=True, exist_ok=True)
    result = json.loads((HERE / "result.json").read_text())
    (out / RECORDED).write_text(json.dumps(result["facts"]))
    for made in result["runs"]:
        done = out / "runs" / Row(*(made[name] for name in ("job", "method", "rate", "seed"))).file
        if not done.exists():
            done.write_text(json.dumps(made))


def complete_runs(able: Sequence[tuple[str, str]], out: Path) -> list[Run]:
    """All that are complete, at any rate and seed, by job and method."""
    found: list[Run] = [json.loads(file.read_text()) for file in (out / "runs").glob("*.json")]
    places = {cell: place for place, cell in enumerate(able)}
    of_cells = [made for made in found if (made["job"], made["method"]) in places]
    return sorted(
        of_cells,
        key=lambda made: (made["seed"], made["rate"] or 0.0, places[made["job"], made["method"]]),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    more: dict[str, Any] = {
        "recorded": harness.RECORDED,
        "measured": harness.MEASURED,
        "small": harness.SMALL,
    }
    more |= {"all-rates": "the other seeds at every rate", "kept": "the jobs of the last look too"}
    more |= {"only": [], "methods": [], "rates": list(RATES), "seeds": 3, "jobs": 1}  # runs at a time
    args = harness.parser(__doc__, "runs/panel", record=harness.RECORD, **more).parse_args(arguments)
    harness.at_least_1(seeds=args.seeds, jobs=args.jobs)
    if args.recorded:
        restore(args.out)
    size = SMALL if args.small else FULL
    jobs = jobs_to_run(args.only, args.kept)
    if args.measured:
        known = json.loads((args.out / RECORDED).read_text()) if (args.out / RECORDED).exists() else {}
        jobs = [n for n in jobs if n in known or (args.out / "jobs" / logs.slug(n)).exists()]
    able = cells(jobs, chosen(args.methods, METHODS, "--methods"), args.out, size)
    with harness.processes(args.jobs) as each:

        def run(rows: Sequence[Row]) -> list[Run]:
            found = []
            for made in each(partial(play.complete, out=args.out, size=size), rows):
                print(report.line(made), flush=True)
                found.append(made)
            return found

        if args.measured:
            runs = complete_runs(able, args.out)
        else:
            runs = run(first_rows(able, args.rates))
            runs += run(further_rows(able, runs, args.seeds, args.rates if args.all_rates else None))
    result = {
        "machine": harness.machine(),
        "rates": sorted({made["rate"] for made in runs if made["rate"]}),  # those that were run
        "seeds": sorted({made["seed"] for made in runs}),
        "facts": {name: facts_of(name, args.out, size) for name in jobs},
        "runs": runs,
    }
    harness.keep(args, HERE, result, report.figure(result))
    if args.record:
        harness.put(HERE / "README.md", report.tables(result))
        harness.put(report.GUIDE, report.advice(runs), report.OF_GUIDE)
    print(report.tables(result))


if __name__ == "__main__":
    harness.guarded(main)
